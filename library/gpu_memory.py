#!/usr/bin/python
"""GPU facts through NVML, and waiting until the memory of every card is free."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_memory
short_description: Report GPUs and their memory, or wait until the memory is free
description:
  - Reads driver, cards, memory, the processes that hold it and the PCIe links through NVML, without torch.
  - With O(state=free) waits until every card has the free memory that vLLM wants before it starts
    (total times gpu_memory_utilization), and fails with the names of the holders when the time is over.
  - Changes nothing, in check mode neither; the memory numbers are right inside a container too, the
    processes are not, and then RV(cards[].processes_visible) is false.
options:
  state:
    description:
      - V(facts) reports at once.
      - V(free) waits, bounded by O(timeout).
    type: str
    choices: [facts, free]
    default: facts
  utilization:
    description:
      - Share of each card's memory that must be free, vLLM's gpu_memory_utilization.
      - Used with O(state=free).
    type: float
    default: 0.95
  timeout:
    description:
      - Seconds to wait at most. Used with O(state=free).
      - Check mode looks once and only warns where memory is held, since a real run stops the service before.
    type: float
    default: 300
  expected_count:
    description: Number of cards that must be there. Without it O(state=free) wants at least one.
    type: int
requirements:
  - nvidia-ml-py, which the role host installs into the tools venv; set ansible_python_interpreter to that venv.
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Read the GPUs
  gpu_memory:
  vars:
    ansible_python_interpreter: /opt/octoserve/tools/bin/python
  register: gpus

- name: Wait until all eight cards can take the model
  gpu_memory:
    state: free
    utilization: 0.95
    timeout: 300
    expected_count: 8
  vars:
    ansible_python_interpreter: /opt/octoserve/tools/bin/python
"""

RETURN = r"""
driver_version:
  description: Version of the NVIDIA driver.
  returned: success
  type: str
  sample: 590.48.01
nvml_version:
  description: Version of the NVML library.
  returned: success
  type: str
  sample: 13.590.48.01
cuda_version:
  description: Newest CUDA version that the driver serves.
  returned: success
  type: str
  sample: "13.1"
container:
  description: Container technology that the host runs in, none on a real or virtual machine.
  returned: success
  type: str
  sample: lxc
cards:
  description: The cards in NVML's order; sizes are bytes.
  returned: success
  type: list
  elements: dict
  sample:
    - index: 0
      uuid: GPU-5f8a6d2e-0000-0000-0000-000000000000
      name: NVIDIA RTX PRO 6000 Blackwell Server Edition
      pci_bus_id: "00000000:11:00.0"
      memory_total: 102641958912
      memory_free: 3511156736
      memory_used: 99130802176
      processes:
        - {pid: 4242, memory_used: 98460237824, user: octoserve, command: "VLLM::Worker_TP0", state: S}
      processes_visible: true
      pcie: {generation: 5, max_generation: 5, width: 16, max_width: 16}
free:
  description: Whether every card has the wanted free memory. False only in check mode.
  returned: success and O(state=free)
  type: bool
waited_s:
  description: Seconds until the memory was free.
  returned: success and O(state=free)
  type: float
  sample: 12.0
problem:
  description: What is wrong, for branching on it.
  returned: failure
  type: str
  sample: memory_not_free
"""

import dataclasses
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve import nvml


def main() -> None:
    """Ansible's entry point."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["facts", "free"], "default": "facts"},
            "utilization": {"type": "float", "default": 0.95},
            "timeout": {"type": "float", "default": 300},
            "expected_count": {"type": "int"},
        },
        supports_check_mode=True,
    )
    utilization, timeout_s = module.params["utilization"], module.params["timeout"]
    expected_count = module.params["expected_count"]
    wait = module.params["state"] == "free"
    result = {}
    try:
        nvml.check_limits(utilization, timeout_s)
        with nvml.session() as read:
            if wait and not module.check_mode:
                start = time.monotonic()
                gpus = nvml.wait_until_free(read, utilization, timeout_s, expected_count=expected_count)
                result = {"free": True, "waited_s": round(time.monotonic() - start, 1)}
            else:
                gpus = read()
                if wait or expected_count is not None:
                    nvml.check_count(gpus, expected_count)
                if wait:
                    short = nvml.short_cards(gpus, utilization)
                    result = {"free": not short, "waited_s": 0.0}
                    if short:
                        module.warn("not free now: " + nvml.describe_shortfalls(short, utilization))
    except ValueError as error:
        module.fail_json(msg=str(error))
    except nvml.GpuError as error:
        module.fail_json(msg=str(error), problem=error.problem)
    module.exit_json(changed=False, **dataclasses.asdict(gpus), **result)


if __name__ == "__main__":
    main()
