#!/usr/bin/python
"""Ansible face of octoserve.llama_build."""

from __future__ import annotations

DOCUMENTATION = r"""
module: llama_build
short_description: Build llama-gguf-split
description:
  - Builds the tool, and only what it needs, from an archive with llama.cpp's source, and installs it into a folder of
    its version. The build is a long job on the host that outlives the controller.
options:
  archive:
    description: Source archive on the host.
    type: path
    required: true
  sha256:
    description: SHA-256 of that archive. A tool that was built from it is left as it is.
    type: str
    required: true
  path:
    description: Folder of this version; the tool lies in its C(bin).
    type: path
    required: true
  timeout:
    description: Longest time in seconds.
    type: int
    default: 3600
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Build the tool
  llama_build:
    archive: /var/lib/octoserve/sources/source-0123456789abcdef.tar.gz
    sha256: 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
    path: /opt/octoserve/llama.cpp/0.3.36
"""

RETURN = r"""
tool:
  description: Path of the tool.
  returned: always
  type: str
  sample: /opt/octoserve/llama.cpp/0.3.36/bin/llama-gguf-split
version:
  description: What the tool says of itself.
  returned: when it was built
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import job, llama_build


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "archive": {"type": "path", "required": True},
            "sha256": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "timeout": {"type": "int", "default": 3600},
            **job.ARGUMENTS,
        },
        supports_check_mode=True,
    )
    params = module.params
    path = Path(params["path"])
    tool = str(path / "bin" / llama_build.TOOL)
    if params["_job_run"] is None:
        built = llama_build.built_from(path)
        if built and built == params["sha256"]:
            module.exit_json(changed=False, tool=tool)
        if module.check_mode:
            module.exit_json(changed=True, tool=tool)
    spec = {"archive": params["archive"], "sha256": params["sha256"], "path": str(path)}
    try:
        work = job.Job(f"llama-build-{path.name}", "llama_build", spec, timeout=params["timeout"])
        outcome = job.follow(work, params["_job_run"], params["_job_wait"])
    except job.JobError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=True, tool=tool, **outcome.finish(module))


if __name__ == "__main__":
    main()
