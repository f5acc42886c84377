#!/usr/bin/python
"""Ansible module: ask a served model questions and judge the answers."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: coherence_gate
short_description: Ask a served model a suite of questions and judge the answers
description:
  - Asks every case of a suite at temperature 0 and judges each answer by the case's expectations.
  - A case ends in C(pass), C(fail) or C(could-not-run). The last is never a pass.
  - The module fails only where the suite itself is wrong. Whether the gate holds is told by RV(ok).
options:
  base_url:
    description: Root of the OpenAI-compatible server, with or without C(/v1).
    type: str
    required: true
  model:
    description: Name of the served model. Empty for the first one that the server lists.
    type: str
    default: ""
  api_key:
    description: API key of the server, empty where it has none.
    type: str
    default: ""
  suite:
    description: The suite, as in C(files/gates/*.yml).
    type: dict
    required: true
  request_options:
    description: Fields that go into every request, for instance C(chat_template_kwargs) of the profile.
    type: dict
    default: {}
  concurrency:
    description: How many cases are asked at the same time.
    type: int
    default: 4
  timeout:
    description: Longest time for one case, in seconds.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Says what it would ask. Claims no pass.
requirements:
  - requests (in the host's tools venv)
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Ask the questions of the default suite
  coherence_gate:
    base_url: http://127.0.0.1:8000
    suite: "{{ lookup('ansible.builtin.file', 'files/gates/default.yml') | from_yaml }}"
    request_options:
      chat_template_kwargs:
        enable_thinking: false
  register: coherence
  failed_when: not coherence.ok
"""

RETURN = r"""
ok:
  description: Whether every case was asked and passed.
  type: bool
  returned: always
passed:
  description: Number of cases that passed.
  type: int
  returned: always
total:
  description: Number of cases in the suite.
  type: int
  returned: always
cases:
  description: One entry a case, in the order of the suite.
  type: list
  elements: dict
  returned: always
  sample:
    - name: capital-of-france
      verdict: pass
      prompt: What is the capital of France?
      answer: The capital of France is Paris.
      reason: ""
      seconds: 0.21
      finish_reason: stop
      usage: {prompt_tokens: 13, completion_tokens: 8}
seconds:
  description: Duration of the whole gate.
  type: float
  returned: always
"""

import time
import traceback

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

try:
    from ansible.module_utils.octoserve import coherence, openai_api
except ImportError:
    IMPORT_ERROR = traceback.format_exc()
else:
    IMPORT_ERROR = ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "base_url": {"type": "str", "required": True},
            "model": {"type": "str", "default": ""},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "suite": {"type": "dict", "required": True},
            "request_options": {"type": "dict", "default": {}},
            "concurrency": {"type": "int", "default": 4},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    if IMPORT_ERROR:
        module.fail_json(msg=missing_required_lib("requests"), exception=IMPORT_ERROR)
    ask = module.params
    try:
        cases = coherence.parse_suite(ask["suite"])
    except ValueError as error:
        module.fail_json(msg=f"the suite cannot be asked: {error}")
    if module.check_mode:
        result = coherence.summarize([coherence.not_asked(case, "check mode: not asked") for case in cases])
        message = f"would ask {len(cases)} cases: " + ", ".join(case.name for case in cases)
        module.exit_json(changed=False, skipped=True, msg=message, seconds=0.0, **result)
    client = openai_api.Client(ask["base_url"], ask["model"], ask["api_key"], ask["timeout"])
    started = time.monotonic()
    result = coherence.run_suite(client, cases, ask["request_options"], ask["concurrency"])
    module.exit_json(
        changed=False,
        msg=coherence.describe(result),
        seconds=round(time.monotonic() - started, 3),
        **result,
    )


if __name__ == "__main__":
    main()
