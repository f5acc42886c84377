"""What keeps the sparse MLA kernel busy at 64 heads: the time of each part of it, and of other configurations.

    python tests/gpu/triton_mla_sparse_limits.py OUT.json [--commit COMMIT]

Each variant is the kernel with one part taken out of its loop, so that its answers are wrong and its time tells what
the part costs; the parts overlap, so that their costs do not add up. Needs torch with CUDA and Triton. Compiles all
first, a process for each variant.
"""

# The lint environment has neither torch nor Triton.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "module_utils"), str(ROOT / "tests/patches")]

import sparse_kernel
from sparse_kernel import Batch

from tests.gpu import triton_mla_sparse
from tests.gpu.triton_mla_sparse import empty, microseconds

HEADS, TOKENS, CONTEXT = 64, 128, 8192
SOFTMAX = """        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # Before the first valid slot both are -inf, whose difference is NaN.
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        rescale_1d = tl.exp2(highest - finite)
        rescale = rescale_1d[:, None]
        weights = tl.exp2(scores - finite[:, None])
        highest = new_highest
"""
VALUES = "".join(f"        acc{part} = tl.dot(weights, kv{part}, acc{part} * rescale)\n" for part in range(4))
KEYS = """        scores = tl.dot(q0, tl.trans(kv0)) + tl.dot(q1, tl.trans(kv1))
        scores += tl.dot(q2, tl.trans(kv2)) + tl.dot(q3, tl.trans(kv3))
"""
ROPE = "            scores += tl.dot(q_rope, tl.trans(k_rope))\n"
SUMS = """        if SUM_LATER:
            sums = sums * rescale + weights
        else:
            sums = sums * rescale_1d + tl.sum(weights, axis=1)
        weights = weights.to(kv0.dtype)
"""
KEY_PRODUCTS = tuple(f"tl.dot(q{part}, tl.trans(kv{part})) * scale_log2e" for part in range(4))
BEHIND_A_BRANCH = """        if num_splits > 0:
            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            rescale_1d = tl.exp2(highest - finite)
            exact_weights = tl.exp2(scores - finite[:, None])
            sums = sums * rescale_1d + tl.sum(exact_weights, axis=1)
            weights = exact_weights.to(kv0.dtype)
            highest = new_highest
        else:
            weights = scores.to(kv0.dtype)
            rescale_1d = highest
        rescale = rescale_1d[:, None]
"""
LOADED = ("", " + PART", " + 2 * PART", " + 3 * PART")


def latent_in_parts(number: int) -> list[tuple[str, str]]:
    """The latent in one or two parts where the kernel has four: fewer, longer chains of products."""
    edits = [("PART: tl.constexpr = LATENT // 4", f"PART: tl.constexpr = LATENT // {number}")]
    for line in (
        "    q{i} = tl.load(q_ptrs{at}, mask=is_head, other=0.0)\n",
        "        kv{i} = tl.load(kv_ptrs{at}, mask=row_is_valid, other=0.0)\n",
        "    acc{i} = tl.zeros([BLOCK_H, PART], dtype=tl.float32)\n",
        "        acc{i} = tl.dot(weights, kv{i}, acc{i} * rescale)\n",
        "    tl.store(out_ptrs{at}, (acc{i} * inverse).to(dtype), mask=is_head)\n",
    ):
        written = [line.format(i=i, at=at) for i, at in enumerate(LOADED)]
        edits += [(text, text if i < number else "") for i, text in enumerate(written)]
    products = "".join(f"        scores = tl.dot(q{i}, tl.trans(kv{i}), scores)\n" for i in range(1, number))
    return [*edits, (KEYS, "        scores = tl.dot(q0, tl.trans(kv0))\n" + products)]


#: Texts of the kernel and what stands there instead.
VARIANTS: dict[str, list[tuple[str, str]]] = {
    "whole": [],
    "the same rows at every step, from L1 and L2": [
        (
            "            rows = next_slots.to(tl.int64) * kv_stride_row\n",
            "            rows = tl.arange(0, BLOCK_N).to(tl.int64) * kv_stride_row\n",
        )
    ],
    "no softmax": [(SOFTMAX, "        rescale_1d = 1.0\n        rescale = 1.0\n        weights = scores\n")],
    "no products with the values": [
        (VALUES, "".join(f"        acc{part} += tl.sum(weights, axis=1)[:, None]\n" for part in range(4)))
    ],
    "no products with the keys": [
        (
            KEYS,
            "        scores = tl.sum(kv0.to(tl.float32), axis=1)[None, :] + tl.zeros([BLOCK_H, BLOCK_N], tl.float32)\n",
        ),
        (ROPE, "            scores += tl.sum(k_rope.to(tl.float32), axis=1)[None, :]\n"),
    ],
    "half of the products with the keys": [(KEYS.splitlines(keepends=True)[1], "")],
    # These three answer as the whole one does. Triton gives all warps the same rows of a product whose result goes into
    # another one; behind a branch, which is always taken, it does not see that.
    "the products with the keys once": [
        (KEYS, "".join(f"        scores {'+' * (i > 0)}= {product}\n" for i, product in enumerate(KEY_PRODUCTS))),
        (ROPE, f"            scores += {KEY_PRODUCTS[0].replace('q0', 'q_rope').replace('kv0', 'k_rope')}\n"),
        ("tl.where(is_valid[None, :], scores * scale_log2e,", "tl.where(is_valid[None, :], scores,"),
        (SOFTMAX + SUMS, BEHIND_A_BRANCH),
        ("SUM_LATER: tl.constexpr = BLOCK_H * BLOCK_N <= 2048", "SUM_LATER: tl.constexpr = False"),
    ],
    "the latent in one part": latent_in_parts(1),
    "the latent in two parts": latent_in_parts(2),
}
#: block_h, block_n, num_warps, num_stages, programs_per_sm: 64 or 128 heads a program and what else fits 227 KiB.
CONFIGS = [
    (64, 64, 8, 2, 1),
    (64, 64, 8, 1, 1),
    (64, 64, 4, 2, 1),
    (64, 32, 8, 3, 1),
    (64, 32, 8, 2, 1),
    (64, 128, 8, 1, 1),
]
CONFIGS += [(32, 64, 4, 2, 2), (32, 64, 8, 3, 1), (16, 64, 4, 2, 2)]
CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    **{name: (name, CONFIGS[0]) for name in VARIANTS},
    **{f"configuration {config}": ("whole", config) for config in CONFIGS[1:]},
}


def edited(folder: Path, variant: str) -> ModuleType:
    """The kernel's module with a variant's texts changed. Raises ValueError where one is not there once."""
    triton_mla_sparse.load_kernel(folder)
    path = folder / Path(sparse_kernel.MODULE).name
    text = path.read_text(encoding="utf-8")
    for old, new in VARIANTS[variant]:
        if text.count(old) != 1:
            raise ValueError(f"{variant}: found {text.count(old)} times, wanted once: {old!r}")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return sparse_kernel.load(path)


def measure(name: str) -> dict[str, Any]:
    """µs of a decode step and of a prefill chunk; an error's text where a configuration does not run."""
    variant, shape = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        kernel = edited(Path(folder), variant)
        config = kernel.SparseMLAConfig(*shape)
        found: dict[str, Any] = {"case": name}
        kv, layers, counts = triton_mla_sparse.decode_batch(CONTEXT, TOKENS)
        q = torch.randn(TOKENS, HEADS, 576, dtype=torch.bfloat16, device="cuda")
        decode = [Batch(q, kv, layer, 576**-0.5, counts) for layer in layers]
        kv, indices, scale, counts = triton_mla_sparse.prefill_batch(4096, 4096)
        q = torch.randn(4096, HEADS, 576, dtype=torch.bfloat16, device="cuda")
        for kind, batches in (("decode", decode), ("prefill", [Batch(q, kv, indices, scale, counts)])):
            out, _ = empty(batches[0])
            calls: list[Callable[[], None]] = [
                partial(
                    kernel.sparse_mla_attention,
                    batch.q, batch.kv, batch.indices, batch.scale, out, None, batch.counts, config=config, num_splits=1,
                )
                for batch in batches
            ]  # fmt: skip
            try:
                found[f"{kind}_us"] = round(microseconds(calls, replays=7), 1)
            except Exception as error:
                found[f"{kind}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def main() -> int:
    """Compile all beside each other, then measure one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", default="", help="what the tree is that this runs in")
    parser.add_argument("--case", help="compile this one and end")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.case:
        measure(options.case)
        return 0
    command = [sys.executable, __file__, str(options.output), "--case"]
    compiling = {name: subprocess.Popen([*command, name]) for name in CASES}
    if failed := [name for name, process in compiling.items() if process.wait()]:
        raise RuntimeError(f"these do not compile or run: {', '.join(failed)}")
    rows: list[dict[str, Any]] = []
    for name in CASES:
        rows.append(measure(name))
        print(rows[-1], flush=True)
        record = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": options.commit,
            "covers": [
                "tests/gpu/triton_mla_sparse_limits.py",
                "tests/gpu/triton_mla_sparse.py",
                *sorted(path.relative_to(ROOT).as_posix() for path in triton_mla_sparse.PATCHES),
            ],
            "shape": {"heads": HEADS, "decode": [TOKENS, CONTEXT], "prefill": [4096, 4096]},
            "cases": rows,
        }
        options.output.write_text(triton_mla_sparse.to_text(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
