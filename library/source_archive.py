#!/usr/bin/python
"""Ansible face of octoserve.source."""

from __future__ import annotations

DOCUMENTATION = r"""
module: source_archive
short_description: Fetch a source tree once, as a verified archive
description:
  - Brings a source tree into a folder on the controller and keeps it between runs, so that a host without network can
    build from it.
options:
  kind:
    description: Where the source comes from.
    type: str
    choices: [sdist, archive, git]
    required: true
  url:
    description: Project name in the package index (sdist), https URL or path (archive), or repository (git).
    type: str
    required: true
  version:
    description: Version of the project (sdist), a label (archive), or a tag or full commit (git).
    type: str
    required: true
  sha256:
    description: SHA-256 of the archive; not asked of git.
    type: str
    default: ""
  path:
    description: Folder that keeps the archives.
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
- name: Bring llama.cpp
  source_archive:
    kind: git
    url: https://github.com/ggml-org/llama.cpp
    version: 0c1e57098
    path: .cache/sources
  delegate_to: localhost
"""

RETURN = r"""
archive:
  description: Path of the archive on the controller.
  returned: always
  type: str
file_name:
  description: Its name.
  returned: always
  type: str
  sample: source-0123456789abcdef.tar.gz
sha256:
  description: SHA-256 of the archive; where check mode did not fetch it, the one that is wanted, empty for git.
  returned: always
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import source
from ansible.module_utils.octoserve.digest import sha256_file


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "kind": {"type": "str", "choices": list(source.KINDS), "required": True},
            "url": {"type": "str", "required": True},
            "version": {"type": "str", "required": True},
            "sha256": {"type": "str", "default": ""},
            "path": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    origin = source.Origin(params["kind"], params["url"], params["version"], params["sha256"])
    archive = origin.path(Path(params["path"]))
    try:
        digest = sha256_file(archive) if archive.exists() else ""
        # One that was damaged since it was fetched is no better than none.
        changed = not digest or digest != (origin.sha256 or digest)
        if changed and module.check_mode:
            digest = origin.sha256
        elif changed:
            source.fetch(origin, archive)
            digest = sha256_file(archive)
    except (OSError, source.SourceError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=changed, archive=str(archive), file_name=archive.name, sha256=digest)


if __name__ == "__main__":
    main()
