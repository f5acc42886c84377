#!/usr/bin/python
"""Ansible face of octoserve.startup."""

from __future__ import annotations

DOCUMENTATION = r"""
module: service_ready
short_description: Wait until a model server answers a real completion
description:
  - Follows the start of a service and shows what its journal says meanwhile. Ready means that it completed a prompt,
    not that a port is open.
  - A start that dies, or one that O(refused) tells of, ends the wait at once, with the cause that the journal names.
  - Runs under the host's tools venv, which has requests.
options:
  unit:
    description: Unit of the service.
    type: str
    required: true
  base_url:
    description: Address of the server, without C(/v1).
    type: str
    required: true
  model:
    description: Name under which the model is served.
    type: str
    required: true
  api_key:
    description: Key of the server.
    type: str
    default: ""
  timeout:
    description: Longest time in seconds from the start of the unit.
    type: int
    default: 2700
  refused:
    description:
      - What systemd said when it was told to start the unit and did not, empty where it did. A guard that refuses ends
        the start before there is a server; which one, and what it found, only the journal knows.
    type: str
    default: ""
  since:
    description: When the unit was told to start, as journalctl takes it; where that start is looked for.
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
- name: Wait for a real completion
  service_ready:
    unit: octoserve-main.service
    base_url: http://127.0.0.1:8000
    model: glm-5
  vars:
    ansible_python_interpreter: /opt/octoserve/tools/bin/python
"""

RETURN = r"""
seconds:
  description: Time that the wait took.
  returned: when it answered
  type: float
  sample: 21.4
answer:
  description: What it completed.
  returned: when it answered
  type: str
"""

import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import job, startup
from ansible.module_utils.octoserve.openai_api import ApiError, Client

PROMPT = "Say hello."
REQUEST_TIMEOUT_S = 60.0
POLL_S = 0.5
#: A server that is up but will never answer this request: wrong key, unknown model, bad request.
REFUSED = (400, 401, 403, 404, 422)


def now() -> float:
    """Seconds since the host's boot: the same for every call, and nobody sets this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> None:
    """Run the module. The action plugin calls it again until it is finished, as it does for long jobs."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "base_url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "timeout": {"type": "int", "default": 2700},
            "refused": {"type": "str", "default": ""},
            "since": {"type": "str", "default": ""},
            **job.ARGUMENTS,
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, msg="check mode: the service was not asked")
    unit = module.params["unit"]
    # The wait as a whole is bounded from its first call, whose time the later calls carry on.
    began = float(module.params["_job_run"] or now())
    client = Client(
        module.params["base_url"], module.params["model"], module.params["api_key"] or None, REQUEST_TIMEOUT_S
    )
    until = time.monotonic() + module.params["_job_wait"]
    refusal = ""
    while True:
        try:
            state = startup.unit_state(unit)
        except (OSError, subprocess.SubprocessError) as error:
            module.fail_json(msg=f"systemd does not answer about {unit}: {error}")
        if said := module.params["refused"]:
            # Of all attempts since: the next one may be under way already.
            lines = startup.journal(unit, since=module.params["since"])
            cause = startup.refusal(lines) or f"{said.strip()} {startup.cause(startup.journal(unit, state.invocation))}"
            module.fail_json(
                msg=f"{unit} did not start: {cause}. All of it: journalctl -u {unit}", journal=lines[-100:]
            )
        if not state.alive:
            lines = startup.journal(unit, state.invocation)
            module.fail_json(
                msg=f"{unit} died while starting ({state.result}, exit status {state.exit_status}): "
                f"{startup.cause(lines)}. All of it: journalctl -u {unit}",
                journal=lines[-100:],
            )
        try:
            answer = client.chat([{"role": "user", "content": PROMPT}], max_tokens=1)
            module.exit_json(changed=False, finished=True, seconds=round(now() - began, 1), answer=answer.text)
        except ApiError as error:
            refusal = str(error)
            if error.status in REFUSED:
                module.fail_json(msg=f"{unit} runs, but refuses a completion: {refusal}")
        waited = now() - began
        if waited > module.params["timeout"]:
            module.fail_json(
                msg=f"{unit} runs, but gave no completion within {module.params['timeout']} s. Its last answer: "
                f"{refusal}. Its journal: {startup.last_words(startup.journal(unit, state.invocation))}"
            )
        if time.monotonic() >= until:
            words = startup.last_words(startup.journal(unit, state.invocation))
            module.exit_json(
                changed=False, finished=False, job_run=str(began), progress={"text": f"{waited:.0f} s: {words}"}
            )
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
