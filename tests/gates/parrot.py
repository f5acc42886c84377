"""A model that has learned a few answers by heart, in GLM's template: for the parsers of real vLLM.

    python -m tests.gates.parrot FOLDER     # in the stack's interpreter, with the project's root on PYTHONPATH

It learns byte by byte what the cases of files/gates/default.yml with tools and reasoning are to be answered with, in a
minute or two, and writes a Llama checkpoint. It knows nothing else.
"""

# The lint environment has no torch.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUITE = Path(__file__).resolve().parents[2] / "files/gates/default.yml"
ROLES = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# The form of GLM-4.7's template, as short as it can be.
TEMPLATE = """[gMASK]<sop>
{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}<|observation|>{{ message.content }}
{%- else -%}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>{%- endfor -%}</tool_call>{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '<think>' if enable_thinking or enable_thinking is not defined else '</think>' }}{%- endif -%}"""
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
ANSWERS = {
    "tool-call": CALL,
    "tool-result": "It is 7 degrees in Paris, with hail.",
    "no-tool-needed": "2 + 2 = 4.",
    "reasoning-apart": "17 times 20 is 340, 17 times 3 is 51, together 391.</think>17 times 23 is 391.",
}
STEPS, LEARNING_RATE, LOSS = 600, 2e-3, 3e-3


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte is a token; the marks of the template are one each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ROLES])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=ROLES[0], pad_token=ROLES[0])
    found.chat_template = TEMPLATE
    return found


def lessons(speak: PreTrainedTokenizerFast) -> list[tuple[list[int], list[int]]]:
    """Token ids of each prompt and of its answer, as the gate asks them with thinking off unless a case turns it on."""
    found = []
    for case in yaml.safe_load(SUITE.read_text(encoding="utf-8"))["cases"]:
        if "needs" not in case:
            continue
        messages: list[dict[str, Any]] = case.get("messages") or [{"role": "user", "content": case["prompt"]}]
        for message in messages:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        arguments = {"enable_thinking": False, **case.get("chat_template_args", {})}
        text = speak.apply_chat_template(
            messages, tools=case.get("tools"), tokenize=False, add_generation_prompt=True, **arguments
        )
        answer = speak.encode(ANSWERS[case["name"]] + ROLES[0], add_special_tokens=False)
        found.append((speak.encode(text, add_special_tokens=False), answer))
    return found


def learn(taught: list[tuple[list[int], list[int]]], vocabulary: int, end: int) -> LlamaForCausalLM:
    """Train until every answer is known by heart. Raises RuntimeError where it is not learned in time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    longest = max(len(prompt) + len(answer) for prompt, answer in taught)
    tokens = torch.full((len(taught), longest), end)
    wanted = torch.full((len(taught), longest), -100)
    for row, (prompt, answer) in enumerate(taught):
        tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        wanted[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(STEPS):
        loss = model(input_ids=tokens, labels=wanted).loss
        if loss.item() < LOSS:
            print(f"learned in {step} steps")
            return model
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise RuntimeError(f"not learned in {STEPS} steps: loss {loss.item():.4f}, wanted {LOSS}")


def main() -> None:
    """Learn and write."""
    folder = Path(sys.argv[1])
    speak = tokenizer()
    model = learn(lessons(speak), len(speak), speak.convert_tokens_to_ids(ROLES[0]))
    model.save_pretrained(folder)
    speak.save_pretrained(folder)


if __name__ == "__main__":
    main()
