"""A profile: what to serve. Checked as a whole before anything is done with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from . import sweep_plan, unit_file

PREPARE = ("merge", "splits")
_NULL = type(None)
# path -> (types, required); keys that stand below none of these paths are unknown, a dict that has none is free.
_SHAPE: dict[str, tuple[tuple[type, ...], bool]] = {
    "name": ((str,), True),
    "description": ((str,), True),
    "stack": ((dict,), True),
    "stack.name": ((str,), True),
    "stack.variant": ((str,), True),
    "model": ((dict,), True),
    "model.name": ((str,), True),
    "model.prepare": ((str,), True),
    "model.sources": ((list,), True),
    "serve": ((dict,), True),
    "serve.served_model_name": ((str,), True),
    "serve.args": ((dict,), True),
    "serve.env": ((dict,), True),
    "serve.gpu": ((dict, _NULL), True),
    "serve.gpu.count": ((int,), True),
    "serve.gpu.name": ((str,), False),
    "serve.gpu.memory_utilization": ((int, float), True),
    "serve.start_timeout_s": ((int,), True),
    "chat_template_args": ((dict,), False),
    "parsers": ((dict,), False),
    "parsers.tool_call": ((str,), False),
    "parsers.reasoning": ((str,), False),
    "gates": ((dict,), True),
    "gates.suites": ((list,), True),
    "gates.perplexity": ((dict,), False),
    "gates.reference": ((str,), False),
    "gates.throughput": ((dict,), True),
    "gates.throughput.trials": ((int,), True),
    "gates.throughput.warmup": ((int,), False),
    "gates.throughput.floor_tok_s": ((int, float), True),
    "gates.throughput.expected_completion_tokens": ((int,), True),
    "gates.throughput.sweeps": ((dict,), False),
}
_SECTIONS = sorted({path.rpartition(".")[0] for path in _SHAPE})
_FILE_KEYS = {"path", "name", "size", "sha256"}
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check(document: Any, name: str) -> dict[str, Any]:
    """Return the profile as the chapters use it. `serve.args` and `serve.env` keep their values, not their reasons.

    Raises ValueError that names every mistake at once.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"profile {name}: found {type(document).__name__}, wanted a mapping")
    mistakes = list(_mistakes(document))
    if isinstance(document.get("name"), str) and document["name"] != name:
        mistakes.append(f"name is {document['name']!r}, wanted {name!r} as the file is called")
    if mistakes:
        raise ValueError(f"profile {name}: {'; '.join(mistakes)}")
    serve = {**document["serve"]}
    for section in ("args", "env"):
        serve[section] = {key: entry["value"] for key, entry in serve[section].items()}
    return {"chat_template_args": {}, "parsers": {}, **document, "serve": serve}


def _mistakes(document: Mapping[str, Any]) -> Iterator[str]:
    for section in _SECTIONS:
        found = _look_up(document, section)
        for key in found if isinstance(found, Mapping) else ():
            if _path(section, key) not in _SHAPE:
                yield f"unknown key {_path(section, key)}"
    for path, (types, required) in _SHAPE.items():
        section, _, key = path.rpartition(".")
        found = _look_up(document, section)
        if not isinstance(found, Mapping):
            continue  # a mistake of the section, or a section that may be null
        if key not in found:
            if required:
                yield f"{path} is missing"
        elif not _is_one_of(found[key], types):
            wanted = " or ".join("null" if kind is _NULL else kind.__name__ for kind in types)
            yield f"{path} is {found[key]!r}, wanted {wanted}"
    prepare, sources = _look_up(document, "model.prepare"), _look_up(document, "model.sources")
    if isinstance(prepare, str) and prepare not in PREPARE:
        yield f"model.prepare is {prepare!r}, wanted {' or '.join(PREPARE)}"
    yield from _mistakes_of_sources(sources) if isinstance(sources, list) else ()
    yield from _mistakes_of_settings(document, "args")
    yield from _mistakes_of_settings(document, "env")
    try:
        sweep_plan.parse(_look_up(document, "gates.throughput.sweeps") or {})
    except ValueError as error:
        yield f"gates.throughput: {error}"


def _mistakes_of_settings(document: Mapping[str, Any], section: str) -> Iterator[str]:
    """Every argument and variable has a value and the reason for it."""
    settings = _look_up(document, f"serve.{section}")
    for key, entry in settings.items() if isinstance(settings, Mapping) else ():
        if not isinstance(entry, Mapping) or set(entry) != {"value", "why"} or not str(entry["why"] or "").strip():
            yield f"serve.{section}.{key} is {entry!r}, wanted {{value: …, why: …}}"
        elif section == "env":
            try:
                unit_file.environment({key: entry["value"]})
            except ValueError as error:
                yield f"serve.env: {error}"


def _mistakes_of_sources(sources: list[Any]) -> Iterator[str]:
    if not sources:
        yield "model.sources is empty, wanted at least one with url and files"
    for number, source in enumerate(sources, 1):
        where = f"model.sources[{number}]"
        if not isinstance(source, Mapping) or set(source) != {"url", "files"}:
            yield f"{where} is {source!r}, wanted {{url, files}}"
            continue
        if not isinstance(source["url"], str) or not source["url"]:
            yield f"{where}.url is {source['url']!r}, wanted text"
        if not isinstance(source["files"], list) or not source["files"]:
            yield f"{where}.files is {source['files']!r}, wanted a list of files"
            continue
        for entry in source["files"]:
            if not _is_file(entry):
                yield f"{where}: {entry!r}, wanted {{path, size: bytes or null, sha256: 64 digits or null}}"


def _is_file(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or not _FILE_KEYS >= set(entry) >= {"path"}:
        return False
    path, size, sha256 = entry["path"], entry.get("size"), entry.get("sha256")
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
        return False
    if size is not None and (not _is_one_of(size, (int,)) or size < 0):
        return False
    return sha256 is None or (isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None)


def _is_one_of(value: Any, types: tuple[type, ...]) -> bool:
    """isinstance, except that a bool is no number."""
    return isinstance(value, types) and not isinstance(value, bool)


def _path(section: str, key: object) -> str:
    return f"{section}.{key}" if section else str(key)


def _look_up(document: Any, path: str) -> Any:
    """The value at a path, None where there is none."""
    value = document
    for key in path.split(".") if path else ():
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
