"""What a run's summary becomes for programs: JUnit, Prometheus, the text of a CI job. And what none of it may hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import made_up_results as made_up
import pytest
from octoserve import evidence
from octoserve.report.junit import junit
from octoserve.report.markdown import markdown
from octoserve.report.metrics import Origin, exposition
from octoserve.report.redaction import private_texts, redact
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

TEMPLATE = Path(__file__).parents[2] / "templates/report.html.j2"
RUNS = made_up.runs()


def suites(name: str) -> dict[str, ElementTree.Element]:
    """The suites of a run's JUnit file by name."""
    root = ElementTree.fromstring(junit(redact(evidence.summarize(RUNS[name])), "because"))
    return {str(suite.get("name")): suite for suite in root}


def counts(suite: ElementTree.Element) -> list[int]:
    """Tests, failures, errors, skipped."""
    return [int(suite.get(key, "-1")) for key in ("tests", "failures", "errors", "skipped")]


def test_junit_of_a_passed_run_has_every_case_and_point() -> None:
    found = suites("passed")
    assert counts(found["phases"]) == [5, 0, 0, 0]
    assert counts(found["coherence"]) == [15, 0, 0, 1]  # 14 cases and one left out
    assert counts(found["throughput"]) == [9, 0, 0, 0]  # the counting prompt and 8 points
    names = {str(case.get("name")): case for suite in found.values() for case in suite}
    assert str(names["prose"].findtext("system-out")).startswith("perplexity 6.31 (limit 6.6); tokens scored 512")
    assert str(names["needle-8192-at-50%"].findtext("system-out")) == "prompt tokens 8192; needle at 50 % of the text"
    assert names["capital-of-france-agrees"].get("classname") == "coherence.agreement"
    skipped = names["reasoning-apart"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "the profile names no reasoning parser"
    assert "tok/s in all" in str(names["concurrency 16"].findtext("system-out"))
    assert "56.9 tok/s decode" in str(names["decode_tok_s"].findtext("system-out"))


def test_junit_tells_wrong_from_not_asked_and_not_run() -> None:
    found = suites("wrong")
    assert counts(found["coherence"]) == [9, 5, 1, 1]
    assert counts(found["throughput"]) == [1, 0, 1, 0]
    assert found["phases"].findtext("testcase/failure") == "because"
    assert counts(suites("silent")["coherence"]) == [4, 0, 3, 1]
    assert counts(suites("stopped")["coherence"]) == [1, 0, 1, 0]
    assert counts(suites("slower")["throughput"])[:3] == [9, 1, 0]
    assert counts(suites("warned")["throughput"])[:3] == [9, 0, 0]


def test_junit_takes_what_no_xml_can_hold() -> None:
    bad = made_up.case("bad", "fail", answer="x\x00\ud800y", reason="\x1b[31m")
    run = made_up.run((made_up.task("gates", "coherence_gate"), made_up.coherence(bad)), failed=True)
    root = ElementTree.fromstring(junit(redact(evidence.summarize(run)), ""))
    assert "x\ufffd\ufffdy" in str(root.findtext("testsuite/testcase[@name='bad']/failure"))


def families(text: str) -> dict[str, Metric]:
    """What Prometheus' own parser reads."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def of_run(name: str) -> dict[str, Metric]:
    """What Prometheus reads of a run."""
    return families(evidence.metrics(RUNS[name], evidence.summarize(RUNS[name])))


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample with these labels."""
    (sample,) = (one for one in found[name].samples if labels.items() <= one.labels.items())
    return float(sample.value)


def test_metrics_of_a_passed_run() -> None:
    found = of_run("passed")
    assert all(family.type == "gauge" and family.documentation for family in found.values())
    assert {sample.labels["service"] for family in found.values() for sample in family.samples} == {"main"}
    assert value(found, "octoserve_gates_ok") == 1
    assert value(found, "octoserve_gates_last_run_timestamp_seconds") == made_up.STARTED.timestamp()
    assert value(found, "octoserve_coherence_cases") == value(found, "octoserve_coherence_cases_passed") == 14
    assert value(found, "octoserve_perplexity", text="code") == 3.02
    assert value(found, "octoserve_decode_tokens_per_second") == 56.9
    assert value(found, "octoserve_ttft_seconds") == pytest.approx(0.183)
    assert value(found, "octoserve_inter_token_latency_seconds", quantile="0.5") == pytest.approx(1 / 56.9, rel=0.05)
    points = found["octoserve_point_output_tokens_per_second"].samples
    assert len(points) == 8
    labels = {"sweep": "concurrency", "concurrency": "16", "context_tokens": "0"}
    assert value(found, "octoserve_point_output_tokens_per_second", **labels) > 400
    about = {"profile": "glm5_ud_q4_k_xl", "stack": "vllm-0.32.0", "deployment": "0007"}
    assert value(found, "octoserve_gates_info", **about) == 1


@pytest.mark.parametrize("name", ["wrong", "silent", "stopped"])
def test_metrics_of_a_run_that_failed_say_so_and_nothing_that_was_not_measured(name: str) -> None:
    found = of_run(name)
    assert value(found, "octoserve_gates_ok") == value(found, "octoserve_throughput_ok") == 0
    assert value(found, "octoserve_coherence_ok") == 0
    assert value(found, "octoserve_gates_last_run_timestamp_seconds") > 0
    assert "octoserve_decode_tokens_per_second" not in found


def test_two_instances_of_a_host_never_give_the_same_series() -> None:
    both = [
        exposition(Origin(service, "p", "s", "1"), made_up.STARTED, True, made_up.coherence(), made_up.throughput())
        for service in ("main", "draft")
    ]
    series = [line.rpartition(" ")[0] for text in both for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series)) > 60


def test_the_text_for_ci_names_verdict_phases_and_failed_cases() -> None:
    run = RUNS["wrong"]
    text = markdown(evidence.summarize(run), vars(run.cause))
    assert text.startswith("## ❌ The model answers wrong\n")
    assert "| model | 31 min 33 s | 1 |" in text
    assert '- **capital-of-france** (fail): "Paris" is not said' in text
    assert "- **agrees** (could-not-run):" in text
    passed = markdown(evidence.summarize(RUNS["passed"]), None)
    assert passed.startswith("## ✅ Right answers, fast enough\n")
    assert "| concurrency 32 | 714." in passed


def test_nothing_in_the_text_for_ci_becomes_markup() -> None:
    bad = made_up.case("a|b", "fail", reason="<img src=x> | *bold* `code`\n# title")
    run = made_up.run((made_up.task("gates", "coherence_gate"), made_up.coherence(bad)), failed=True)
    lines = [line for line in markdown(evidence.summarize(run), None).splitlines() if "a\\|b" in line]
    assert "- **a\\|b** (fail): \\<img src=x\\> \\| \\*bold\\* \\`code\\` \\# title" in lines


def test_secrets_are_blackened_by_name_by_value_and_by_look() -> None:
    clean = redact(
        {
            "api_key": "abc",
            "completion_tokens": 100,
            "argv": ["curl", "-H", "Authorization: Bearer zzz"],
            "url": "http://me:word@host/x",
            "text": "the hunter2x key, hf_" + "a" * 30,
            "HF_TOKEN": "t",
        },
        ["hunter2x"],
    )
    assert clean == {
        "api_key": "***",
        "completion_tokens": 100,
        "argv": ["curl", "-H", "Authorization: Bearer ***"],
        "url": "http://***@host/x",
        "text": "the *** key, ***",
        "HF_TOKEN": "***",
    }


def test_the_prompts_of_private_cases_are_known() -> None:
    suite = {
        "name": "mine",
        "cases": [
            {"name": "public", "prompt": "What is the capital of France?", "expect": {"accept": ["Paris"]}},
            {"name": "one", "private": True, "prompt": "What is\nproject Halcyon's code?", "expect": {"accept": ["x"]}},
            {"name": "two", "private": True, "messages": [{"role": "user", "content": "The secret is out."}]},
            {"name": "three", "private": True, "score": {"text": "A text of the house."}},
        ],
    }
    found = private_texts([{"suites": [suite], "api_key": "k"}])
    assert {"What is\nproject Halcyon's code?", "project Halcyon's code?", "The secret is out."} <= found
    assert "A text of the house." in found
    assert not any("France" in text or "Paris" in text for text in found)
    cases = [{"name": "x", "prompt": "Everything here."}, {"name": "y", "prompt": "All but this.", "private": False}]
    whole = private_texts([{"suites": [{"private": True, "cases": cases}]}])
    assert whole == {"Everything here."}


def test_what_public_cases_ask_as_well_is_no_secret() -> None:
    private = {"name": "a", "private": True, "prompt": "Who is Halcyon?\nAnswer with the number only."}
    public = {"name": "b", "prompt": "What is 17 + 25? Answer with the number only."}
    one, other = ({"suites": [{"name": "mine", "cases": [case]}]} for case in (private, public))
    assert "Answer with the number only." in private_texts([one])
    assert "Answer with the number only." not in private_texts([one, other])
    assert "Who is Halcyon?" in private_texts([one, other])


def test_what_is_private_reaches_no_file(tmp_path: Path) -> None:
    """A message of a task that quotes a private prompt, whole or as Python writes it, is blackened everywhere."""
    prompt = 'What does "Halcyon" stand for,\nin one word?\nthroughput'  # which is a key of the summary, too
    asked = {"suites": [{"cases": [{"name": "secret", "private": True, "prompt": prompt}]}]}
    told = f"the gate cannot be asked: case 'secret': found {prompt!r}; {prompt}"
    run = made_up.run((made_up.task("gates", "coherence_gate", "failed", told), {"msg": told}), failed=True)
    folder = evidence.write(run, tmp_path, TEMPLATE, private=private_texts([asked]))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path.name for path in files if "Halcyon" in path.read_text()] == []
    assert "the gate cannot be asked" in json.loads((folder / "raw/tasks.jsonl").read_text())["message"]


def test_the_docs_name_every_metric() -> None:
    page = (TEMPLATE.parents[1] / "docs/evidence.md").read_text()
    section = page.partition("## Metrics")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(octoserve_\w+)", "".join(rows))) == set(of_run("passed"))
