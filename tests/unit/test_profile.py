"""A mistake in a profile is named before an hour of loading, and all of them at once."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from octoserve import profile

ROOT = Path(__file__).parents[2]
PROFILES = sorted(ROOT.glob("files/profiles/*.yml"))
MISSING = object()

WHOLE: dict[str, Any] = {
    "name": "demo",
    "description": "for this test",
    "stack": {"name": "engine-1.2", "variant": "cuda"},
    "model": {
        "name": "Demo",
        "prepare": "merge",
        "sources": [{"url": "/srv/demo", "files": [{"path": "a.gguf", "size": 3, "sha256": "0" * 64}]}],
    },
    "serve": {
        "served_model_name": "demo",
        "args": {"max-model-len": {"value": 4096, "why": "long enough"}},
        "env": {"NCCL_PROTO": {"value": "LL", "why": "latency"}, "LEVEL": {"value": 1, "why": "a number"}},
        "gpu": {"count": 8, "memory_utilization": 0.95},
        "start_timeout_s": 600,
    },
    "gates": {
        "suites": ["default"],
        "throughput": {"trials": 5, "floor_tok_s": 50, "expected_completion_tokens": 100},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """WHOLE with another value at a path, or without it."""
    document = copy.deepcopy(WHOLE)
    *sections, key = path.split(".")
    found = document
    for section in sections:
        found = found[section]
    if value is MISSING:
        del found[key]
    else:
        found[key] = value
    return document


def with_file(**entry: Any) -> list[dict[str, Any]]:
    return [{"url": "/srv/demo", "files": [{"path": "a.gguf", "size": 3, "sha256": "0" * 64, **entry}]}]


def test_there_are_profiles() -> None:
    assert {"glm5_ud_q4_k_xl.yml", "tiny_glm.yml"} <= {path.name for path in PROFILES}


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: str(path.stem))
def test_the_projects_own_profiles_are_right(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    found = profile.check(document, path.stem)
    assert found["serve"]["args"].keys() == document["serve"]["args"].keys()
    assert all((ROOT / f"files/gates/{name}.yml").is_file() for name in found["gates"]["suites"])
    variants = yaml.safe_load((ROOT / f"files/patches/{found['stack']['name']}/stack.yml").read_text())["variants"]
    assert found["stack"]["variant"] in variants


def test_values_are_kept_without_their_reasons() -> None:
    document = copy.deepcopy(WHOLE)
    found = profile.check(document, "demo")
    assert found["serve"]["args"] == {"max-model-len": 4096}
    assert found["serve"]["env"] == {"NCCL_PROTO": "LL", "LEVEL": 1}
    assert (found["parsers"], found["chat_template_args"]) == ({}, {})
    assert found["model"] == WHOLE["model"]
    assert document == WHOLE, "what was given is not changed"


def test_what_may_be_left_out_or_null() -> None:
    assert profile.check(changed("serve.gpu", None), "demo")["serve"]["gpu"] is None
    given = changed("parsers", {"tool_call": "glm47"})
    assert profile.check(given, "demo")["parsers"] == {"tool_call": "glm47"}
    profile.check(changed("model.sources", with_file(size=None, sha256=None, name="b.gguf")), "demo")
    profile.check(changed("model.sources", [{"url": "/srv/demo", "files": [{"path": "a.gguf"}]}]), "demo")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("name", "other", "name is 'other', wanted 'demo' as the file is called"),
        ("description", MISSING, "description is missing"),
        ("stack", MISSING, "stack is missing"),
        ("stack.variant", 13, "stack.variant is 13, wanted str"),
        ("serv", {}, "unknown key serv"),
        ("serve.start_timout_s", 600, "unknown key serve.start_timout_s"),
        ("serve.start_timeout_s", MISSING, "serve.start_timeout_s is missing"),
        ("serve.start_timeout_s", True, "serve.start_timeout_s is True, wanted int"),
        ("serve.gpu", MISSING, "serve.gpu is missing"),
        ("serve.gpu", 8, "serve.gpu is 8, wanted dict or null"),
        ("serve.gpu.memory_utilization", MISSING, "serve.gpu.memory_utilization is missing"),
        ("serve.args.port", 8000, "serve.args.port is 8000, wanted {value: …, why: …}"),
        ("serve.args.port", {"value": 1, "why": " "}, "serve.args.port is"),
        ("serve.args.port", {"value": 1, "why": None}, "serve.args.port is"),
        ("serve.env.HOME", {"value": 1}, "serve.env.HOME is"),
        ("serve.env.HOME", {"value": True, "why": "x"}, "HOME is True, wanted text or a number"),
        ("serve.env.NO-NAME", {"value": "x", "why": "x"}, "'NO-NAME' is no name"),
        ("parsers", {"tool-call": "glm47"}, "unknown key parsers.tool-call"),
        ("model.prepare", "glue", "model.prepare is 'glue', wanted merge or splits"),
        ("model.sources", [], "model.sources is empty"),
        ("model.sources", {}, "model.sources is {}, wanted list"),
        ("model.sources", [{"url": "/srv"}], "model.sources[1] is {'url': '/srv'}, wanted {url, files}"),
        ("model.sources", [{}], "model.sources[1] is {}, wanted {url, files}"),
        ("model.sources", [{"url": "", "files": [{"path": "a"}]}], "model.sources[1].url is ''"),
        ("model.sources", [{"url": "/srv", "files": 5}], "model.sources[1].files is 5, wanted a list"),
        ("model.sources", [{"url": "/srv", "files": []}], "model.sources[1].files is []"),
        ("model.sources", with_file(path="../../etc/passwd"), "'../../etc/passwd'"),
        ("model.sources", with_file(path="/etc/passwd"), "'/etc/passwd'"),
        ("model.sources", with_file(sha256="0" * 63), "sha256: 64 digits or null"),
        ("model.sources", with_file(size="3"), "size: bytes or null"),
        ("model.sources", with_file(sh256=None), "'sh256'"),
        ("gates.throughput.floor_tok_s", MISSING, "gates.throughput.floor_tok_s is missing"),
        ("gates.throughput.trails", 5, "unknown key gates.throughput.trails"),
    ],
)
def test_a_mistake_is_named(path: str, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"^profile demo: ") as caught:
        profile.check(changed(path, value), "demo")
    assert named in str(caught.value)
    assert "; " not in str(caught.value), "one mistake is told once"


def test_all_mistakes_are_named_at_once() -> None:
    document = changed("serve.args.port", 8000)
    document["model"]["prepare"] = "glue"
    document["name"] = "other"
    del document["gates"]
    with pytest.raises(ValueError, match="profile demo") as caught:
        profile.check(document, "demo")
    for named in ("gates is missing", "model.prepare is 'glue'", "serve.args.port is 8000", "name is 'other'"):
        assert named in str(caught.value)


@pytest.mark.parametrize("document", [None, [], "demo"])
def test_what_is_no_mapping_is_named(document: Any) -> None:
    with pytest.raises(ValueError, match="wanted a mapping"):
        profile.check(document, "demo")


def test_the_tiny_profile_names_the_fixture_as_it_is() -> None:
    fixture = ROOT / "tests/fixtures/tiny_glm"
    entries = yaml.safe_load((ROOT / "files/profiles/tiny_glm.yml").read_text())["model"]["sources"][0]["files"]
    sums = [line.split() for line in (fixture / "SHA256SUMS").read_text().splitlines()]
    assert {entry["path"]: entry["sha256"] for entry in entries} == {name: digest for digest, name in sums}
    for entry in entries:
        content = (fixture / entry["path"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"])
