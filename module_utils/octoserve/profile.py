"""A profile: what to serve. Checked as a whole before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREPARE = ("merge", "splits")
# path -> (type, required); a path ending in "[]" speaks of each item of a list.
_SHAPE: dict[str, tuple[tuple[type, ...], bool]] = {
    "name": ((str,), True),
    "description": ((str,), True),
    "stack.name": ((str,), True),
    "stack.variant": ((str,), True),
    "model.name": ((str,), True),
    "model.prepare": ((str,), True),
    "model.sources": ((list,), True),
    "serve.served_model_name": ((str,), True),
    "serve.args": ((dict,), True),
    "serve.env": ((dict,), True),
    "serve.gpu": ((dict, type(None)), True),
    "serve.start_timeout_s": ((int,), True),
    "chat_template_args": ((dict,), False),
    "parsers": ((dict,), False),
    "gates.suite": ((str,), True),
    "gates.throughput": ((dict,), True),
}
_TOP = ("name", "description", "stack", "model", "serve", "chat_template_args", "parsers", "gates")


def check(document: Any, name: str) -> dict[str, Any]:
    """Return the profile as the chapters use it. `serve.args` and `serve.env` keep their values, not their reasons.

    Raises ValueError that names every mistake at once.
    """
    where = f"profile {name}"
    if not isinstance(document, Mapping):
        raise ValueError(f"{where}: found {type(document).__name__}, wanted a mapping")
    mistakes = [f"unknown key {key!r}" for key in document if key not in _TOP]
    if document.get("name") != name:
        mistakes.append(f"name is {document.get('name')!r}, wanted {name!r} as the file is called")
    for path, (types, required) in _SHAPE.items():
        found, value = _look_up(document, path)
        if not found and required:
            mistakes.append(f"{path} is missing")
        elif found and not isinstance(value, types):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            mistakes.append(f"{path} is {value!r}, wanted {wanted}")
    if mistakes:
        raise ValueError(f"{where}: {'; '.join(mistakes)}")
    if document["model"]["prepare"] not in PREPARE:
        mistakes.append(f"model.prepare is {document['model']['prepare']!r}, wanted {' or '.join(PREPARE)}")
    for section in ("args", "env"):
        for key, entry in document["serve"][section].items():
            if not isinstance(entry, Mapping) or set(entry) != {"value", "why"} or not str(entry["why"]).strip():
                mistakes.append(f"serve.{section}.{key} is {entry!r}, wanted {{value: …, why: …}}")
    mistakes += _check_files(document["model"]["sources"])
    if mistakes:
        raise ValueError(f"{where}: {'; '.join(mistakes)}")
    serve = {**document["serve"]}
    for section in ("args", "env"):
        serve[section] = {key: entry["value"] for key, entry in document["serve"][section].items()}
    return {"chat_template_args": {}, "parsers": {}, **document, "serve": serve}


def _check_files(sources: list[Any]) -> list[str]:
    mistakes = []
    for number, source in enumerate(sources, 1):
        if not isinstance(source, Mapping) or not source.get("url") or not source.get("files"):
            mistakes.append(f"model.sources[{number}] is wanted with url and files")
            continue
        for entry in source["files"]:
            if not isinstance(entry, Mapping) or not {"path", "size", "sha256"} >= set(entry) >= {"path"}:
                mistakes.append(f"model.sources[{number}]: {entry!r}, wanted {{path, size, sha256}}")
    return mistakes


def _look_up(document: Any, path: str) -> tuple[bool, Any]:
    value = document
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False, None
        value = value[key]
    return True, value
