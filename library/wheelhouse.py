#!/usr/bin/python
"""Ansible face of octoserve.wheelhouse."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wheelhouse
short_description: Gather locked wheels into one archive
description:
  - Downloads every wheel that a lock file names, for the Python of another machine, and packs them into one tar.
  - Runs on the controller; the host then installs from the archive with no package index at all.
  - An archive is named by its lock and target, so that a finished one is never made again.
options:
  name:
    description: Name of the archive, before its digest.
    type: str
    required: true
  requirements:
    description: Lock file; every requirement pinned, with SHA-256 hashes.
    type: path
    required: true
  path:
    description: Folder that keeps the archives.
    type: path
    required: true
  python_version:
    description: Python that will install, such as C(3.11).
    type: str
    required: true
  machine:
    description: Its machine, as C(uname -m) prints it.
    type: str
    choices: [x86_64, aarch64]
    default: x86_64
  extra_index_urls:
    description: Package indexes that are asked when the configured one does not have everything.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Gather the wheels of the host's tools
  wheelhouse:
    name: host-tools
    requirements: requirements/host.txt
    path: .cache/wheelhouses
    python_version: "3.11"
  delegate_to: localhost
"""

RETURN = r"""
archive:
  description: Path of the archive on the controller.
  returned: always
  type: str
  sample: .cache/wheelhouses/host-tools-0123456789abcdef.tar
file_name:
  description: Its name.
  returned: always
  type: str
  sample: host-tools-0123456789abcdef.tar
wheels:
  description: How many wheels were gathered.
  returned: when an archive was made
  type: int
  sample: 7
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import wheelhouse


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "requirements": {"type": "path", "required": True},
            "path": {"type": "path", "required": True},
            "python_version": {"type": "str", "required": True},
            "machine": {"type": "str", "choices": list(wheelhouse.MACHINES), "default": "x86_64"},
            "extra_index_urls": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    lock_file = Path(module.params["requirements"])
    target = wheelhouse.Target(module.params["python_version"], module.params["machine"])
    result: dict[str, Any] = {}
    try:
        lock = lock_file.read_bytes()
        wheelhouse.pinned(lock.decode())
        archive = wheelhouse.archive_path(Path(module.params["path"]), module.params["name"], lock, target)
        changed = not archive.exists()
        if changed and not module.check_mode:
            result["wheels"] = wheelhouse.gather(lock_file, archive, target, module.params["extra_index_urls"])
    except (OSError, UnicodeDecodeError, wheelhouse.WheelhouseError) as error:
        module.fail_json(msg=f"{lock_file}: {error}")
    module.exit_json(changed=changed, archive=str(archive), file_name=archive.name, **result)


if __name__ == "__main__":
    main()
