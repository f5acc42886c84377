#!/usr/bin/python
"""Ansible module: measure how fast a served model decodes, and judge it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: throughput_gate
short_description: Measure the decode rate of a served model against a floor and what the host reached before
description:
  - Streams one prompt several times at temperature 0 and measures decode tokens per second (without the time to
    first token), time to first token, and tokens per second end to end.
  - Tokens are the server's C(usage), checked against the stream.
  - The mean must reach O(floor_tok_s). Once O(baseline) holds three earlier starts, a mean below their one-sided
    99 % prediction interval is a regression.
  - A start that passed is added to O(baseline). A start measured again is pooled with itself.
  - Whether the gate holds is told by RV(ok); the module fails only where O(baseline) is damaged.
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
  prompt:
    description: What is asked.
    type: str
    default: Count from 1 to 50, writing each number on a new line.
  max_tokens:
    description: Limit of one answer.
    type: int
    default: 512
  expected_tokens:
    description: Exact number of completion tokens of the answer. 0 where it is not known.
    type: int
    default: 0
  trials:
    description: How many requests are measured.
    type: int
    default: 5
  warmup:
    description: How many requests go before, unmeasured.
    type: int
    default: 1
  floor_tok_s:
    description: Decode rate that must be reached, in tokens per second. More than 0, or the gate could not fail.
    type: float
    required: true
  on_regression:
    description: Whether a regression fails the gate or only warns. Below the floor always fails.
    type: str
    choices: [warn, fail]
    default: warn
  request_options:
    description: Fields that go into every request, for instance C(chat_template_kwargs) of the profile.
    type: dict
    default: {}
  timeout:
    description: Longest time for one request, in seconds.
    type: int
    default: 300
  baseline:
    description: File with the means of earlier starts of this profile and stack on this host.
    type: path
    required: true
  start:
    description: Identity of the running start of the service (systemd's InvocationID).
    type: str
    required: true
  deployment:
    description: Number of the deployment, for the record.
    type: str
    default: ""
attributes:
  check_mode:
    description: Says what it would measure. Claims no pass, writes no baseline.
    support: full
  diff_mode:
    description: A measurement has no before.
    support: none
requirements:
  - requests (in the host's tools venv)
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Count to 50, five times
  throughput_gate:
    base_url: http://127.0.0.1:8000
    expected_tokens: 100
    floor_tok_s: 50
    baseline: /var/lib/octoserve/baselines/glm5_ud_q4_k_xl__vllm-0.32.0.json
    start: 4f1a6a0c0d5e4a8c9a3d6f0d3b1f7a55
  register: throughput
  failed_when: not throughput.ok
"""

RETURN = r"""
ok:
  description: Whether the deployment is fast enough. False where nothing could be measured.
  type: bool
  returned: always
verdict:
  description: C(pass), C(fail), C(regression) or C(could-not-run).
  type: str
  returned: always
reason:
  description: Why the verdict is no pass.
  type: str
  returned: always
decode_tok_s:
  description: Decode rate over the trials; None where nothing was measured.
  type: dict
  returned: always
  sample: {mean: 56.91, stdev: 0.31, ci95: [56.53, 57.29], n: 5}
ttft_ms:
  description: Mean time to first token.
  type: float
  returned: always
end_to_end_tok_s:
  description: Completion tokens over the whole time of a request, mean.
  type: float
  returned: always
details:
  description: Mean, stdev, ci95 and n of RV(ttft_ms) and RV(end_to_end_tok_s).
  type: dict
  returned: always
completion_tokens:
  description: Completion tokens of one answer.
  type: int
  returned: always
trials:
  description: The single trials.
  type: list
  elements: dict
  returned: always
baseline:
  description: The earlier starts, and how far below them the alarm is.
  type: dict
  returned: always
  sample: {starts: 4, mean: 57.1, stdev: 0.4, change: -0.003, alarm_below: 55.1, smallest_slowdown: 0.036,
    alpha: 0.01, regression: false}
"""

import datetime
import traceback
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

try:
    from ansible.module_utils.octoserve import baseline, openai_api, throughput
except ImportError:
    IMPORT_ERROR = traceback.format_exc()
else:
    IMPORT_ERROR = ""

ARGUMENTS = {
    "base_url": {"type": "str", "required": True},
    "model": {"type": "str", "default": ""},
    "api_key": {"type": "str", "default": "", "no_log": True},
    "prompt": {"type": "str", "default": "Count from 1 to 50, writing each number on a new line."},
    "max_tokens": {"type": "int", "default": 512},
    "expected_tokens": {"type": "int", "default": 0},
    "trials": {"type": "int", "default": 5},
    "warmup": {"type": "int", "default": 1},
    "floor_tok_s": {"type": "float", "required": True},
    "on_regression": {"type": "str", "choices": ["warn", "fail"], "default": "warn"},
    "request_options": {"type": "dict", "default": {}},
    "timeout": {"type": "int", "default": 300},
    "baseline": {"type": "path", "required": True},
    "start": {"type": "str", "required": True},
    "deployment": {"type": "str", "default": ""},
}


def measure(module: AnsibleModule, path: Path) -> dict[str, Any]:
    """Measure, judge, and let the baseline grow where the start passed."""
    ask = module.params
    history = baseline.load(path)
    result = throughput.gate(
        openai_api.Client(ask["base_url"], ask["model"], ask["api_key"], ask["timeout"]),
        throughput.Limits(ask["floor_tok_s"], ask["expected_tokens"] or None),
        lambda mean: baseline.compare(history, ask["start"], mean),
        ask["on_regression"] == "fail",
        trials=ask["trials"],
        warmup=ask["warmup"],
        prompt=ask["prompt"],
        max_tokens=ask["max_tokens"],
        options=ask["request_options"],
    )
    if result["verdict"] != throughput.PASSED:
        return {**result, "changed": False}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    mean = result["decode_tok_s"]["mean"]
    baseline.append(path, baseline.Start(ask["start"], now, ask["deployment"], mean, ask["trials"]))
    return {**result, "changed": True}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    if IMPORT_ERROR:
        module.fail_json(msg=missing_required_lib("requests"), exception=IMPORT_ERROR)
    ask = module.params
    if ask["floor_tok_s"] <= 0 or ask["trials"] < 1:
        module.fail_json(
            msg=f"found floor_tok_s {ask['floor_tok_s']} and trials {ask['trials']}, wanted more than 0 and at "
            "least 1: the gate could not fail"
        )
    if module.check_mode:
        reason = f"check mode: would ask {ask['prompt']!r} {ask['warmup']} + {ask['trials']} times"
        module.exit_json(changed=False, skipped=True, msg=reason, **throughput.could_not_run(reason))
    try:
        result = measure(module, Path(ask["baseline"]))
    except (ValueError, OSError) as error:
        module.fail_json(msg=f"the baseline cannot be kept: {error}")
    if result["ok"] and result["reason"]:
        module.warn(result["reason"])
    module.exit_json(msg=throughput.describe(result), **result)


if __name__ == "__main__":
    main()
