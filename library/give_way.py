#!/usr/bin/python
"""Ansible face of octoserve.give_way."""

from __future__ import annotations

DOCUMENTATION = r"""
module: give_way
short_description: Let a unit that was set up by hand give way to the service, and come back where nothing has passed
description:
  - Keeps how the unit stood beside the instance's deployments, until one of them has passed or it came back.
options:
  path:
    description: Folder of the instance's deployments.
    type: path
    required: true
  state:
    description:
      - V(aside) remembers how O(unit) stands and stops it. One that systemd does not know, or that neither runs nor
        starts at boot, is left alone.
      - V(back) starts what gave way as it stood, now and at boot.
      - V(retired) takes what gave way out of the boot for good.
    type: str
    choices: [aside, back, retired]
    required: true
  unit:
    description: The unit that gives way. Empty means none.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Let it give way
  give_way:
    path: /var/lib/octoserve/deployments/main
    state: aside
    unit: glm5.service
"""

RETURN = r"""
unit:
  description: The unit that gave way, came back or was retired; empty where none did.
  returned: success
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import give_way


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["aside", "back", "retired"], "required": True},
            "unit": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    folder, state, unit = Path(module.params["path"]), module.params["state"], module.params["unit"]
    try:
        if state == "aside":
            found = unit if unit and give_way.step_aside(folder, unit, dry=module.check_mode) else ""
        elif state == "back":
            found = give_way.come_back(folder, dry=module.check_mode)
        else:
            found = give_way.retire(folder, dry=module.check_mode)
    except (give_way.GiveWayError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=bool(found), unit=found)


if __name__ == "__main__":
    main()
