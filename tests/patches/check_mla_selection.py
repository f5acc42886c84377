"""Which attention backends the patched stack offers a sparse MLA model. Runs in the stack's interpreter, no GPU.

Answers ``[{"capability": [12, 0], "kv_cache_dtype": "auto"}]`` in the first argument by one line of JSON: for each
the priorities, the backends that run, in order, why each other one does not, what the choice ends in, of ``backend``
where one is asked for, and what the log says of it. With ``fails_for`` a backend's own check fails for that cache.
"""

# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cuda_card  # before vLLM
import torch
from vllm import config as vllm_config
from vllm.platforms import cuda
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig


def answer(question: dict[str, Any]) -> dict[str, Any]:
    capability = DeviceCapability(*question["capability"])
    selector = AttentionSelectorConfig(
        head_size=question.get("head_size", 576),
        dtype=getattr(torch, question.get("dtype", "bfloat16")),
        kv_cache_dtype=question["kv_cache_dtype"],
        block_size=question.get("block_size"),
        use_mla=True,
        use_sparse=True,
    )
    glm5 = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "index_topk": 2048}
    hf_text_config = SimpleNamespace(**{**glm5, **question.get("config", {})})
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=hf_text_config),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    supports = TritonMLASparseBackend.supports_kv_cache_dtype

    def check(cache: str | None) -> bool:
        if cache is not None and cache == question.get("fails_for"):
            raise RuntimeError(f"found {cache}")
        return bool(supports(cache))

    named = AttentionBackendEnum[question["backend"]] if "backend" in question else None
    with (
        mock.patch.object(vllm_config, "get_current_vllm_config", lambda: config),
        mock.patch.object(vllm_config, "get_current_vllm_config_or_none", lambda: config),
        mock.patch.object(TritonMLASparseBackend, "supports_kv_cache_dtype", check),
        cuda_card.present(question["capability"], flashinfer=question.get("flashinfer", False)) as log,
    ):
        valid, reasons = cuda.CudaPlatform.get_valid_backends(capability, selector, num_heads=8)
        try:
            chosen = cuda.CudaPlatform.get_attn_backend_cls(named, selector, num_heads=8)
        except ValueError as error:
            chosen = str(error)
    priorities = cuda._get_backend_priorities(True, capability, 8, question["kv_cache_dtype"])
    return {
        "priorities": [backend.name for backend in priorities],
        "valid": [candidate.backend.name for candidate in valid],
        "reasons": {backend.name: whys for backend, (_, whys) in reasons.items()},
        "chosen": chosen,
        "log": log,
    }


print(json.dumps([answer(question) for question in json.loads(sys.argv[1])]))
