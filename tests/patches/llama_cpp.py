"""What llama.cpp says to the prompts of make_models.py. Runs in an environment of its own: requirements/llama_cpp.in.

``llama_cpp.py FOLDER...`` writes ``llama_cpp.npz`` into each folder: natural-log probabilities of every next token of
each prompt and its answer, shaped as in ``reference.npz``. ``logprobs_N`` come from the file's weights made float32 by
ggml's own functions, ``quantized_N`` from the file as it is: there llama.cpp rounds the activations to 8 bits before
it multiplies them with quantized weights. ``llama_cpp.json`` holds how far transformers is from them: ``difference``,
the largest absolute difference from the first, and ``quantized_mean``, the mean difference from the second.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import xllamacpp

Floats: TypeAlias = npt.NDArray[np.float32]
Kind = gguf.GGMLQuantizationType
# The token that llama.cpp is made to sample, whatever its probability: text that ends inside a character, as a random
# model's does, comes without probabilities. It is "!", the first after the special ones.
SAMPLED = 10


def to_float32(tensor: gguf.ReaderTensor, ggml: ctypes.CDLL) -> Floats:
    """A tensor's values, by ggml's own function where it is quantized."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind, data = tensor.tensor_type, np.ascontiguousarray(tensor.data)
    if kind in (Kind.F32, Kind.F16):
        return data.astype(np.float32).reshape(shape)
    if kind == Kind.BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    values = np.empty(shape, dtype=np.float32)
    name = kind.name.lower().replace("_k", "_K")  # q4_K, iq4_xs
    getattr(ggml, f"dequantize_row_{name}")(
        data.ctypes.data_as(ctypes.c_void_p), values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(values.size)
    )
    return values


def write_float32(splits: Sequence[Path], out: Path) -> None:
    """One file with the keys of the first split and every tensor of all, in float32."""
    ggml = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    readers = [gguf.GGUFReader(path) for path in splits]
    fields = readers[0].fields
    writer = gguf.GGUFWriter(out, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith(("GGUF.", "split.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        writer.add_tensor(tensor.name, to_float32(tensor, ggml))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(path: Path, config: dict[str, Any]) -> xllamacpp.Server:
    """llama.cpp on one thread, the KV cache in float32."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if scaling := config.get("rope_scaling"):
        # For these architectures llama.cpp does not read them from the file.
        parameters.yarn_beta_fast, parameters.yarn_beta_slow = scaling["beta_fast"], scaling["beta_slow"]
    return xllamacpp.Server(parameters)


def next_token(server: xllamacpp.Server, tokens: Sequence[int], vocabulary: int) -> Floats:
    """Natural-log probabilities (vocabulary) of the token after these."""
    request = {"prompt": list(tokens), "max_tokens": 1, "n_probs": vocabulary, "logit_bias": [[SAMPLED, 1000]]}
    answer = server.handle_completions({**request, "temperature": 0, "cache_prompt": True})
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    values = np.full(vocabulary, np.nan, dtype=np.float32)
    for entry in top:
        values[entry["id"]] = entry["logprob"]
    if np.isnan(values).any():
        raise ValueError(f"found probabilities of {len(top)} tokens, wanted {vocabulary}")
    return values


def log_probabilities(path: Path, folder: Path) -> list[Floats]:
    """For each prompt of a folder: (prompt + answer - 1, vocabulary)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    server, answers = serve(path, config), np.load(folder / "reference.npz")
    found = []
    for number, prompt in enumerate(json.loads((folder / "prompts.json").read_text(encoding="utf-8"))):
        tokens = [*prompt, *answers[f"answer_{number}"].tolist()]
        positions = [next_token(server, tokens[:count], config["vocab_size"]) for count in range(1, len(tokens))]
        found.append(np.stack(positions))
    return found


def compare(folder: Path) -> dict[str, float]:
    """Absolute differences from transformers."""
    ours, theirs = np.load(folder / "llama_cpp.npz"), np.load(folder / "reference.npz")
    prompts = range(len(json.loads((folder / "prompts.json").read_text(encoding="utf-8"))))
    exact, rounded = (
        np.concatenate([np.abs(ours[f"{name}_{number}"] - theirs[f"logprobs_{number}"]) for number in prompts])
        for name in ("logprobs", "quantized")
    )
    return {"difference": float(exact.max()), "quantized_mean": float(rounded.mean())}


def main() -> None:
    """Ask about the folders of the command line."""
    for folder in map(Path, sys.argv[1:]):
        splits = sorted(folder.glob("model*.gguf"))
        whole = folder / "float32.gguf"
        write_float32(splits, whole)
        arrays = {f"logprobs_{number}": values for number, values in enumerate(log_probabilities(whole, folder))}
        whole.unlink()
        arrays |= {f"quantized_{number}": values for number, values in enumerate(log_probabilities(splits[0], folder))}
        np.savez(folder / "llama_cpp.npz", allow_pickle=False, **arrays)
        (folder / "llama_cpp.json").write_text(json.dumps(compare(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
