#!/usr/bin/python
"""Ansible face of octoserve.reclaim."""

from __future__ import annotations

DOCUMENTATION = r"""
module: reclaim
short_description: Remove deployments that nobody will go back to, and releases that only they used
description:
  - Keeps the last O(keep) deployments whose gates passed, all that are newer, and what other instances use.
  - Never removes a model; names those that no kept deployment serves.
options:
  state_dir:
    description: Folder that holds C(deployments).
    type: path
    required: true
  models:
    description: Folder of the models.
    type: path
    default: /var/lib/octoserve/models
  releases:
    description: Folder of the releases.
    type: path
    required: true
  cache:
    description: Folder of the services' caches, one for each release.
    type: path
    default: /var/cache/octoserve
  instance:
    description: Whose deployments.
    type: str
    required: true
  keep:
    description: Deployments that passed and stay, at least 1.
    type: int
    default: 3
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Keep three deployments to go back to
  reclaim:
    state_dir: /var/lib/octoserve
    releases: /opt/octoserve/releases
    instance: main
"""

RETURN = r"""
removed:
  description: Folders that went, or would go in check mode.
  returned: success
  type: list
  elements: str
unused_models:
  description: Folders of models that no kept deployment serves; to be removed by hand.
  returned: success
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import deployment, reclaim


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "models": {"type": "path", "default": "/var/lib/octoserve/models"},
            "releases": {"type": "path", "required": True},
            "cache": {"type": "path", "default": "/var/cache/octoserve"},
            "instance": {"type": "str", "required": True},
            "keep": {"type": "int", "default": 3},
        },
        supports_check_mode=True,
    )
    params = module.params
    if params["keep"] < 1:
        module.fail_json(msg=f"keep is {params['keep']}, wanted at least 1: the current deployment always stays")
    paths = (Path(params[name]) for name in ("state_dir", "models", "releases", "cache"))
    places = reclaim.Places(*paths, instance=params["instance"])
    try:
        found = reclaim.surplus(places, params["keep"])
        folders = [*reclaim.leftovers(places), *found.folders]
        if not module.check_mode:
            reclaim.remove(folders)
    except (OSError, deployment.DeploymentError) as error:
        module.fail_json(msg=f"nothing more is removed: {error}")
    names = [str(path) for path in folders]
    module.exit_json(
        changed=bool(names),
        removed=names,
        unused_models=[str(path) for path in found.unused_models],
        diff={"before": "".join(f"{name}\n" for name in names), "after": ""},
    )


if __name__ == "__main__":
    main()
