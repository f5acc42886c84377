#!/usr/bin/python
"""Ansible face of octoserve.release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release_install
short_description: Install and patch a stack as a release of its own
description:
  - Makes a virtual environment from a lock, applies the stack's patch series, compiles all byte-code and tries the
    imports, beside the release's place; only a complete release is put there. A release is never changed afterwards.
  - The work is a long job on the host that outlives the controller; progress is shown, and the next run attaches to it.
options:
  name:
    description: Name of the release.
    type: str
    required: true
  path:
    description: Folder that holds the releases.
    type: path
    default: /opt/octoserve/releases
  python:
    description: Interpreter on the host that the environment is made from.
    type: path
    required: true
  stack:
    description: Folder on the host with the lock, C(series.yml) and the patches.
    type: path
    required: true
  requirements:
    description: File name of the lock in that folder.
    type: str
    required: true
  archive:
    description: Wheelhouse archive on the host. Without it the host's package index is used.
    type: path
  extra_index_urls:
    description: Further package indexes, used only without O(archive).
    type: list
    elements: str
    default: []
  imports:
    description: Modules that must import before the release counts as complete.
    type: list
    elements: str
    default: []
  operators:
    description: Operators that vLLM's kernels must have registered, such as C(_C.rms_norm).
    type: list
    elements: str
    default: []
  timeout:
    description: Longest time in seconds.
    type: int
    default: 3600
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Install the release
  release_install:
    name: vllm-0.32.0-cpu-0123456789
    python: /usr/bin/python3
    stack: /var/lib/octoserve/stacks/vllm-0.32.0-cpu-0123456789
    requirements: requirements-cpu.txt
    archive: /var/lib/octoserve/wheelhouses/vllm-0.32.0-cpu-0123456789abcdef.tar
    imports: [torch, vllm]
"""

RETURN = r"""
path:
  description: Folder of the release.
  returned: always
  type: str
  sample: /opt/octoserve/releases/vllm-0.32.0-cpu-0123456789
record:
  description: What is recorded of the release - versions, patches and the SHA-256 of every patched file.
  returned: when the release is complete
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import job, release

UV = "/opt/octoserve/tools/bin/uv"


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "path": {"type": "path", "default": "/opt/octoserve/releases"},
            "python": {"type": "path", "required": True},
            "stack": {"type": "path", "required": True},
            "requirements": {"type": "str", "required": True},
            "archive": {"type": "path"},
            "extra_index_urls": {"type": "list", "elements": "str", "default": []},
            "imports": {"type": "list", "elements": "str", "default": []},
            "operators": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 3600},
            **job.ARGUMENTS,
        },
        supports_check_mode=True,
    )
    params = module.params
    path = Path(params["path"]) / params["name"]
    stack = Path(params["stack"])
    try:
        if params["_job_run"] is None:
            record = release.read_record(path)
            if record:
                module.exit_json(changed=False, path=str(path), record=record)
            diff = {"before": "", "after": f"{path}\n"}
            if module.check_mode:
                module.exit_json(changed=True, path=str(path), diff=diff)
        spec = {
            "name": params["name"],
            "path": str(path),
            "python": params["python"],
            "stack": str(stack),
            "requirements": str(stack / params["requirements"]),
            "archive": params["archive"],
            "extra_index_urls": params["extra_index_urls"],
            "imports": params["imports"],
            "operators": params["operators"],
            "uv": UV,
        }
        work = job.Job(f"release-{params['name']}", "release_worker", spec, timeout=params["timeout"])
        outcome = job.follow(work, params["_job_run"], params["_job_wait"])
    except (job.JobError, release.ReleaseError) as error:
        module.fail_json(msg=str(error))
    diff = {"before": "", "after": f"{path}\n"}
    module.exit_json(changed=True, path=str(path), diff=diff, **outcome.finish(module))


if __name__ == "__main__":
    main()
