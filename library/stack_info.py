#!/usr/bin/python
"""Ansible face of octoserve.stack."""

from __future__ import annotations

DOCUMENTATION = r"""
module: stack_info
short_description: Read a stack and name its release
description:
  - Checks the folder of a stack and says which release one of its variants makes. Runs on the controller.
options:
  path:
    description: Folder of the stack.
    type: path
    required: true
  variant:
    description: Which build of it, such as C(cpu) or C(cuda).
    type: str
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Name the release
  stack_info:
    path: files/patches/vllm-0.32.0
    variant: cpu
  delegate_to: localhost
"""

RETURN = r"""
release:
  description: Name of the release; any change of the lock or a patch makes another.
  returned: always
  type: str
  sample: vllm-0.32.0-cpu-0123456789
stack:
  description: Name of the stack.
  returned: always
  type: str
  sample: vllm-0.32.0
python:
  description: Python that the lock was resolved for.
  returned: always
  type: str
  sample: "3.11"
requirements:
  description: Path of the lock on the controller.
  returned: always
  type: str
extra_index_urls:
  description: Package indexes for what the configured one does not have.
  returned: always
  type: list
  elements: str
imports:
  description: Modules that must import before a release is complete.
  returned: always
  type: list
  elements: str
operators:
  description: Operators that vLLM's kernels must have registered before a release is complete.
  returned: always
  type: list
  elements: str
files:
  description: Names of the files that a host needs to make the release.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

import yaml
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import stack


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "variant": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    folder = Path(module.params["path"])
    try:
        document = yaml.safe_load((folder / "stack.yml").read_text())
        variant = stack.variant(folder, document, module.params["variant"])
        release = stack.release_name(variant)
    except (OSError, yaml.YAMLError, stack.StackError) as error:
        module.fail_json(msg=f"stack {folder.name}: {error}")
    module.exit_json(
        changed=False,
        release=release,
        stack=variant.stack,
        python=variant.python,
        requirements=str(variant.lock),
        extra_index_urls=list(variant.extra_index_urls),
        imports=list(variant.imports),
        operators=list(variant.operators),
        files=[variant.lock.name, "series.yml", *sorted(path.name for path in folder.glob("*.patch"))],
    )


if __name__ == "__main__":
    main()
