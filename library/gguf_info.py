#!/usr/bin/python
"""Ansible module: what a GGUF file or a set of splits holds."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gguf_info
short_description: Read the header of a GGUF model and check that it is complete
description:
  - Reads the header of a GGUF file, little-endian, version 2 or 3, and checks every length, count and tensor
    extent against the size of the file. The data of tensors is not read.
  - With O(whole_set=true), a file named C(<prefix>-00001-of-00010.gguf) stands for all its splits, which
    must be there and belong together.
  - A file that is truncated, damaged, a Git LFS pointer, glued from splits or of another model is an error.
options:
  path:
    description: The file, or any one of the splits.
    type: path
    required: true
  whole_set:
    description: Whether to read the other splits too where the file is a split.
    type: bool
    default: true
attributes:
  check_mode:
    description: Only reads.
    support: full
  diff_mode:
    description: Only reads.
    support: none
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Read what the model holds
  gguf_info:
    path: /var/lib/octoserve/models/glm5/GLM-5-UD-Q4_K_XL-00001-of-00010.gguf
  register: model

- name: Show its architecture
  ansible.builtin.debug:
    var: model.gguf.architecture
"""

RETURN = r"""
gguf:
  description: What the file or the set holds.
  returned: success
  type: dict
  contains:
    architecture:
      description: The value of C(general.architecture).
      type: str
      sample: glm-dsa
    version:
      description: Version of the GGUF format.
      type: int
      sample: 3
    size:
      description: Bytes of all files together.
      type: int
    splits:
      description: Number of files.
      type: int
    tensors:
      description: Number of tensors.
      type: int
    tensor_bytes:
      description: Bytes of tensor data without padding.
      type: int
    parameters:
      description: Number of elements of all tensors.
      type: int
    types:
      description: For each ggml type, the number of its tensors and their bytes.
      type: dict
      sample: {Q4_K: {tensors: 225, bytes: 350000000000}}
    files:
      description: For each file C(path), C(size) and the number of C(tensors).
      type: list
      elements: dict
    metadata:
      description:
        - Metadata of the first file without its C(split.*) keys.
        - An array appears as C(type) and C(length), a string is cut after 200 characters.
      type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve.gguf import GgufError, read
from ansible.module_utils.octoserve.splits import facts, read_set, split_paths


def main() -> None:
    """Read, and return facts or the fault."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "whole_set": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    try:
        parts = read_set(split_paths(path)) if module.params["whole_set"] else (read(path),)
        module.exit_json(changed=False, gguf=facts(parts))
    except GgufError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{path}: cannot be read: {error.strerror}")


if __name__ == "__main__":
    main()
