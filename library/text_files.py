#!/usr/bin/python
"""Ansible module: keep a folder that holds exactly the given text files."""

from __future__ import annotations

DOCUMENTATION = r"""
module: text_files
short_description: Keep a folder with exactly the given text files
description:
  - Writes files whose content differs and removes those of the same kind that are not named, in one call. Each file is
    replaced as a whole.
options:
  path:
    description: Folder; made when it is missing.
    type: path
    required: true
  files:
    description: Content by file name.
    type: dict
    required: true
  remove:
    description: Files that match this pattern and are not named are removed.
    type: str
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    description: Shows names and digests.
    support: full
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Copy a Python package
  text_files:
    path: /opt/octoserve/lib/octoserve
    files: {__init__.py: ""}
    remove: "*.py"
"""

RETURN = r"""
written:
  description: Names of files that were written.
  returned: success
  type: list
  elements: str
removed:
  description: Names of files that were removed.
  returned: success
  type: list
  elements: str
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import atomic


def listing(files: Mapping[str, str]) -> str:
    """One line a file with its digest: a diff of whole programs would hide everything else."""
    return "".join(f"{hashlib.sha256(files[name].encode()).hexdigest()[:12]}  {name}\n" for name in sorted(files))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "remove": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    folder, files = Path(module.params["path"]), module.params["files"]
    paths = [name for name in files if Path(name).name != name]
    if paths:
        module.fail_json(msg=f"wanted plain file names, found {', '.join(paths)}")
    try:
        there = {path.name: path.read_text() for path in folder.glob(module.params["remove"])}
        there.update({name: (folder / name).read_text() for name in files if (folder / name).exists()})
        written = sorted(name for name, text in files.items() if there.get(name) != text)
        removed = sorted(set(there) - set(files))
        if not module.check_mode:
            folder.mkdir(parents=True, exist_ok=True)
            for name in written:
                atomic.write_text(folder / name, files[name])
            for name in removed:
                (folder / name).unlink()
    except (OSError, UnicodeDecodeError) as error:
        module.fail_json(msg=f"{folder}: {error}")
    before, after = listing(there), listing(files)
    diff = {"before_header": str(folder), "after_header": str(folder), "before": before, "after": after}
    module.exit_json(changed=bool(written or removed), written=written, removed=removed, diff=diff)


if __name__ == "__main__":
    main()
