"""vLLM's CUDA platform without a card: what it would choose on one. For scripts that run in a CPU stack's interpreter.

Where the CPU build lacks what a CUDA build has, the answer of a CUDA build stands in. Import this before vLLM.
"""

# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

FLASH_ATTENTION = "vllm.vllm_flash_attn.flash_attn_interface"
for name in ("vllm._C_stable_libtorch", FLASH_ATTENTION.rpartition(".")[0], FLASH_ATTENTION):  # not in the CPU build
    sys.modules[name] = ModuleType(name)
sys.modules[FLASH_ATTENTION].__dict__.update(is_fa_version_supported=lambda version: True, flash_attn_varlen_func=None)
sys.modules["vllm.v1.attention.backends.mla.cutlass_mla"] = None  # type: ignore[assignment]  # imports need a GPU


@contextlib.contextmanager
def present(capability: tuple[int, int], *, flashinfer: bool) -> Iterator[list[str]]:
    """A card of this compute capability, with FlashInfer's kernels or without (it needs nvcc). Yields a list that
    takes the log's lines about the choice."""
    from vllm import platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import flashinfer as availability
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90

    lines: list[str] = []

    def note(message: str, *args: object) -> None:
        lines.append(message % args)

    logger = mock.Mock(info=note, info_once=note)
    here = DeviceCapability(*capability)
    with (
        mock.patch.object(platforms, "current_platform", cuda.CudaPlatform()),
        mock.patch.object(cuda, "logger", logger),
        mock.patch.object(cuda.CudaPlatform, "get_device_capability", lambda device_id=0: here),
        mock.patch.object(availability, "has_flashinfer_sparse_mla_sm120", lambda: flashinfer),
        mock.patch.object(flashinfer_mla_sparse_sm90, "has_flashinfer_sm90_nope_mla", lambda: flashinfer),
    ):
        yield lines
