"""systemd hands a service exactly the words and variables that were meant."""

from __future__ import annotations

import re
from typing import Any

import pytest
import systemd_syntax
from hypothesis import example, given
from hypothesis import strategies as st
from octoserve import unit_file

#: What a process can be given at all: no NUL, nothing that is not UTF-8.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
#: More of what is special to systemd than chance would bring.
SPECIAL = st.text(st.sampled_from("a1%$;#\"'\\ \t\n\r{}=,-@|\x1bé"), max_size=20)


@given(st.lists(TEXT | SPECIAL, max_size=5))
@example(["#", ";", "", "a;b", "-#", "\r", "$$", "%%", "\\", "\\x41", "'", '"'])
@example(['--hf-overrides={"index_topk":0,"a":"$HOME %n \\u00e9"}'])
def test_every_word_arrives_as_it_was(words: list[str]) -> None:
    """Written as the unit's template does it: each word on a line of its own."""
    lines = ["[Service]", "ExecStart=/usr/bin/env"]
    for word in words:
        lines[-1] += " \\"
        lines.append(f"    {unit_file.quote(word)}")
    assert systemd_syntax.exec_start("\n".join([*lines, "Restart=no", ""])) == ["/usr/bin/env", *words]


@pytest.mark.parametrize("word", ["--port=8000", "/opt/a-b_c.d", "a=b,c", "{a:1}", "é"])
def test_plain_words_stay_readable(word: str) -> None:
    assert unit_file.quote(word) == word


def environment_file(text: str) -> dict[str, str]:
    """Variables of a file in which all values are double-quoted, by systemd.exec(5)."""
    found = {}
    rest = text
    while rest:
        match = re.match(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"\n', rest, re.DOTALL)
        assert match, f"not an assignment: {rest!r}"
        # Before any other letter the backslash stays, as in a shell.
        found[match[1]] = re.sub(r'\\(["\\`$])', r"\1", match[2])
        rest = rest[match.end() :]
    return found


VALUES = st.text(st.characters(exclude_categories=["Cc", "Cs"], include_characters="\t"), max_size=40)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)


@given(st.dictionaries(NAMES, VALUES | st.text(st.sampled_from("a\"'\\`$# \t"))))
@example({"A": "\\", "B": '"', "C": "$HOME", "D": "# no comment", "E": "", "F": " kept "})
def test_every_variable_arrives_as_it_was(values: dict[str, str]) -> None:
    text = unit_file.environment(values)
    assert environment_file(text) == values
    assert list(environment_file(text)) == sorted(values)


def test_numbers_are_written_as_text() -> None:
    assert unit_file.environment({"B": 2, "A": 0.5}) == 'A="0.5"\nB="2"\n'


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"KEY": "one\ntwo"}, "KEY"),
        ({"KEY": "one\rtwo"}, "KEY"),
        ({"KEY": "\x1b[0m"}, "KEY"),
        ({"NO-NAME": "x"}, "'NO-NAME' is no name"),
        ({"1ST": "x"}, "'1ST' is no name"),
        ({"": "x"}, "'' is no name"),
        ({"KEY": None}, "KEY is None, wanted text or a number"),
        ({"KEY": True}, "KEY is True, wanted text or a number"),
        ({"KEY": ["a"]}, r"KEY is \['a'\], wanted text or a number"),
    ],
)
def test_what_systemd_would_drop_is_an_error(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        unit_file.environment(values)


def test_arguments_are_written_as_the_server_reads_them() -> None:
    options = {
        "max-model-len": 4096,
        "gpu-memory-utilization": 0.95,
        "enable-auto-tool-choice": True,
        "enable-prefix-caching": False,
        "quantization": None,
        "hf-overrides": {"index_topk": 0, "b": [1, 2]},
        "reasoning-parser": "",
    }
    assert unit_file.arguments(options) == [
        "--max-model-len=4096",
        "--gpu-memory-utilization=0.95",
        "--enable-auto-tool-choice",
        "--no-enable-prefix-caching",
        '--hf-overrides={"index_topk":0,"b":[1,2]}',
        "--reasoning-parser=",
    ]


def test_a_list_becomes_several_words_and_a_mapping_one() -> None:
    options = {"cudagraph-capture-sizes": [1, 2, 4], "hf-overrides": {"index_topk": 0}}
    words = ["--cudagraph-capture-sizes", "1", "2", "4", '--hf-overrides={"index_topk":0}']
    assert unit_file.arguments(options) == words
