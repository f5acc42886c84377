#!/usr/bin/python
"""Ansible face of octoserve.throughput."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: throughput_gate
short_description: Measure how fast a served model answers, against a floor and what the host reached before
description:
  - Streams one prompt several times, one request at a time at temperature 0, and measures decode tokens per second
    (without the time to first token), time to first token, inter-token latency, and tokens per second end to end.
    Then it measures a mix of requests, and sweeps over concurrency and context.
  - Tokens are the server's C(usage), checked against the stream.
  - The mean of the trials must reach O(floor_tok_s). Once O(baseline) holds three earlier starts, a rate below their
    one-sided 99 % prediction interval is a regression.
  - A start that passed or regressed is added to O(baseline); those that regressed are not compared with. A start
    measured again is pooled with itself.
  - The work is a long job on the host that outlives the controller; progress is shown, and the next run attaches to it.
  - Whether the gate holds is told by RV(ok); the module fails only where O(baseline) is damaged or the job died.
options:
  name:
    description: Name of the long job.
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
  prompt:
    description: What the trials ask.
    type: str
    default: Count from 1 to 50, writing each number on a new line.
  max_tokens:
    description: Limit of one answer of the trials.
    type: int
    default: 512
  expected_tokens:
    description: Exact number of completion tokens of the trials' answer. 0 where it is not known.
    type: int
    default: 0
  trials:
    description: How many requests are measured.
    type: int
    default: 20
  warmup:
    description: How many requests go before; they show cold effects and are not judged.
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
  sweeps:
    description:
      - C(point_seconds), C(answer_tokens), C(requests) of each stream, C(concurrency), C(context) and C(mix)
        (C(concurrency), C(requests), C(prompt_tokens), C(answer_tokens)). What is left out has its default.
    type: dict
    default: {}
  max_num_seqs:
    description: Requests that the server answers at the same time; points with more are left out. 0 where not known.
    type: int
    default: 0
  request_options:
    description: Fields that go into every request, for instance C(chat_template_kwargs) of the profile.
    type: dict
    default: {}
  request_timeout:
    description: Longest time for one request, in seconds.
    type: int
    default: 300
  timeout:
    description: Longest time for the whole gate, in seconds.
    type: int
    default: 3600
  baseline:
    description: File with the rates of earlier starts of this profile and stack on this host.
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
- name: Count to 50, twenty times
  throughput_gate:
    name: throughput-octoserve-main
    base_url: http://127.0.0.1:8000
    expected_tokens: 100
    floor_tok_s: 50
    sweeps: {concurrency: [1, 4, 16], context: [0, 8192]}
    baseline: /var/lib/octoserve/baselines/glm5_ud_q4_k_xl__vllm-0.32.0.json
    start: 4f1a6a0c0d5e4a8c9a3d6f0d3b1f7a55
  register: throughput
  failed_when: not throughput.ok
"""

RETURN = r"""
ok:
  description: Whether the deployment is fast enough. False where nothing could be measured.
  type: bool
  returned: when finished
verdict:
  description: C(pass), C(fail), C(regression) or C(could-not-run).
  type: str
  returned: when finished
reason:
  description: Why the verdict is no pass.
  type: str
  returned: when finished
decode_tok_s:
  description: Decode rate over the trials; None where nothing was measured.
  type: dict
  returned: when finished
  sample: {mean: 56.91, stdev: 0.31, ci95: [56.76, 57.06], n: 20}
steady_tok_s:
  description: Decode rate that single disturbances do not move, and its standard error. Compared with earlier starts.
  type: dict
  returned: when finished
  sample: {mean: 57.02, stderr: 0.07}
ttft_ms:
  description: Mean time to first token of the trials.
  type: float
  returned: when finished
end_to_end_tok_s:
  description: Completion tokens over the whole time of a request, mean of the trials.
  type: float
  returned: when finished
details:
  description: Mean, stdev, ci95 and n of RV(ttft_ms) and RV(end_to_end_tok_s).
  type: dict
  returned: when finished
completion_tokens:
  description: Completion tokens of one answer of the trials.
  type: int
  returned: when finished
trials:
  description: The single trials.
  type: list
  elements: dict
  returned: when finished
warmup:
  description: The requests before the trials.
  type: list
  elements: dict
  returned: when finished
itl_ms:
  description: Inter-token latency of the trials in milliseconds - C(p50), C(p95), C(p99), C(max), C(n), C(histogram).
  type: dict
  returned: when finished
points:
  description:
    - The mix and the sweeps, one entry a load. C(reason) says why a point was left out or cut short; numbers are None
      where no request finished.
  type: list
  elements: dict
  returned: when finished
generator:
  description:
    - Share of one core that measuring took, events a second that it could have read, and whether it was the bottleneck.
  type: dict
  returned: when finished
  sample: {busy: 0.04, starved: 0.001, ceiling_events_s: 7400, bottleneck: false}
gpus:
  description:
    - Clocks, temperature, power and throttle reasons of each card meanwhile. None without NVML, for C(gpus_reason).
  type: list
  elements: dict
  returned: when finished
baseline:
  description: The earlier starts, how far below them the alarm is, and which slowdown is caught with 95 %.
  type: dict
  returned: when finished
  sample: {starts: 4, mean: 57.1, stdev: 0.4, change: -0.003, alarm_below: 55.4, smallest_slowdown: 0.029,
    detectable_slowdown: 0.048, alpha: 0.01, wider: false, regression: false, history: []}
"""

import traceback

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible.module_utils.octoserve import job, sweep_plan
from ansible.module_utils.octoserve.job import follow

try:
    from ansible.module_utils.octoserve import throughput
except ImportError:
    IMPORT_ERROR = traceback.format_exc()
else:
    IMPORT_ERROR = ""

ARGUMENTS = {
    "name": {"type": "str", "required": True},
    "base_url": {"type": "str", "required": True},
    "model": {"type": "str", "default": ""},
    "api_key": {"type": "str", "default": "", "no_log": True},
    "prompt": {"type": "str", "default": "Count from 1 to 50, writing each number on a new line."},
    "max_tokens": {"type": "int", "default": 512},
    "expected_tokens": {"type": "int", "default": 0},
    "trials": {"type": "int", "default": 20},
    "warmup": {"type": "int", "default": 1},
    "floor_tok_s": {"type": "float", "required": True},
    "on_regression": {"type": "str", "choices": ["warn", "fail"], "default": "warn"},
    "sweeps": {"type": "dict", "default": {}},
    "max_num_seqs": {"type": "int", "default": 0},
    "request_options": {"type": "dict", "default": {}},
    "request_timeout": {"type": "int", "default": 300},
    "timeout": {"type": "int", "default": 3600},
    "baseline": {"type": "path", "required": True},
    "start": {"type": "str", "required": True},
    "deployment": {"type": "str", "default": ""},
}
NOT_MEASURED = ("name", "api_key", "timeout", *job.ARGUMENTS)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec={**ARGUMENTS, **job.ARGUMENTS}, supports_check_mode=True)
    if IMPORT_ERROR:
        module.fail_json(msg=missing_required_lib("requests"), exception=IMPORT_ERROR)
    params = module.params
    if params["floor_tok_s"] <= 0 or params["trials"] < 1:
        module.fail_json(
            msg=f"found floor_tok_s {params['floor_tok_s']} and trials {params['trials']}, wanted more than 0 and at "
            "least 1: the gate could not fail"
        )
    try:
        points = sweep_plan.plan(sweep_plan.parse(params["sweeps"]))
    except ValueError as error:
        module.fail_json(msg=str(error))
    if module.check_mode:
        reason = (
            f"check mode: would ask {params['prompt']!r} {params['warmup']} + {params['trials']} times, then measure "
            f"{len(points)} points: {', '.join(point.name for point in points)}"
        )
        module.exit_json(changed=False, skipped=True, msg=reason, **throughput.could_not_run(reason))
    work = job.Job(
        params["name"],
        "throughput_worker",
        {name: value for name, value in params.items() if name not in NOT_MEASURED},
        secrets={"api_key": params["api_key"]},
        timeout=params["timeout"],
    )
    try:
        outcome = follow(work, params["_job_run"], params["_job_wait"])
    except job.JobError as error:
        module.fail_json(msg=str(error))
    result = outcome.finish(module)
    if result["ok"] and result["reason"]:
        module.warn(result["reason"])
    module.exit_json(changed=result.pop("kept"), msg=throughput.describe(result), **result)


if __name__ == "__main__":
    main()
