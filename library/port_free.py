#!/usr/bin/python
"""Ansible face of octoserve.listener."""

from __future__ import annotations

DOCUMENTATION = r"""
module: port_free
short_description: Fail when another program has the address of a service
description:
  - Tries whether a server could listen at the address, and names who has it when not.
  - A service that runs under O(unit) has its address by right.
options:
  address:
    description: Address that the service will listen on.
    type: str
    required: true
  port:
    description: Port that the service will listen on.
    type: int
    required: true
  unit:
    description: Unit of the service.
    type: str
    required: true
  gives_way:
    description: Unit that is stopped before the service starts; what it has is free by then.
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
- name: The service can have its address
  port_free:
    address: 127.0.0.1
    port: 8000
    unit: octoserve-main.service
"""

RETURN = r"""
held_by_unit:
  description: Whether the service itself has the address already.
  returned: success
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import listener

MAX_PORT = 65535


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "unit": {"type": "str", "required": True},
            "gives_way": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    address, port = module.params["address"], module.params["port"]
    if not 0 < port <= MAX_PORT:
        module.fail_json(msg=f"port is {port}, wanted 1 to {MAX_PORT}")
    try:
        free = listener.is_free(address, port)
        found = [] if free else listener.holders(address, port)
        held = listener.are_of_unit(found, module.params["unit"])
        if not free and not held and not listener.are_of_unit(found, module.params["gives_way"]):
            module.fail_json(msg=listener.describe(address, port, found))
    except OSError as error:
        module.fail_json(msg=f"this host cannot listen on {address}: {error.strerror}; wanted one of its own addresses")
    module.exit_json(changed=False, held_by_unit=held)


if __name__ == "__main__":
    main()
