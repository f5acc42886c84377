#!/usr/bin/python
"""Ansible face of octoserve.deployment."""

from __future__ import annotations

DOCUMENTATION = r"""
module: deployment
short_description: Record a deployment, or say how far one came
description:
  - Keeps immutable, numbered records of what was deployed, and the link C(current) to the one whose gates passed last.
options:
  path:
    description: Folder of the instance's deployments.
    type: path
    required: true
  state:
    description:
      - V(recorded) writes the next record, unless the newest one has this O(content).
      - V(passed) notes that the gates of O(number) passed and makes it C(current). It fails where that one went out of
        service meanwhile.
      - V(failed) notes that O(number) did not come up or did not pass; C(current) stays.
      - V(chosen) goes back to O(number), by default to C(current), notes newer ones as retired and returns its content.
      - V(verified) fails where the release or the model of O(number) is not as recorded, as its guard would at a start.
      - V(running) only looks which one runs, the newest that is not out of service, and lists all.
    type: str
    choices: [recorded, passed, failed, chosen, verified, running]
    required: true
  content:
    description: What is deployed - profile, release, model, unit.
    type: dict
  number:
    description: Which deployment passed, failed, is chosen or looked at.
    type: int
  releases:
    description: Folder of the releases; needed with O(state=verified).
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
- name: Record it
  deployment:
    path: /var/lib/octoserve/deployments/main
    state: recorded
    content: {profile: tiny_glm, release: vllm-0.32.0-cpu-0123456789}

- name: Its gates passed
  deployment:
    path: /var/lib/octoserve/deployments/main
    state: passed
    number: 3
"""

RETURN = r"""
number:
  description: Number of the deployment; null where O(state=running) or O(state=chosen) found none.
  returned: always
  type: int
  sample: 3
reached:
  description: How far that deployment has come; V(passed) where its gates passed.
  returned: with O(state=recorded)
  type: str
  sample: passed
deployments:
  description: Every deployment with number, state, when it came to that, profile, stack and release.
  returned: with O(state=running)
  type: list
  elements: dict
lines:
  description: The same for people, the newest first.
  returned: with O(state=running)
  type: list
  elements: str
content:
  description: What it is made of.
  returned: with O(state=chosen), where there is one
  type: dict
current:
  description: Number of the deployment that C(current) points at, null when none has passed yet.
  returned: always
  type: int
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import deployment, guard_deployment, release


def recorded(folder: Path, content: dict[str, Any], write: bool) -> dict[str, Any]:
    """Find or write the record."""
    number = deployment.find(folder, content)
    if number is not None:
        reached = deployment.state(folder, number)
        # One that is tried again is in service again.
        anew = reached in deployment.OUT
        if anew and write:
            deployment.set_state(folder, number, "recorded")
        states = {"before": {"state": reached}, "after": {"state": "recorded" if anew else reached}}
        return {"changed": anew, "number": number, "reached": reached, "diff": states}
    last = max(deployment.numbers(folder), default=0)
    before = deployment.read(folder, last) if last else {}
    number = deployment.record(folder, content) if write else deployment.next_number(folder)
    header = {"before_header": f"deployment {last}" if last else "nothing", "after_header": f"deployment {number}"}
    diff = {"before": before, "after": content, **header}
    return {"changed": True, "number": number, "reached": "recorded", "diff": diff}


def moved(folder: Path, number: int, state: str, write: bool) -> dict[str, Any]:
    """Note how far a deployment came."""
    before = {"state": deployment.state(folder, number), "current": deployment.current(folder)}
    if state == "passed" and before["state"] in deployment.OUT:
        raise deployment.DeploymentError(
            f"deployment {number} is {before['state']} since its gates began: the host was started anew, or another "
            "run was at work. What passed was another deployment; run again"
        )
    after = {"state": state, "current": number if state == "passed" else before["current"]}
    if write:
        deployment.read(folder, number)  # an absent or damaged record must not become current
        deployment.set_state(folder, number, state)
        if state == "passed":
            deployment.make_current(folder, number)
    return {"changed": before != after, "number": number, "diff": {"before": before, "after": after}}


def chosen(folder: Path, number: int | None, write: bool) -> dict[str, Any]:
    """Go back to a deployment."""
    number = deployment.current(folder) if number is None else number
    if number is None:
        return {"changed": False, "number": None}
    content = deployment.read(folder, number)
    before = {other: deployment.state(folder, other) for other in [number, *deployment.newer(folder, number)]}
    after = dict.fromkeys(before, "retired")
    after[number] = "recorded" if before[number] in deployment.OUT else before[number]
    if write:
        for other, state in after.items():
            deployment.set_state(folder, other, state)
    diff = {"before": before, "after": after}
    return {"changed": before != after, "number": number, "content": content, "diff": diff}


def verified(folder: Path, number: int, releases: Path) -> dict[str, Any]:
    """Look at a deployment as its guard would."""
    if found := list(guard_deployment.faults(folder, releases, number)):
        raise deployment.DeploymentError(f"deployment {number} is not as it was recorded: {'; '.join(found)}")
    return {"changed": False, "number": number}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "state": {
                "type": "str",
                "choices": ["recorded", "passed", "failed", "chosen", "verified", "running"],
                "required": True,
            },
            "content": {"type": "dict"},
            "number": {"type": "int"},
            "releases": {"type": "path"},
        },
        required_if=[
            ("state", "recorded", ["content"]),
            ("state", "passed", ["number"]),
            ("state", "failed", ["number"]),
            ("state", "verified", ["number", "releases"]),
        ],
        supports_check_mode=True,
    )
    params = module.params
    folder = Path(params["path"])
    try:
        if params["state"] == "recorded":
            result = recorded(folder, params["content"], not module.check_mode)
        elif params["state"] == "running":
            found = {"deployments": deployment.listed(folder), "lines": deployment.describe(folder)}
            result = {"changed": False, "number": deployment.running(folder), **found}
        elif params["state"] == "chosen":
            result = chosen(folder, params["number"], not module.check_mode)
        elif params["state"] == "verified":
            result = verified(folder, params["number"], Path(params["releases"]))
        else:
            result = moved(folder, params["number"], params["state"], not module.check_mode)
        current = deployment.current(folder)
    except (OSError, deployment.DeploymentError, release.ReleaseError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(current=current, **result)


if __name__ == "__main__":
    main()
