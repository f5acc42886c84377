#!/usr/bin/python
"""Ansible module: apply a stack's patch series to installed distributions, or verify it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: patch_series
short_description: Apply a stack's patch series, all of it or nothing
description:
  - Applies the patches that C(series.yml) lists to installed distributions, without fuzz. Every file must have
    the SHA-256 that C(series.yml) names, either as released or at some point of the series; a run that was
    killed is carried on from there.
  - A distribution of another version, a file that was edited, a path that leads out of C(site-packages) or a
    damaged patch is an error that names file and line, and nothing is changed.
  - Byte-code of changed files is removed.
options:
  series:
    description: Folder of the stack on the host, with C(series.yml) and the patches.
    type: path
    required: true
  python:
    description:
      - Interpreter whose C(site-packages) is patched.
      - It also reads C(series.yml), for which it needs PyYAML. vLLM depends on it.
    type: path
  site_packages:
    description: Folder of the distributions; C(series.yml) is then read by the module's own interpreter.
    type: path
  state:
    description:
      - V(applied) applies what is not applied yet.
      - V(verified) changes nothing and fails unless the whole series is applied.
    type: str
    choices: [applied, verified]
    default: applied
attributes:
  check_mode:
    description: Reports what would change, with every check that a real run makes.
    support: full
  diff_mode:
    description: Shows each changed file before and after.
    support: full
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Patch a release
  patch_series:
    series: /opt/octoserve/releases/vllm-0.32.0-1/stack
    python: /opt/octoserve/releases/vllm-0.32.0-1/bin/python

- name: Make sure that nobody edited it since
  patch_series:
    series: /opt/octoserve/releases/vllm-0.32.0-1/stack
    python: /opt/octoserve/releases/vllm-0.32.0-1/bin/python
    state: verified
"""

RETURN = r"""
patches:
  description: The patches in order.
  returned: success
  type: list
  elements: dict
  contains:
    file:
      description: Name of the patch.
      type: str
      sample: 0001-vllm-tell-the-version-of-any-build.patch
    distribution:
      description: Distribution that it changes.
      type: str
      sample: vllm
    version:
      description: Version that it is for.
      type: str
      sample: 0.32.0
    proof:
      description: Where its proof runs, C(cpu) or C(cuda).
      type: str
      sample: cpu
    changed:
      description: Whether this run applied it (or would, in check mode).
      type: bool
files:
  description: SHA-256 of every file that the series touches, after it; null for one that it deletes.
  returned: success
  type: dict
  sample: {vllm/entrypoints/cli/main.py: 4f5e6a...}
site_packages:
  description: The folder that was patched.
  returned: success
  type: str
"""

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import patches


def main() -> None:
    """Plan, and carry the plan out unless the caller only asks."""
    module = AnsibleModule(
        argument_spec={
            "series": {"type": "path", "required": True},
            "python": {"type": "path"},
            "site_packages": {"type": "path"},
            "state": {"type": "str", "choices": ["applied", "verified"], "default": "applied"},
        },
        required_one_of=[("python", "site_packages")],
        mutually_exclusive=[("python", "site_packages")],
        supports_check_mode=True,
    )
    python = module.params["python"]
    try:
        site_packages = patches.site_packages_of(python) if python else Path(module.params["site_packages"])
        series = patches.load_series(Path(module.params["series"]), python or sys.executable)
        patches.check_versions(series, site_packages)
        plan = patches.plan(series, site_packages)
        changes = plan.changes()
        if changes and module.params["state"] == "verified":
            module.fail_json(msg=f"{site_packages}: not patched: {', '.join(changes)}; apply the series")
        if not module.check_mode:
            patches.write(plan, site_packages)
    except patches.PatchError as error:
        module.fail_json(msg=str(error))
    result: dict[str, Any] = {
        "patches": [
            {
                "file": patch.file,
                "distribution": patch.distributions[0],
                "version": patch.version,
                "proof": patch.proof,
                "changed": plan.pending[patch.file],
            }
            for patch in series.patches
        ],
        "files": patches.final_hashes(series),
        "site_packages": str(site_packages),
        "diff": [
            {
                "before_header": path,
                "after_header": path,
                "before": plan.before[path] or "",
                "after": plan.after[path] or "",
            }
            for path in changes
        ],
    }
    module.exit_json(changed=bool(changes), **result)


if __name__ == "__main__":
    main()
