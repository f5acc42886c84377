"""Questions to vLLM's workers about what they loaded and what runs."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch


class Questions:
    """Becomes part of the worker's class (``worker_extension_cls``)."""

    model_runner: Any
    _watch: Any

    def loaded(self) -> dict[str, Any]:
        """Which kernels, attention and kinds of layers this rank has."""
        from vllm_gguf_plugin import ops

        extension = getattr(ops, "_C_gguf", None)
        methods: Counter[str] = Counter()
        attention = set()
        for module in self.model_runner.get_model().modules():
            if (method := getattr(module, "quant_method", None)) is not None:
                methods[type(method).__name__] += 1
            if (implementation := getattr(module, "impl", None)) is not None:
                attention.add(type(implementation).__name__)
        return {
            "extension": Path(extension.__file__).name if extension else None,
            "operators": sorted(name for name in OPERATORS if hasattr(torch.ops._C_gguf, name)),
            "methods": dict(methods),
            "attention": sorted(attention),
        }

    def watch(self) -> None:
        """Start to record which operators and CUDA kernels run."""
        kinds = torch.profiler.supported_activities()
        self._watch = torch.profiler.profile(activities=kinds)
        self._watch.start()

    def watched(self) -> list[str]:
        """Names of what ran since `watch` that are GGUF's or attention's."""
        self._watch.stop()
        names = {event.key.partition("(")[0] for event in self._watch.key_averages()}
        return sorted(name for name in names if any(part in name.lower() for part in PARTS))


OPERATORS = ("ggml_dequantize", "ggml_mul_mat_vec_a8", "ggml_mul_mat_a8", "ggml_moe_a8", "ggml_moe_a8_vec")
PARTS = ("gguf", "ggml", "mul_mat", "moe_q", "moe_vec", "dequantize", "quantize_q8", "flash", "mla", "mqa", "top_k")
