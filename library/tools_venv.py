#!/usr/bin/python
"""Ansible face of octoserve.venv."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tools_venv
short_description: Make a small virtual environment from a lock
description:
  - Installs exactly what a lock file names, from a wheelhouse archive or from the host's package index.
  - The environment is made beside its place and put there when it is whole.
options:
  path:
    description: Folder of the environment.
    type: path
    required: true
  python:
    description: Interpreter it is made from.
    type: path
    required: true
  requirements:
    description: The lock's text, with hashes.
    type: str
    required: true
  archive:
    description: Wheelhouse archive on the host, made by M(wheelhouse). Without it the package index is used.
    type: path
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Install the tools
  tools_venv:
    path: /opt/octoserve/tools
    python: /usr/bin/python3
    requirements: "{{ lookup('ansible.builtin.file', 'requirements/host.txt') }}"
    archive: /var/lib/octoserve/wheelhouses/host-tools-0123456789abcdef.tar
"""

RETURN = r"""
path:
  description: Folder of the environment.
  returned: always
  type: str
  sample: /opt/octoserve/tools
"""

import hashlib
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import venv, wheelhouse


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "requirements": {"type": "str", "required": True},
            "archive": {"type": "path"},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    lock = module.params["requirements"].rstrip("\n") + "\n"
    try:
        wanted = wheelhouse.pinned(lock)
        changed = not venv.is_installed(path, hashlib.sha256(lock.encode()).hexdigest())
        if changed and not module.check_mode:
            with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=module.tmpdir) as lock_file:
                lock_file.write(lock)
                lock_file.flush()
                archive = module.params["archive"]
                source = venv.Source(Path(lock_file.name), Path(archive) if archive else None)
                venv.make(path, module.params["python"], source)
    except (OSError, venv.VenvError, wheelhouse.WheelhouseError) as error:
        module.fail_json(msg=str(error))
    diff = {"before": "", "after": "\n".join(wanted) + "\n"} if changed else {}
    module.exit_json(changed=changed, path=str(path), diff=diff)


if __name__ == "__main__":
    main()
