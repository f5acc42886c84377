"""Tensor-parallel ranks on the CPU, as processes that share one import of vLLM. For scripts in the stack's interpreter.

Layers keep the file's quantized blocks, attention is dense, and config.json lies beside the model.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
#: Ends as a rank's part of the work: model, rank, number of ranks, port where they meet.
Work = Callable[[str, int, int, int], T]


@contextlib.contextmanager
def joined(model: str, rank: int, size: int, port: int, dtype: str) -> Iterator[Any]:
    """Be one rank of a gloo group, in vLLM's configuration for the model."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    torch.set_num_threads(1)
    config = EngineArgs(
        model=model,
        hf_config_path=str(Path(model).parent),
        hf_overrides={"index_topk": 0},
        quantization="gguf",
        skip_tokenizer_init=True,
        dtype=dtype,
        attention_backend="CPU_MLA",  # AMX_MLA, the choice of a CPU with AMX, has no float32
        enforce_eager=True,
        max_model_len=128,
        tensor_parallel_size=size,
        distributed_executor_backend="mp" if size > 1 else None,
    ).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        parallel_state.initialize_model_parallel(size)
        yield config


def run(work: Work[T], model: str, size: int) -> list[T]:
    """What each rank's work returns, by rank."""
    import vllm.model_executor.models.deepseek_v2  # noqa: F401  imported once, shared by the ranks

    os.environ["VLLM_DIST_IDENT"] = f"ranks-{os.getpid()}"  # names the shared memory of vLLM's CPU collectives
    port = 29500 + os.getpid() % 1000
    with ProcessPoolExecutor(size, get_context("fork")) as pool:  # unlike Pool, it notices a rank that was killed
        ranks = [pool.submit(_or_end, work, model, rank, size, port) for rank in range(size)]
        return [rank.result() for rank in ranks]


def _or_end(work: Work[T], model: str, rank: int, size: int, port: int) -> T:
    """At an error, end, so that the others do not wait."""
    try:
        return work(model, rank, size, port)
    except Exception:
        traceback.print_exc()
        os._exit(1)
