"""What templates and settings call, and the unit that comes out of it."""

from __future__ import annotations

import base64
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import systemd_syntax
from ansible.errors import AnsibleFilterError

ROOT = Path(__file__).parents[2]
PATHS = ("release", "home", "config_dir", "state_dir", "models_dir", "model", "cache_dir")


@pytest.fixture(scope="module")
def filters() -> dict[str, Callable[..., Any]]:
    """Loaded by its path, as Ansible does."""
    spec = importlib.util.spec_from_file_location("octoserve_filters", ROOT / "filter_plugins/octoserve.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Callable[..., Any]] = module.FilterModule().filters()
    return found


def test_a_mistake_is_a_filter_error(filters: dict[str, Callable[..., Any]]) -> None:
    """Ansible shows it in a line; any other exception comes with a traceback."""
    with pytest.raises(AnsibleFilterError, match=r"profile demo: .*stack is missing"):
        filters["octoserve_profile"]({"name": "demo"}, "demo")
    with pytest.raises(AnsibleFilterError, match="KEY holds a line break"):
        filters["systemd_environment"]({"KEY": "one\ntwo"})


def test_what_the_gates_read_is_checked_before_a_deploy(filters: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    suite, known = ROOT / "files/gates/tiny_glm.yml", ROOT / "files/gates/references/tiny_glm.json"

    def error(suites: list[Path], reference: Path | str, perplexity: dict[str, Any], **arguments: Any) -> str:
        with pytest.raises(AnsibleFilterError) as raised:
            filters["gates_cases"]([str(path) for path in suites], str(reference), perplexity, arguments)
        return str(raised.value)

    assert len(filters["gates_cases"]([str(suite)], str(known), {}, {})) == 15
    assert filters["gates_cases"]([str(suite)], "", {"score-count": 1.1}, {})
    assert "more than one case is called" in error([suite, suite], known, {})
    assert "missing.yml: [Errno 2]" in error([tmp_path / "missing.yml"], "", {})
    assert "gates.perplexity: score-counts: no scored text" in error([suite], known, {"score-counts": 1.1})
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    assert "damaged.json: Expecting" in error([suite], damaged, {})
    stale = error([suite], known, {}, enable_thinking=False)
    assert "tiny_glm.json: score-photosynthesis, score-count, score-wrong-sums: of another text" in stale


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        ("{name: a, prompt: b, expect: {accept: [c]}, yes: 1, 2: 3}", "case 'a': unknown: 2, True; known: "),
        ("{name: a, prompt: b, expect: {accept: [c]}, needs: [{d: 1}]}", ""),
    ],
)
def test_a_mistake_of_another_type_names_the_file_of_its_suite(
    filters: dict[str, Callable[..., Any]], tmp_path: Path, case: str, mistake: str
) -> None:
    path = tmp_path / "ours.yml"
    path.write_text(f"name: ours\ncases: [{case}]\n")
    with pytest.raises(AnsibleFilterError) as raised:
        filters["gates_suite"]((str(path), path.read_text()))
    assert str(raised.value).startswith(f"{path}: {mistake}")


def test_the_unit_starts_exactly_what_was_meant(filters: dict[str, Callable[..., Any]]) -> None:
    options = {
        "hf-overrides": {"index_topk": 0, "note": "100 % of $HOME, \"quoted\" and 'so'\n\\"},
        "max-model-len": 4096,
        "enable-prefix-caching": False,
        "chat-template": "# {{ no template }};",
    }
    words = filters["vllm_arguments"](options)
    # As Ansible sets it up; what this test does not give stays empty. It writes text, no HTML to escape.
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.ChainableUndefined)
    environment.filters.update(filters, basename=os.path.basename, dirname=os.path.dirname)
    template = environment.from_string((ROOT / "templates/vllm.service.j2").read_text())
    unit = template.render(
        {f"vllm_service_{name}": f"/srv/{name}" for name in PATHS}
        | {"vllm_service_model": "/srv/a model $x.gguf", "vllm_service_start_timeout": 600}
        | {"vllm_service_start_attempts": 3, "_vllm_service_attempt": 700}
        | {"_vllm_service_words": words}
    )
    assert systemd_syntax.exec_start(unit) == [
        "/srv/release/bin/python",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "/srv/a model $x.gguf",
        *words,
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [(b'{"who": "ann", "more": 1}', {"who": "ann", "more": 1}), (b'{"what": 1}', {}), (b'["who"]', {})]
    + [(text, {}) for text in (b"", b"{", b"\xff\xfe")],
)
def test_a_damaged_file_of_the_host_is_no_mapping(
    filters: dict[str, Callable[..., Any]], text: bytes, found: dict[str, Any]
) -> None:
    assert filters["slurped_mapping"](base64.b64encode(text).decode(), ["who"]) == found
