#!/usr/bin/python
"""Ansible face of octoserve.preflight."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Look at a host before an hour of loading
description:
  - Measures what a deploy relies on - cards, driver, the PCIe way between the cards, compiler, memory, disks, clock,
    address - and says for each what was measured, what is wanted and how to mend it. Needs no torch.
  - Does not fail because of a finding; RV(problems) holds the errors.
  - What cannot be read, inside a container or without the right, is V(cannot see), never V(ok).
  - Reads at most 256 MB of a disk, or writes and reads a temporary file of that size, each for 1.5 seconds at most.
options:
  gpu:
    description: The cards that are wanted. Without it everything about cards is left out.
    type: dict
    suboptions:
      count:
        description: Number of cards.
        type: int
        required: true
      name:
        description: Regular expression that each card's name must match.
        type: str
      memory_utilization:
        description: Share of each card's memory that vLLM may use.
        type: float
        default: 0.95
  cuda:
    description: CUDA that the stack is built on, such as V(13.0). Without it the driver's is not compared.
    type: str
  python:
    description: Python that the release is made from.
    type: path
    required: true
  python_version:
    description: Minor version that the stack's lock is for, such as V(3.12). Without it 3.11 or newer is wanted.
    type: str
  model_dir:
    description: Folder of the model's files.
    type: path
    required: true
  model_sources:
    description: List of C(url) and C(files) (C(path), C(size), C(sha256)), as in a profile.
    type: list
    elements: dict
    required: true
  model_prepare:
    description: Several splits are merged into one file, beside them and named after them, or served as they are.
    type: str
    choices: [merge, splits]
    required: true
  model_merged:
    description: File that the splits are merged to, where it is another.
    type: path
  model_link:
    description: Files of a folder of the host become hard links, which take no room.
    type: bool
    default: false
  start_timeout:
    description: Seconds that a start may take, within half of which the disk should deliver the model.
    type: float
    required: true
  disks:
    description: What else the deploy writes. Nothing is needed for a path that is there already.
    type: list
    elements: dict
    default: []
    suboptions:
      what:
        description: What it is, for the message.
        type: str
        required: true
      path:
        description: Where it goes.
        type: path
        required: true
      bytes:
        description: How large it is.
        type: int
        required: true
  address:
    description: Address that the service will listen on.
    type: str
    required: true
  port:
    description: Port that the service will listen on.
    type: int
    required: true
  unit:
    description: Unit of the service, which has its address by right.
    type: str
    required: true
  gives_way:
    description: Unit that is stopped before the service starts; what it has is free by then.
    type: str
    default: ""
  controller_time:
    description: The controller's clock, seconds since 1970. Without it the two clocks are not compared.
    type: float
requirements:
  - With O(gpu) nvidia-ml-py, which the role host installs into the tools venv; set ansible_python_interpreter to it.
attributes:
  check_mode:
    support: full
    details: Writes no temporary file, so a disk without a large file is not measured.
  diff_mode:
    support: none
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Look at a host with eight cards
  preflight:
    gpu: {count: 8, name: RTX PRO 6000, memory_utilization: 0.95}
    cuda: "13.0"
    python: /usr/bin/python3.12
    python_version: "3.12"
    model_dir: /var/lib/octoserve/models/GLM-5
    model_sources:
      - url: https://huggingface.co/unsloth/GLM-5-GGUF/resolve/main
        files:
          - {path: GLM-5-00001-of-00002.gguf, size: 49000000000}
          - {path: GLM-5-00002-of-00002.gguf, size: 48000000000}
    model_prepare: merge
    start_timeout: 2700
    disks:
      - {what: release, path: /opt/octoserve/releases/vllm-0.32.0-cuda-0123456789, bytes: 16000000000}
    address: 127.0.0.1
    port: 8000
    unit: octoserve-main.service
    controller_time: "{{ now().timestamp() }}"
  vars:
    ansible_python_interpreter: /opt/octoserve/tools/bin/python
  register: found

- name: Stop here if a deploy would fail later
  ansible.builtin.assert:
    that: found.ok
    fail_msg: "{{ found.problems | join('\n') }}"
"""

RETURN = r"""
ok:
  description: Whether there is no error among the findings.
  returned: success
  type: bool
findings:
  description: All findings; C(verdict) is V(ok), V(warning), V(error) or V(cannot see).
  returned: success
  type: list
  elements: dict
  sample:
    - name: IOMMU
      verdict: warning
      measured: "DMA-FQ: cards 0, 1; IOMMU on the kernel's command line: none"
      wanted: off, or passthrough (groups of type identity)
      mend: add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub, ...
lines:
  description: A line for each finding, for people.
  returned: success
  type: list
  elements: str
problems:
  description: The lines of the errors.
  returned: success
  type: list
  elements: str
counts:
  description: How many there are of each verdict.
  returned: success
  type: str
  sample: 0 errors, 2 warnings, 3 cannot be seen, 19 ok
container:
  description: Container technology that the host runs in, none on a real or virtual machine.
  returned: success
  type: str
  sample: lxc
"""

import dataclasses
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import fetch, finding, preflight, preflight_disk, preflight_gpu

DISK = {
    "what": {"type": "str", "required": True},
    "path": {"type": "path", "required": True},
    "bytes": {"type": "int", "required": True},
}
GPU = {
    "count": {"type": "int", "required": True},
    "name": {"type": "str"},
    "memory_utilization": {"type": "float", "default": 0.95},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "gpu": {"type": "dict", "options": GPU},
            "cuda": {"type": "str"},
            "python": {"type": "path", "required": True},
            "python_version": {"type": "str"},
            "model_dir": {"type": "path", "required": True},
            "model_sources": {"type": "list", "elements": "dict", "required": True},
            "model_prepare": {"type": "str", "choices": ["merge", "splits"], "required": True},
            "model_merged": {"type": "path"},
            "model_link": {"type": "bool", "default": False},
            "start_timeout": {"type": "float", "required": True},
            "disks": {"type": "list", "elements": "dict", "default": [], "options": DISK},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "unit": {"type": "str", "required": True},
            "gives_way": {"type": "str", "default": ""},
            "controller_time": {"type": "float"},
        },
        supports_check_mode=True,
    )
    options = module.params
    gpu = options["gpu"]
    try:
        files = fetch.wanted_files(options["model_sources"])
    except (fetch.FetchError, KeyError, TypeError) as error:
        module.fail_json(msg=f"model_sources cannot be used: {error}")
    folder, merged = Path(options["model_dir"]), None
    if options["model_prepare"] == "merge":
        merged = preflight_disk.merged_path(folder, files)
        if merged is not None and options["model_merged"]:
            merged = Path(options["model_merged"])
    disks = [(disk["what"], Path(disk["path"]), disk["bytes"]) for disk in options["disks"]]
    wanted = preflight.Wanted(
        gpus=preflight_gpu.WantedGpus(gpu["count"], gpu["name"], gpu["memory_utilization"]) if gpu else None,
        cuda=options["cuda"],
        python=options["python"],
        python_version=options["python_version"],
        model=preflight_disk.Model(folder, files, merged, options["model_link"]),
        needs=tuple(preflight_disk.Need(what, path, 0 if path.exists() else size) for what, path, size in disks),
        start_timeout_s=options["start_timeout"],
        address=options["address"],
        port=options["port"],
        unit=options["unit"],
        gives_way=options["gives_way"],
        controller_time=options["controller_time"],
    )
    host = finding.host_of()
    found = preflight.look(wanted, host, may_write=not module.check_mode)
    problems = preflight.problems(found)
    module.exit_json(
        changed=False,
        ok=not problems,
        findings=[dataclasses.asdict(one) for one in found],
        lines=[finding.line(one) for one in found],
        problems=problems,
        counts=preflight.counts(found),
        container=host.container,
    )


if __name__ == "__main__":
    main()
