#!/usr/bin/python
"""Ansible face of octoserve.hand_made."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hand_made
short_description: Find the service that was set up by hand, and the model file that it serves
description:
  - Looks which systemd unit serves at an address, and which GGUF file its processes were started with. Changes nothing.
options:
  address:
    description: Address that the service listens on, and that Octoserve's will.
    type: str
    required: true
  port:
    description: Port of the same.
    type: int
    required: true
  unit:
    description: The unit, where it does not run or listens elsewhere.
    type: str
    default: ""
  model:
    description: Its file, where no command of the unit names it.
    type: str
    default: ""
  models_dir:
    description: Where a second name of the file would do, when the service cannot read the first one.
    type: path
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
- name: Find what was set up by hand
  hand_made:
    address: 127.0.0.1
    port: 8000
    models_dir: /var/lib/octoserve/models
"""

RETURN = r"""
unit:
  description: The unit's name.
  returned: success
  type: str
active:
  description: Whether it runs.
  returned: success
  type: bool
enabled:
  description: Whether it starts at boot.
  returned: success
  type: bool
user:
  description: The user that it runs as.
  returned: success
  type: str
fragment:
  description: The unit's file.
  returned: success
  type: str
model:
  description: Path of the GGUF file that it serves.
  returned: success
  type: str
size:
  description: Bytes of that file.
  returned: success
  type: int
"""

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import hand_made


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "unit": {"type": "str", "default": ""},
            "model": {"type": "str", "default": ""},
            "models_dir": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        found = hand_made.find(options["address"], options["port"], options["unit"], options["model"])
    except hand_made.HandMadeError as error:
        module.fail_json(msg=str(error))
    if reason := hand_made.unreadable(found.model, str(Path(options["models_dir"]) / Path(found.model).name)):
        module.fail_json(msg=reason)
    module.exit_json(changed=False, size=Path(found.model).stat().st_size, **asdict(found))


if __name__ == "__main__":
    main()
