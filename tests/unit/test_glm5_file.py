"""A GLM-5 of the real size, as far as headers go: what reads headers must bear it, and within seconds."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from module_runner import Runner
from octoserve.fetch import FetchError, check_space
from octoserve.gguf import GGML_TYPES, GgufError, read
from octoserve.merge import expected_layout, layout
from octoserve.splits import facts, read_set

from tests.fixtures import glm5_header

GIB = 1 << 30
#: Seconds that a step may take on a busy machine; alone each takes less than half a second.
BOUND = 10


@contextmanager
def seconds(step: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    print(f"{step}: {took:.2f} s")
    assert took < BOUND, step


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    with seconds("write ten splits"):
        return glm5_header.write_splits(tmp_path_factory.mktemp("splits"), "GLM-5-UD-Q4_K_XL")


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with seconds("write one file"):
        return glm5_header.write(tmp_path_factory.mktemp("merged") / "GLM-5-UD-Q4_K_XL.gguf")


def census(mix: glm5_header.TypeMix) -> tuple[Counter[str], int]:
    """How many tensors of each type, and the bytes of all."""
    tensors = glm5_header.tensors(mix)
    return Counter(GGML_TYPES[item.kind][0] for item in tensors.values()), sum(len(i.data) for i in tensors.values())


# --- the file --------------------------------------------------------------------------------------------------------


def test_types_of_glm_5_2_add_up_to_what_is_published() -> None:
    types, size = census(glm5_header.GLM_5_2)
    assert types == {"F32": 709, "Q8_0": 872, "Q4_K": 150, "Q5_K": 74, "Q6_K": 4}
    assert f"{size / GIB:.2f}" == "435.19"


def test_glm_5_is_as_large_as_the_file_that_was_served() -> None:
    types, size = census(glm5_header.GLM_5)
    assert set(types) == {"F32", "Q4_K", "Q5_K", "Q6_K", "Q8_0"}
    assert 401 < size / GIB < 402


def test_names_and_shapes_are_complete(merged: Path) -> None:
    model = read(merged)
    shapes = {tensor.name: tensor.ne for tensor in model.tensors}
    assert len(shapes) == 1809
    assert facts([model])["parameters"] == 753_864_139_008
    parts = Counter(name.split(".", 2)[2] for name in shapes if name.startswith("blk."))
    assert set(parts.values()) == {79, 76, 3, 1}
    assert sorted(name for name, count in parts.items() if count == 1) == [
        f"nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    ]
    assert shapes["blk.78.ffn_down_exps.weight"] == (2048, 6144, 256)
    assert shapes["blk.0.attn_k_b.weight"] == (192, 512, 64)
    assert shapes["blk.0.attn_v_b.weight"] == (512, 256, 64)


def test_it_takes_megabytes_of_disk(merged: Path, splits: list[Path]) -> None:
    assert merged.stat().st_size > 401 * GIB
    assert sum(path.stat().st_blocks * 512 for path in [merged, *splits]) < 64 << 20


# --- what reads it ---------------------------------------------------------------------------------------------------


def test_gguf_info_reads_ten_splits_and_one_file(run: Runner, splits: list[Path], merged: Path) -> None:
    assert len(splits) == 10
    with seconds("gguf_info of ten splits"):
        found = run("gguf_info", path=str(splits[4]))["gguf"]
    with seconds("gguf_info of one file"):
        one = run("gguf_info", path=str(merged))["gguf"]
    for key in ("architecture", "tensors", "tensor_bytes", "parameters", "types", "metadata"):
        assert found[key] == one[key], key
    assert (found["splits"], one["splits"]) == (10, 1)
    assert found["types"]["Q4_K"]["tensors"] == 226
    assert found["metadata"]["tokenizer.ggml.merges"] == {"type": "str", "length": 321649}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "found 9 of 10 files, missing GLM-5-UD-Q4_K_XL-00004-of-00010.gguf"),
        ("swapped", "says it is split 5 of 10, wanted split 4"),
        ("truncated", "truncated or damaged, fetch it again"),
        ("other model", "the splits hold 1808 tensors, wanted split.tensors.count 1809"),
    ],
)
def test_a_wrong_split_is_named(tmp_path: Path, splits: list[Path], fault: str, message: str) -> None:
    paths = [tmp_path / path.name for path in splits]
    for path, source in zip(paths, splits):
        if source is not splits[3]:
            path.symlink_to(source)
    if fault == "swapped":
        paths[3].symlink_to(splits[4])
    elif fault == "truncated":
        write_altered(paths[3], splits[3], size=splits[3].stat().st_size - 40)
    elif fault == "other model":
        write_altered(paths[3], splits[3], drop="blk.21.attn_norm.weight")
    with seconds(f"read_set with a split {fault}"), pytest.raises(GgufError, match=message):
        read_set(paths)


def write_altered(path: Path, source: Path, size: int | None = None, drop: str | None = None) -> None:
    """Write the fourth split again, cut to a size or without a tensor."""
    every = glm5_header.tensors()
    kept = {item.name: every[item.name] for item in read(source).tensors if item.name != drop}
    glm5_header.write_sparse(path, glm5_header.split_keys(3, 10, 1809), kept)
    if size is not None:
        os.truncate(path, size)


def test_the_merge_plan_gives_the_whole_model(tmp_path: Path, splits: list[Path], merged: Path) -> None:
    with seconds("plan the merge"):
        plan = expected_layout(read_set(splits))
    whole = read(merged)
    assert [segment.name for segment in plan.segments] == [tensor.name for tensor in whole.tensors]
    assert [segment.nbytes for segment in plan.segments] == [tensor.nbytes for tensor in whole.tensors]
    output = tmp_path / "merged.gguf"
    output.write_bytes(plan.header)
    os.truncate(output, plan.size)
    with seconds("find the sources of a merged file"):
        assert layout(read(output), plan.header, read_set(splits)) == plan


def test_a_merge_without_room_is_refused_at_once(
    run: Runner, monkeypatch: pytest.MonkeyPatch, splits: list[Path]
) -> None:
    size = expected_layout(read_set(splits)).size
    output = splits[0].with_name("merged.gguf")
    room = SimpleNamespace(f_bfree=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)

    def merge() -> str:
        with seconds("gguf_merge until it asks for room"):
            return run.error(
                "gguf_merge",
                name="glm5",
                splits=[{"path": str(path)} for path in splits],
                output=str(output),
                tool="/nowhere/llama-gguf-split",
            )

    room.f_bfree = size // 4096
    with pytest.raises(FetchError):
        check_space(output.parent, size)
    assert "Or serve the splits without merging" in merge()
    room.f_bfree = 2 * size // 4096
    check_space(output.parent, size)
    assert "is no program that can be run" in merge()
