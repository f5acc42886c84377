#!/usr/bin/python
"""Ansible module: ask a served model questions and judge the answers."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: coherence_gate
short_description: Ask a served model suites of questions and judge the answers
description:
  - Asks every case of the suites at temperature 0 and judges each answer by the case's expectations. Scores fixed texts
    alone, again and under load. Kinds of cases are described in docs/gates.md.
  - A case ends in C(pass), C(fail) or C(could-not-run). The last is never a pass.
  - Runs as a job on the host that outlives the controller. The action plugin of the same name shows the progress.
  - The module fails only where a suite, a limit, a reference or the host's record is wrong. Whether the gate holds is
    told by RV(ok).
options:
  name:
    description: Name of the job; two gates of one name do not run at the same time.
    type: str
    required: true
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
  suites:
    description: The suites, as in C(files/gates/*.yml).
    type: list
    elements: dict
    required: true
  chat_template_args:
    description: C(chat_template_kwargs) of every request, as the profile serves.
    type: dict
    default: {}
  parsers:
    description: Parsers that the profile names, C(tool_call) and C(reasoning). Cases that need another do not apply.
    type: dict
    default: {}
  perplexity:
    description: Limit of the perplexity of each scored text, by the name of its case.
    type: dict
    default: {}
  references:
    description:
      - How likely each token of a scored text is, by the name of its case, each with C(identity) and C(logprobs). The
        text's perplexity may lie 5 % above and below, its log probabilities within the C(drift) of the case.
    type: dict
    default: {}
  record:
    description:
      - File on the host with what the first deploy measured of each scored text, its reference where O(references) does
        not name it.
    type: path
    required: true
  unit:
    description: Systemd unit of the service that answers.
    type: str
    required: true
  start:
    description:
      - Identity of the running start of the service (systemd's InvocationID). Where another one runs at the end, a
        first deploy records nothing and the module fails.
    type: str
    required: true
  bootstrap:
    description:
      - Whether this is the first deploy, which has no references. Where every case passes, what was measured is
        recorded in O(record). A text that has a reference keeps it.
    type: bool
    default: false
  told:
    description: What the record says of its origin, for instance C(stack) and C(deployment).
    type: dict
    default: {}
  concurrency:
    description: How many cases are asked at the same time.
    type: int
    default: 4
  order_seed:
    description: Seed that shuffles the order of the cases.
    type: int
  request_timeout:
    description: Longest time for one request, in seconds.
    type: int
    default: 600
  timeout:
    description: Longest time for the whole gate, in seconds.
    type: int
    default: 7200
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
    name: coherence-main
    base_url: http://127.0.0.1:8000
    suites:
      - "{{ lookup('ansible.builtin.file', 'files/gates/default.yml') | from_yaml }}"
    chat_template_args:
      enable_thinking: false
    perplexity:
      score-prose: 9.5
    record: /var/lib/octoserve/baselines/glm5_ud_q4_k_xl__reference.json
    unit: octoserve-main.service
    start: 4f1a6a0c0d5e4a8c9a3d6f0d3b1f7a55
  register: coherence
  failed_when: not coherence.ok
"""

RETURN = r"""
ok:
  description: Whether every case was asked and passed.
  type: bool
  returned: when finished
passed:
  description: Number of cases that passed.
  type: int
  returned: when finished
total:
  description: Number of cases that apply.
  type: int
  returned: when finished
cases:
  description: One entry a case. A private one has no prompt and no answer.
  type: list
  elements: dict
  returned: when finished
  sample:
    - name: capital-of-france
      kind: question
      verdict: pass
      prompt: What is the capital of France?
      answer: The capital of France is Paris.
      reasoning: ""
      tool_calls: []
      reason: ""
      private: false
      seconds: 0.21
      finish_reason: stop
      usage: {prompt_tokens: 13, completion_tokens: 8}
      measured: null
left_out:
  description: Cases that do not apply, each with the reason.
  type: list
  elements: dict
  returned: when finished
  sample: [{name: tool-call, reason: the profile names no tool_call parser}]
suites:
  description: Names of the suites.
  type: list
  elements: str
  returned: when finished
bootstrap:
  description: Whether this was asked as a first deploy.
  type: bool
  returned: when finished
recorded:
  description: Scored texts that later deploys are held to from now on.
  type: list
  elements: str
  returned: when finished
seconds:
  description: Duration of the whole gate.
  type: float
  returned: when finished
"""

import hashlib
import json
import traceback
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

try:
    from ansible.module_utils.octoserve import coherence, coherence_suite, job, reference
except ImportError:
    IMPORT_ERROR = traceback.format_exc()
else:
    IMPORT_ERROR = ""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "required": True},
    "base_url": {"type": "str", "required": True},
    "model": {"type": "str", "default": ""},
    "api_key": {"type": "str", "default": "", "no_log": True},
    "suites": {"type": "list", "elements": "dict", "required": True},
    "chat_template_args": {"type": "dict", "default": {}},
    "parsers": {"type": "dict", "default": {}},
    "perplexity": {"type": "dict", "default": {}},
    "references": {"type": "dict", "default": {}},
    "record": {"type": "path", "required": True},
    "unit": {"type": "str", "required": True},
    "start": {"type": "str", "required": True},
    "bootstrap": {"type": "bool", "default": False},
    "told": {"type": "dict", "default": {}},
    "concurrency": {"type": "int", "default": 4},
    "order_seed": {"type": "int"},
    "request_timeout": {"type": "int", "default": 600},
    "timeout": {"type": "int", "default": 7200},
}
SETTINGS = ("chat_template_args", "parsers", "perplexity", "references", "bootstrap", "concurrency", "order_seed")


def main() -> None:
    """Check the suites here, ask in a job."""
    # The host's journal gets no arguments: they hold what private cases ask.
    module = AnsibleModule(argument_spec={**ARGUMENTS, **job.ARGUMENTS}, supports_check_mode=True, no_log=True)
    if IMPORT_ERROR:
        module.fail_json(msg=missing_required_lib("requests"), exception=IMPORT_ERROR)
    ask = module.params
    try:
        suites = [coherence_suite.parse_suite(suite) for suite in ask["suites"]]
        cases, left_out = coherence.select(suites, ask["parsers"])
        coherence_suite.check_held(suites, ask["perplexity"], ask["references"])
        reference.load(Path(ask["record"]))
    except (ValueError, OSError) as error:
        module.fail_json(msg=f"the gate cannot be asked: {error}")
    # What is under way then still ends in time, and every other case has its verdict.
    limit_s = max(ask["timeout"] / 2, ask["timeout"] - 2 * ask["request_timeout"])
    settings = {**{key: ask[key] for key in SETTINGS}, "limit_s": limit_s}
    if not cases:
        module.fail_json(msg=f"no case applies: {left_out}: a gate that asks nothing proves nothing")
    if module.check_mode:
        result = coherence.not_asked(suites, coherence.Settings(**settings), "check mode: not asked")
        message = f"would ask {len(cases)} cases: " + ", ".join(case.name for case in cases)
        module.exit_json(changed=False, skipped=True, msg=message, recorded=[], **result)
    spec = {key: ask[key] for key in ("base_url", "model", "request_timeout", "record", "unit", "start", "told")}
    # Suites are handed over with the secrets, so that a private question stays in no file; the digest tells them apart.
    digest = hashlib.sha256(json.dumps(ask["suites"], sort_keys=True).encode()).hexdigest()
    secrets = {"api_key": ask["api_key"], "suites": ask["suites"]}
    spec.update(settings=settings, suites_sha256=digest)
    work = job.Job(ask["name"], "coherence_worker", spec, secrets, timeout=ask["timeout"])
    try:
        outcome = job.follow(work, ask["_job_run"], ask["_job_wait"])
    except job.JobError as error:
        module.fail_json(msg=str(error))
    result = outcome.finish(module)
    module.exit_json(changed=bool(result["recorded"]), msg=coherence.describe(result), **result)


if __name__ == "__main__":
    main()
