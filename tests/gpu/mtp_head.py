"""An MTP head for the trained tiny model, so that speculative decoding has something to accept.

The head is one more decoder layer, as GLM-5 has it: from the final hidden state of a position and the embedding of
the next token it predicts the token after that one. It starts from the model's last layer and is trained on the
corpus; the model itself stays as it is, its tensors byte for byte. Runs in the stack's interpreter.
"""

# The lint environment has no torch, numpy or gguf.
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import GlmMoeDsaForCausalLM

from tests.fixtures.tiny_glm import corpus, glm_gguf, k_quants, reference, shapes, tokenizer

STEPS = 160
RATE = 1e-3
BATCH = 6  # conversations


class Head(torch.nn.Module):
    """eh_proj over [enorm(embedding of the next token), hnorm(hidden state)], one layer, shared_head.norm."""

    def __init__(self, model: GlmMoeDsaForCausalLM, shape: shapes.GlmShape) -> None:
        super().__init__()
        last = f"model.layers.{shape.layers - 1}."
        checkpoint = {name: np.array(values.detach()) for name, values in reference.to_checkpoint(model).items()}
        state = {
            name.replace(last, "model.layers.0."): values
            for name, values in checkpoint.items()
            if name.startswith(last) or ".layers." not in name
        }
        self.block = reference.build_model(replace(shape, layers=1, dense_layers=0, mtp_layers=0), state)
        self.enorm = torch.nn.RMSNorm(shape.hidden, eps=shape.rms_norm_eps)
        self.hnorm = torch.nn.RMSNorm(shape.hidden, eps=shape.rms_norm_eps)
        self.eh_proj = torch.nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        with torch.no_grad():
            self.eh_proj.weight += torch.eye(shape.hidden).repeat(1, 2)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states (conversations, positions, hidden); vLLM hides the embedding at position 0."""
        embeddings = torch.cat([torch.zeros_like(embeddings[:, :1]), embeddings[:, 1:]], dim=1)
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        output: torch.Tensor = self.block.model(inputs_embeds=joined, use_cache=False).last_hidden_state
        return output

    def state(self, shape: shapes.GlmShape) -> glm_gguf.State:
        """The head's tensors under the names of a Hugging Face checkpoint."""
        prefix = f"model.layers.{shape.layers}"
        state = {
            name.replace("model.layers.0", prefix): values
            for name, values in reference.to_state(self.block).items()
            if ".layers." in name
        }
        for name, module in (("enorm", self.enorm), ("hnorm", self.hnorm), ("eh_proj", self.eh_proj)):
            state[f"{prefix}.{name}.weight"] = module.weight.detach().numpy()
        state[f"{prefix}.shared_head.norm.weight"] = self.block.model.norm.weight.detach().numpy()
        return state


def conversations() -> list[list[int]]:
    """Token ids of every exchange of the corpus, prompt and answer."""
    words = tokenizer.load_tokenizer()
    return [
        [*tokenizer.prompt_ids(words, exchange), *tokenizer.answer_ids(words, exchange)]
        for exchange in corpus.read_corpus()
    ]


def train(model: GlmMoeDsaForCausalLM, shape: shapes.GlmShape, *, seed: int = 0) -> Head:
    """A head that says what the model will say one token later."""
    torch.manual_seed(seed)
    head = Head(model, shape)
    # The embeddings and the output layer are the model's; the indexer chooses everything here.
    fixed = ("lm_head", "embed", ".indexer.")
    trained = [values for name, values in head.named_parameters() if not any(part in name for part in fixed)]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    samples = conversations()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        batch = [samples[index] for index in torch.randperm(len(samples))[:BATCH]]
        loss = _loss(model, head, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % 20 == 19:
            print(f"MTP head, step {step + 1}: {float(loss.detach()):.3f} nats a token", flush=True)
    head.eval()
    return head


def _loss(model: GlmMoeDsaForCausalLM, head: Head, batch: Sequence[list[int]]) -> torch.Tensor:
    """Mean loss of the token after the next one. Padding at the right changes nothing to its left."""
    longest = max(map(len, batch))
    tokens = torch.tensor([[*sample, *[0] * (longest - len(sample))] for sample in batch])
    targets = torch.tensor([[*sample[2:], *[-100] * (longest - len(sample))] for sample in batch])
    with torch.no_grad():
        hidden = model.model(tokens[:, :-2], use_cache=False).last_hidden_state
        embeddings = model.model.embed_tokens(tokens[:, 1:-1])
    logits = model.lm_head(head(embeddings, hidden))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def write_with_head(path: Path, splits: Sequence[Path], state: glm_gguf.State, shape: shapes.GlmShape) -> None:
    """One GGUF file: the splits' tensors as they are, and the head's in the model's mix of types."""
    writer = gguf.GGUFWriter(path, "glm-dsa")
    glm_gguf.add_metadata(writer, shape)
    for split in splits:
        for tensor in gguf.GGUFReader(split).tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, values in glm_gguf.to_gguf_tensors(state, shape):
        kind = glm_gguf.kind_of(name, glm_gguf.UD_Q4_K_XL)
        raw = None if kind == gguf.GGMLQuantizationType.F32 else kind
        writer.add_tensor(name, k_quants.quantize(values, kind), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
