"""The files of a stack's folder as texts, for another version of what they pin. Comments stay."""

from __future__ import annotations

import re
from collections.abc import Collection

import yaml


class StackFileError(ValueError):
    """A file of a stack does not hold what is to be changed in it."""


def pin(text: str, names: Collection[str]) -> tuple[str, str]:
    """The one requirement ``name==version`` that is for one of some distributions. Raises StackFileError."""
    found = re.findall(rf"^({'|'.join(map(re.escape, names))})==([^\s;\\]+)", text, re.MULTILINE)
    if len(found) != 1:
        raise StackFileError(f"found {len(found)} pins of {' or '.join(names)}, wanted one")
    return found[0][0], found[0][1]


def repin(text: str, name: str, version: str) -> str:
    """Pin a distribution to another version, where the text pins it."""
    return re.sub(rf"^({re.escape(name)})==[^\s;\\]+", lambda found: f"{found[1]}=={version}", text, flags=re.MULTILINE)


def unpin(text: str, name: str) -> str:
    """The text without a distribution's pin."""
    return re.sub(rf"^{re.escape(name)}==.*\n", "", text, flags=re.MULTILINE)


def rewrite(text: str, name: str, variants: Collection[str], index: str) -> str:
    """``stack.yml`` under another name, with some of its variants, and a further index for each ("" for none)."""
    out = []
    variant = ""
    for line in text.splitlines(keepends=True):
        started = re.fullmatch(r"  (\w+):\n", line)
        if started or not line.startswith(" "):
            variant = started[1] if started else ""
        if variant and variant not in variants:
            continue
        indexes = re.fullmatch(r"    extra_index_urls: (\[.*\])\n", line)
        if line.startswith("name: "):
            out.append(f"name: {name}\n")
        elif indexes and index:
            out.append(f"    extra_index_urls: [{', '.join([*yaml.safe_load(indexes[1]), index])}]\n")
        else:
            out.append(line)
    made = "".join(out)
    _check(made, name, variants, index)
    return made


def _check(text: str, name: str, variants: Collection[str], index: str) -> None:
    document = yaml.safe_load(text)
    if document["name"] != name or set(document["variants"]) != set(variants):
        raise StackFileError(f"cannot rename stack.yml to {name} with the variants {', '.join(variants)}: {text}")
    without = [key for key, entry in document["variants"].items() if index not in ["", *entry["extra_index_urls"]]]
    if without:
        raise StackFileError(f"stack.yml has no line 'extra_index_urls: […]' for {', '.join(without)}; write one")
