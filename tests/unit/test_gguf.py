"""The GGUF reader: what it reads, and that every damage ends in GgufError."""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import (
    ALIGNMENT,
    Data,
    Typed,
    array,
    f32,
    gguf,
    header,
    split_set,
    text,
    tiny_metadata,
    tiny_parts,
    tiny_set,
    u32,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from octoserve.gguf import GGML_TYPES, Array, Gguf, GgufError, read
from octoserve.splits import facts, read_set, split_paths

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def small() -> bytes:
    return gguf(tiny_metadata(), {name: data for part in tiny_parts() for name, data in part.items()})


# --- what is read ----------------------------------------------------------------------------------

_keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
_values: dict[int, st.SearchStrategy[Any]] = {
    0: st.integers(0, 2**8 - 1),
    1: st.integers(-(2**7), 2**7 - 1),
    2: st.integers(0, 2**16 - 1),
    3: st.integers(-(2**15), 2**15 - 1),
    4: st.integers(0, 2**32 - 1),
    5: st.integers(-(2**31), 2**31 - 1),
    6: st.floats(width=32, allow_nan=False),
    7: st.booleans(),
    8: st.text(st.characters(codec="utf-8"), max_size=30),
    10: st.integers(0, 2**64 - 1),
    11: st.integers(-(2**63), 2**63 - 1),
    12: st.floats(allow_nan=False),
}
_typed = st.one_of(
    [st.builds(Typed, st.just(kind), value) for kind, value in _values.items()]
    + [st.builds(Typed, st.just(9), st.lists(value, max_size=20), st.just(kind)) for kind, value in _values.items()]
)


@st.composite
def _tensor(draw: st.DrawFn) -> Data:
    kind = draw(st.sampled_from(sorted(GGML_TYPES)))
    _, block, block_bytes = GGML_TYPES[kind]
    blocks, rows = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 3), max_size=3))
    size = blocks * block_bytes * math.prod(rows)
    return Data((blocks * block, *rows), kind, draw(st.binary(min_size=size, max_size=size)))


_tensors = st.dictionaries(
    st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=63), _tensor(), max_size=5
)
_metadata = st.dictionaries(_keys, _typed, max_size=8).map(
    lambda pairs: {key: value for key, value in pairs.items() if key != "general.alignment"}
)


@PROPERTY
@given(_metadata, _tensors, st.sampled_from([2, 3]), st.sampled_from([8, 32, 256]))
def test_what_was_written_is_read(
    tmp_path: Path, metadata: dict[str, Typed], tensors: dict[str, Data], version: int, alignment: int
) -> None:
    metadata = {**metadata, "general.alignment": u32(alignment)}
    content = gguf(metadata, tensors, version, alignment)
    model = read(written(tmp_path, content))
    assert (model.version, model.alignment) == (version, alignment)
    assert list(model.metadata) == list(metadata)
    for key, typed in metadata.items():
        value = model.metadata[key]
        if typed.kind == 9:
            assert isinstance(value, Array)
            assert (value.length, list(value.head)) == (len(typed.value), typed.value[:8])
        else:
            assert value == typed.value
    assert [tensor.name for tensor in model.tensors] == list(tensors)
    for tensor in model.tensors:
        expected = tensors[tensor.name]
        assert (tensor.ne, tensor.type) == (expected.ne, GGML_TYPES[expected.kind][0])
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == expected.data


def test_arrays_that_differ_beyond_their_head_compare_unequal(tmp_path: Path) -> None:
    def tokens(last: str) -> Any:
        values = [*map(str, range(50)), last]
        return read(written(tmp_path, gguf({"t": array(8, values)}, {}))).metadata["t"]

    assert tokens("a") == tokens("a")
    assert tokens("a") != tokens("b")


def test_vocabulary_of_glm_is_read_fast(tmp_path: Path) -> None:
    """154,880 tokens with types and 300,000 merges: a bound ten times what it takes, not a benchmark."""
    words = [f"token{i}" for i in range(154_880)]
    metadata = {
        "tokenizer.ggml.tokens": array(8, words),
        "tokenizer.ggml.token_type": array(5, [1] * len(words)),
        "tokenizer.ggml.merges": array(8, [f"{i} {i}" for i in range(300_000)]),
    }
    path = written(tmp_path, gguf(metadata, {"a": f32(1)}))
    started = time.monotonic()
    model = read(path)
    elapsed = time.monotonic() - started
    assert model.metadata["tokenizer.ggml.tokens"].length == len(words)  # type: ignore[union-attr]
    assert elapsed < 2


# --- damage ----------------------------------------------------------------------------------------


@PROPERTY
@given(st.data())
def test_corruption_never_ends_in_anything_but_gguf_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(small())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=9))
        content[at : at + len(patch)] = patch
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        model = read(written(tmp_path, bytes(content)))
    except GgufError:
        return
    assert all(tensor.offset + tensor.nbytes <= len(content) for tensor in model.tensors)


@PROPERTY
@given(st.data())
def test_every_truncation_is_found(tmp_path: Path, data: st.DataObject) -> None:
    content = small()
    # The padding after the last tensor (102 bytes of Q8_0) may be missing; nothing else may.
    needed = len(content) - (-102 % ALIGNMENT)
    cut = data.draw(st.integers(0, needed - 1))
    with pytest.raises(GgufError):
        read(written(tmp_path, content[:cut]))


def test_truncation_states_found_and_wanted_bytes(tmp_path: Path) -> None:
    content = small()
    with pytest.raises(GgufError, match=rf"has {len(content) - 40} bytes, wanted at least {len(content) - 26} "):
        read(written(tmp_path, content[:-40]))


def test_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 49800000000\n"
    with pytest.raises(GgufError, match=r"Git LFS pointer .* stands for 49800000000 bytes"):
        read(written(tmp_path, pointer.encode()))


def test_splits_glued_with_cat_are_recognized(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="glued with cat"):
        read(written(tmp_path, small() + small()))


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="does not end with its last tensor"):
        read(written(tmp_path, small() + bytes(100)))


def _with(at: int, code: str, value: int) -> bytes:
    content = bytearray(small())
    struct.pack_into(code, content, at, value)
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "starts with b'', wanted b'GGUF'", id="empty"),
        pytest.param(b"<!DOCTYPE html>", "error page", id="html"),
        pytest.param(_with(4, ">I", 3), "big-endian", id="big-endian"),
        pytest.param(_with(4, "<I", 1), "version 1, wanted 2 or 3", id="version"),
        pytest.param(_with(8, "<Q", 2**63), "number of tensors", id="tensor-count"),
        pytest.param(_with(16, "<Q", 2**40), "number of metadata pairs", id="pair-count"),
        pytest.param(_with(24, "<Q", 2**62), "metadata key 0", id="string-length"),
        pytest.param(gguf({"a": Typed(9, [], 9)}, {}), "value type 9", id="nested-array"),
        pytest.param(gguf({"general.alignment": u32(3)}, {}), "power of two", id="alignment"),
        pytest.param(gguf({"general.alignment": text("32")}, {}), "power of two", id="alignment-type"),
        pytest.param(gguf({}, {"n" * 64: f32(1)}), "wanted 1 to 63 bytes", id="name"),
        pytest.param(gguf({}, {"a": Data((1,) * 5, 0, bytes(4))}), "5 dimensions", id="dimensions"),
        pytest.param(gguf({}, {"a": Data((32,), 4, bytes(64))}), "ggml type 4", id="removed-type"),
        pytest.param(gguf({}, {"a": Data((33,), 8, bytes(64))}), "multiple of 32", id="row"),
    ],
)
def test_fault_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(GgufError, match=message):
        read(written(tmp_path, content))


def test_tensor_out_of_place_is_found(tmp_path: Path) -> None:
    content = bytearray(gguf({}, {"a": f32(1), "b": f32(2)}))
    place = len(header({}, {"a": f32(1), "b": f32(2)})) - ALIGNMENT
    at = content.index(struct.pack("<IQ", 0, 32), 0, place + ALIGNMENT)
    struct.pack_into("<Q", content, at + 4, 64)
    with pytest.raises(GgufError, match="tensor b starts at 64 in the data, wanted 32"):
        read(written(tmp_path, bytes(content)))


def test_name_that_is_there_twice_is_found(tmp_path: Path) -> None:
    content = gguf({}, {"a": f32(1), "b": f32(2)}).replace(b"\x01\0\0\0\0\0\0\0b", b"\x01\0\0\0\0\0\0\0a")
    with pytest.raises(GgufError, match="tensor a is there twice"):
        read(written(tmp_path, content))


# --- splits ----------------------------------------------------------------------------------------


def test_set_is_read_and_summed_up(tmp_path: Path) -> None:
    paths = tiny_set(tmp_path)
    assert split_paths(paths[1]) == paths
    summary = facts(read_set(paths))
    assert summary["architecture"] == "glm-dsa"
    assert (summary["splits"], summary["tensors"], summary["parameters"]) == (3, 6, 3 * (4 + 96))
    assert summary["types"] == {
        "F32": {"tensors": 3, "bytes": 48},
        "Q8_0": {"tensors": 3, "bytes": 306},
    }
    assert summary["metadata"]["tokenizer.ggml.tokens"] == {"type": "str", "length": 20}
    assert summary["size"] == sum(path.stat().st_size for path in paths)


def test_whole_file_is_a_set_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, small())
    assert split_paths(path) == [path]
    assert facts(read_set([path]))["splits"] == 1


def test_missing_split_is_named(tmp_path: Path) -> None:
    paths = tiny_set(tmp_path)
    paths[1].unlink()
    with pytest.raises(GgufError, match=r"found 2 of 3 files, missing tiny-00002-of-00003\.gguf"):
        read_set(paths)


def test_split_count_and_number_of_files_must_agree(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"is one of 3 splits, but 2 file\(s\) were given"):
        read_set(tiny_set(tmp_path)[:2])


def test_splits_swapped_among_themselves_are_found(tmp_path: Path) -> None:
    first, second, third = tiny_set(tmp_path)
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    third.write_bytes(content)
    with pytest.raises(GgufError, match=r"tiny-00002.*says it is split 3 of 3, wanted split 2"):
        read_set([first, second, third])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param((tiny_parts(3, 8), tiny_metadata(3, 8)), r"has the dimensions \[8\], wanted \[4\]", id="width"),
        pytest.param((list(reversed(tiny_parts())), tiny_metadata()), None, id="same-middle"),
        pytest.param((tiny_parts()[::-1][1:] + tiny_parts()[2:], tiny_metadata()), "holds already", id="names"),
        pytest.param(
            ([*tiny_parts()[:1], {**tiny_parts()[1], "extra": f32(1)}, *tiny_parts()[2:]], tiny_metadata()),
            "split.tensors.count is 7, wanted 6",
            id="tensor-count",
        ),
        pytest.param((tiny_parts()[:1] + tiny_parts(9)[7:], tiny_metadata(9)), "has 3 blocks", id="blocks"),
    ],
)
def test_split_of_another_model_is_found(tmp_path: Path, other: Any, message: str | None) -> None:
    paths = tiny_set(tmp_path / "a")
    foreign = split_set(tmp_path / "b", "tiny", *other)
    foreign[1].replace(paths[1])
    if message is None:  # the same tensors in the same place: only a checksum could tell
        assert len(read_set(paths)) == 3
        return
    with pytest.raises(GgufError, match=message):
        read_set(paths)


def test_tensors_must_add_up(tmp_path: Path) -> None:
    """All splits agree on seven tensors, and hold six."""
    parts = tiny_parts()
    paths = split_set(tmp_path, "tiny", [*parts[:2], {**parts[2], "extra": f32(1)}], tiny_metadata())
    shorter = {"split.no": Typed(2, 2), "split.count": Typed(2, 3), "split.tensors.count": Typed(5, 7)}
    paths[2].write_bytes(gguf(shorter, parts[2]))
    with pytest.raises(GgufError, match=r"hold 6 tensors, wanted split.tensors.count 7"):
        read_set(paths)


def test_metadata_that_later_splits_repeat_must_agree(tmp_path: Path) -> None:
    paths = tiny_set(tmp_path)
    keys = {
        "general.architecture": text("llama"),
        "split.no": Typed(2, 1),
        "split.count": Typed(2, 3),
        "split.tensors.count": Typed(5, 6),
    }
    paths[1].write_bytes(gguf(keys, tiny_parts()[1]))
    with pytest.raises(GgufError, match=r"general.architecture is 'llama', wanted 'glm-dsa'"):
        read_set(paths)


def test_split_metadata_of_a_wrong_type_is_a_gguf_error(tmp_path: Path) -> None:
    path = written(tmp_path, gguf({**tiny_metadata(), "split.count": text("3")}, {}))
    with pytest.raises(GgufError, match=r"split.count is '3', wanted a number"):
        read_set([path])


def test_facts_of_infinite_values_are_json(tmp_path: Path) -> None:
    metadata = {**tiny_metadata(), "a": Typed(12, math.inf), "b": Typed(12, math.nan), "c": text("x" * 300)}
    model: Gguf = read(written(tmp_path, gguf(metadata, {})))
    shown = facts([model])["metadata"]
    assert (shown["a"], shown["b"]) == ("inf", "nan")
    assert len(shown["c"]) == 201
