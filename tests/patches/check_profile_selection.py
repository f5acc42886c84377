"""Which attention backend a served command gets on an SM120 card. Runs in the stack's interpreter, no GPU.

``check_profile_selection.py FOLDER ARGUMENTS`` writes GLM-5's config and a file with its header into an empty folder,
and answers for each list of arguments of ``vllm serve`` in the JSON by one line of JSON: the name of the backend that
``vllm_gguf_plugin.check`` finds, or the error, and the KV cache type. FOLDER is the model, its config and tokenizer.
"""

# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_card  # before vLLM
from check_glm5_header import SHAPE
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_gguf_plugin.check import choose_attention

from tests.fixtures import glm5_header


def ask(words: list[str]) -> dict[str, Any]:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    arguments.model = arguments.model_tag
    arguments.skip_tokenizer_init = True
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    with set_current_vllm_config(config), cuda_card.present((12, 0), flashinfer=True):
        try:
            chosen = choose_attention(config)
        except ValueError as error:
            chosen = str(error)
    return {"chosen": chosen, "kv_cache_dtype": config.cache_config.cache_dtype}


folder = Path(sys.argv[1])
shape = replace(SHAPE, max_position=glm5_header.CONTEXT)
(folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
path = glm5_header.write(folder / "model.gguf")
options = [str(path), f"--hf-config-path={folder}", f"--tokenizer={folder}"]
print(json.dumps([ask([*options, *words]) for words in json.loads(sys.argv[2])]))
