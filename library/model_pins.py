#!/usr/bin/python
"""Ansible face of octoserve.model_pins."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_pins
short_description: Fail before a model's file that a proven deployment relies on is replaced
description:
  - Compares the digests that a profile wants with those that the records of deployments name whose gates passed.
options:
  state_dir:
    description: Folder that holds C(deployments/<instance>/).
    type: path
    required: true
  folder:
    description: The model's folder.
    type: path
    required: true
  sources:
    description: The profile's sources, as C(hub_fetch) takes them.
    type: list
    elements: dict
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
- name: Nobody relies on what would be replaced
  model_pins:
    state_dir: /var/lib/octoserve
    folder: /var/lib/octoserve/models/tiny
    sources:
      - url: https://huggingface.co/example/tiny/resolve/main
        files: [{path: tiny.gguf, sha256: 0000000000000000000000000000000000000000000000000000000000000000}]
"""

RETURN = r"""
# Only success or a message.
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import model_pins
from ansible.module_utils.octoserve.deployment import DeploymentError
from ansible.module_utils.octoserve.fetch import FetchError, wanted_files


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "folder": {"type": "path", "required": True},
            "sources": {"type": "list", "elements": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        wanted = wanted_files(options["sources"])
        found = model_pins.conflicts(Path(options["state_dir"]), Path(options["folder"]), wanted)
    except (DeploymentError, FetchError) as error:
        module.fail_json(msg=str(error))
    if found:
        advice = (
            f"Replacing files in {options['folder']} would leave no way back to it. Give the new model a name of its "
            "own (model.name in the profile); or, where there is no room for both, give the way back up: "
            "-e octoserve_replace_model=true"
        )
        module.fail_json(msg="\n".join([*found, advice]))
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
