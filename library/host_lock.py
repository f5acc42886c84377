#!/usr/bin/python
"""Ansible face of octoserve.lock."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_lock
short_description: Keep other runs off this host
description:
  - Takes the one lock of a host for this run of ansible-playbook, or fails and names who has it.
  - A lock counts while the connection is open over which it was taken, so that one of a controller that died is no
    obstacle. A run that finds one of its own controller looks whether that run still lives.
  - It warns where this run comes over another connection than the one over which it took the lock - that one has ended,
    and so long the lock did not count.
  - Which run asks is filled in by the action plugin of the same name.
options:
  path:
    description: Folder of the lock, made where it is missing.
    type: path
    required: true
  state:
    description: V(held) takes it, again and again without a change; V(free) gives it back, if this run has it.
    type: str
    choices: [held, free]
    default: held
  timeout:
    description: Seconds to wait for another run to end.
    type: int
    default: 90
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Keep other runs off this host
  host_lock:
    path: /var/lib/octoserve
"""

RETURN = r"""
news:
  description: Whether this run did not have it before.
  returned: with O(state=held), not in check mode
  type: bool
holder:
  description: Who has it.
  returned: when another run has it
  type: dict
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import lock

LOST = (
    "the connection over which this run took the lock of this host is gone, so another controller could have taken it "
    "meanwhile. Let Ansible keep one connection, with ControlMaster=auto and a ControlPersist that is long enough, as "
    "ssh_args in ansible.cfg says"
)


def holder(document: dict[str, Any]) -> lock.Holder:
    """A run as the action plugin tells it."""
    return lock.Holder(**{**document, "run": lock.Process(**document["run"])})


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
            "timeout": {"type": "int", "default": 90},
            "_run": {"type": "dict", "required": True},
            "_dead": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    folder, me = Path(module.params["path"]), holder(module.params["_run"])
    dead = holder(module.params["_dead"]) if module.params["_dead"] else None
    try:
        if module.check_mode:
            found = lock.read(folder)
            if found and not found.same_run(me) and lock.is_connected(found):
                module.warn(f"{found} is at work on this host, so what this check says may not hold when it has ended")
            module.exit_json(changed=False)
        if module.params["state"] == "free":
            lock.release(folder, me)
        else:
            before = lock.read(folder)
            news = lock.acquire(folder, me, dead)
            now = lock.read(folder)
            if not news and before and now and before.connection != now.connection:
                module.warn(LOST)
            module.exit_json(changed=False, news=news)
    except lock.LockedError as error:
        module.fail_json(msg=str(error), holder=asdict(error.holder))
    except OSError as error:
        module.fail_json(msg=f"the lock in {folder} cannot be written: {error}")
    # Not counted as a change of the host: it is gone after the run.
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
