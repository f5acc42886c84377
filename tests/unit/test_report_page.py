"""The report page: what people see of every way that a run can end."""

from __future__ import annotations

import builtins
import functools
import re
from collections import Counter
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made_up_results as made_up
import pytest
from octoserve import evidence
from octoserve.report import page, plots, words

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "templates/report.html.j2"
RUNS = made_up.runs()


class Page(HTMLParser):
    """What a browser would load, the elements by name, their ids, and the texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open_details = 0
        self.elements: Counter[str] = Counter()
        self.svgs: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.loads += [str(names[key]) for key in ("src", "href") if not str(names.get(key, "#")).startswith("#")]
        self.ids += [str(names["id"])] if "id" in names else []
        self.open_details += tag == "details" and "open" in names
        self.elements[tag] += 1
        if tag == "svg":
            self.svgs.append(names)

    def handle_data(self, data: str) -> None:
        self.text += data


def render(run: evidence.Run) -> str:
    """The page of a run."""
    cause = vars(run.cause) if run.failed_phase and run.cause else None
    return page.render(TEMPLATE, evidence.summarize(run), run.throughput or {}, cause, run.started)


@functools.cache
def page_of(name: str) -> str:
    """The page of one of RUNS, drawn once."""
    return render(RUNS[name])


@pytest.mark.parametrize("name", RUNS)
def test_the_page_stands_alone(name: str) -> None:
    html = page_of(name)
    found = Page(html)
    assert found.loads == []
    assert found.elements["script"] == found.elements["link"] == found.elements["img"] == 0
    assert re.findall(r"url\((?!#)[^)]*\)|@import", html) == []
    assert [one for one, times in Counter(found.ids).items() if times > 1] == []
    assert set(re.findall(r"(?:href=\"#|url\(#|aria-labelledby=\")([\w.-]+)", html)) <= set(found.ids)


@pytest.mark.parametrize(
    ("name", "headline", "why", "then"),
    [
        ("passed", "Right answers, fast enough", "All 14 cases passed", "Nothing to do"),
        ("first", "Right answers, fast enough", "The one case passed", "Take gates_bootstrap out"),
        ("wrong", "The model answers wrong", '"Paris" is not said', "playbooks/gates.yml -i inventory/mine"),
        ("silent", "The model could not be asked", "connection refused", "journalctl --unit=octoserve-main"),
        ("locked out", "The server does not take the API key", "HTTP 401", "octoserve_api_key"),
        (
            "unlimited",
            "Nothing to hold its texts to yet",
            "perplexity of 6.31",
            "site.yml -i inventory/mine -e gates_bootstrap",
        ),
        ("stopped", "The service did not start", "CUDA out of memory", "site.yml -i inventory/mine"),
        ("slower", "Right answers, but slower than before", "slower than the mean", "playbooks/gates.yml"),
        ("warned", "Right answers, but slower than before", "slower than the mean", "playbooks/gates.yml"),
        ("slow", "Right answers, but not fast enough", "the floor of the profile is 60", "playbooks/gates.yml"),
    ],
)
def test_the_verdict_comes_first_with_the_reason_and_the_next_step(
    name: str, headline: str, why: str, then: str
) -> None:
    head = page_of(name).partition("</header>")[0].partition("<header>")[2]
    texts = [Page(part).text for part in re.findall(r"<(?:h1|p)[ >].*?</(?:h1|p)>", head, re.DOTALL)]
    assert headline in texts[0]
    assert why in texts[1]
    assert then in texts[2]


def test_the_cause_of_a_failed_start_is_told_whole() -> None:
    text = Page(page_of("stopped")).text
    assert "torch.OutOfMemoryError" in text
    assert "or free the card" in text


def test_cases_that_did_not_pass_are_open_and_the_others_folded() -> None:
    html = page_of("wrong")
    found = Page(html)
    cases = (RUNS["wrong"].coherence or {})["cases"]
    assert found.open_details == sum(case["verdict"] != "pass" for case in cases) == 6
    for case in cases:
        assert case["name"] in found.text
        assert case["reason"] in found.text
    assert "no reasoning parser" in found.text
    assert Page(page_of("passed")).open_details == 1  # the clocks, for a card was throttled


def test_what_an_answer_holds_is_text_and_no_markup() -> None:
    bad = made_up.case("markup", "fail", answer="<script>alert(1)</script><b>x</b>", reason="<i>no</i>")
    run = made_up.run((made_up.task("gates", "coherence_gate"), made_up.coherence(bad)), failed=True)
    found = Page(render(run))
    assert (found.elements["script"], found.elements["i"]) == (0, len(run.seconds))  # the bar of the phase
    assert "<script>alert(1)</script><b>x</b>" in found.text


def test_a_long_prompt_is_shown_without_its_middle() -> None:
    long = made_up.case("long", prompt="begin " + "x" * 200_000 + " end")
    html = render(made_up.run((made_up.task("gates", "coherence_gate"), made_up.coherence(long))))
    assert len(html) < 60_000
    assert re.search(r"195\u202f\d\d\d characters left out here; all are in raw/coherence.json", html)
    assert "begin x" in html
    assert "x end" in html


def test_every_plot_is_named_and_has_its_numbers_in_a_table() -> None:
    run = RUNS["passed"]
    html = page_of("passed")
    drawn, reason = plots.plots(run.throughput or {})
    assert reason == ""
    assert [plot.name for plot in drawn] == ["concurrency", "context", "latency", "history"]
    found = Page(html)
    assert len(found.svgs) == 4
    for plot, svg in zip(drawn, found.svgs):
        assert svg["role"] == "img"
        assert svg["aria-labelledby"] == f"{plot.name}-title {plot.name}-desc"
        assert plot.title in plot.svg
        assert plot.description in plot.svg
        assert all(len(row) == len(plot.head) for row in plot.rows)
    assert "requests at the same time" in found.text
    assert "milliseconds between two tokens" in found.text


def test_plots_take_their_colours_from_the_page_and_tell_no_time() -> None:
    drawn, _ = plots.plots(made_up.throughput())
    variables = set(re.findall(r"var\((--[\w-]+)\)", "".join(plot.svg for plot in drawn)))
    defined = re.findall(r"(--[\w-]+):", TEMPLATE.read_text())
    assert variables <= set(defined)
    for plot in drawn:
        assert re.findall(r"#[0-9a-f]{6}", plot.svg) == []
        assert "<metadata" not in plot.svg
        assert "<style" not in plot.svg
        assert "<text" in plot.svg  # to be found, copied and read aloud


def test_the_same_run_gives_the_same_page() -> None:
    assert page_of("passed") == render(made_up.runs()["passed"])
    later = made_up.runs()["passed"]
    later.started += timedelta(days=1)
    assert render(later) != page_of("passed")


def test_the_history_shows_this_start_once_and_the_alarm() -> None:
    result = made_up.throughput(starts=4)
    own = {"start": "own", "time": "now", "deployment": "7", "mean": 56.9, "trials": 5}
    kept = {**result, "kept": True, "baseline": {**result["baseline"]}}
    kept["baseline"]["history"] = [*result["baseline"]["history"], own]
    for found in (result, kept):
        assert len(plots.earlier_starts(found)) == 4
        (history,) = (plot for plot in plots.plots(found)[0] if plot.name == "history")
        assert [row[0] for row in history.rows] == ["1", "2", "3", "4", "now"]
        assert "alarm below" in history.svg
    slow = {**own, "start": "slow", "regression": True}
    kept["baseline"]["history"] = [*result["baseline"]["history"], slow, own]
    (history,) = (plot for plot in plots.plots(kept)[0] if plot.name == "history")
    assert [row[-1] for row in history.rows] == ["", "", "", "", "regression", ""]
    assert "regressions" in history.svg


def test_without_the_plotting_library_the_numbers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return really(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    found = Page(render(RUNS["passed"]))
    assert found.svgs == []
    assert "Install requirements/controller.txt" in found.text
    assert "Throughput over concurrency" in found.text
    assert re.search(r"714\.\d", found.text)  # tokens per second of 32 requests


@pytest.mark.parametrize(
    ("histogram", "ticks"),
    [
        ([[17.8, 40]], {"16.4", "16.8", "17.2", "17.6"}),
        ([[17.8, 1], [20.0, 0], [22.4, 39]], {"18", "19.5", "21"}),
        ([[0.0158 * 10 ** (n / 20), n % 7] for n in range(100)], {"0.1", "1", "10", "100", "1000"}),
    ],
)
def test_latencies_are_drawn_however_narrow_or_wide_they_are(histogram: list[list[float]], ticks: set[str]) -> None:
    upper = histogram[-1][0]
    gaps = {"p50": upper, "p95": upper, "p99": upper, "max": upper, "n": 40, "histogram": histogram}
    (plot,), _ = plots.plots({"itl_ms": gaps})
    assert len(plot.rows) == len(histogram)
    assert ticks <= set(re.findall(r">([\d.]+)</text>", plot.svg))
    assert "p99" in plot.svg
    assert plots.plots({"itl_ms": {**gaps, "histogram": [[1.0, 0]]}}) == ([], "")


def test_points_that_were_not_measured_are_left_out_of_plots_and_told() -> None:
    result = made_up.throughput()
    empty = {"output_tok_s": None, "decode_tok_s": None, "end_to_end_tok_s": None, "ttft_ms": None, "itl_ms": None}
    reason = "the server takes 8192 tokens"
    result["points"][-1] |= {**empty, "prompt_tokens": None, "requests": 0, "reason": reason}
    run = made_up.run((made_up.task("gates", "coherence_gate"), made_up.coherence()))
    run.record(made_up.task("gates", "throughput_gate"), result)
    html = render(run)
    assert f"context 32k <span>\u2013 {reason}</span>" in html
    (context,) = (plot for plot in plots.plots(result)[0] if plot.name == "context")
    assert [row[0] for row in context.rows] == ["short", "8k"]


def test_a_bottleneck_of_the_generator_is_told() -> None:
    result = made_up.throughput()
    result["generator"] = {"busy": 0.97, "ceiling_events_s": 900.0, "bottleneck": True}
    run = made_up.run((made_up.task("gates", "throughput_gate"), result))
    assert "The load generator was the bottleneck" in render(run)


@pytest.mark.parametrize(("scheme", "place"), [("light", 0), ("dark", 1)])
def test_texts_stand_out_from_what_is_behind_them(scheme: str, place: int) -> None:
    """WCAG 2.1, success criterion 1.4.3: 4.5 to 1."""
    block = re.findall(r":root \{(.*?)\}", TEMPLATE.read_text(), re.DOTALL)[place]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block))
    pairs = [(text, back) for text in ("text", "soft") for back in ("page", "card", "code")]
    pairs += [("text", f"{state}-back") for state in ("good", "warning", "bad", "unknown")]
    pairs += [(state, back) for state in ("good", "warning", "bad", "unknown") for back in (f"{state}-back", "card")]
    pairs += [(line, "card") for line in ("plot-1", "plot-2")]
    assert [(pair, scheme) for pair in pairs if contrast(*(colours[name] for name in pair)) < 4.5] == []


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, from 1 to 21."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of a colour in hexadecimal."""
    digits = colour.lstrip("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_numbers_in_words() -> None:
    assert [words.duration(seconds) for seconds in (0.0404, 1.26, 61, 7325)] == [
        "40 ms",
        "1.3 s",
        "1 min 1 s",
        "2 h 2 min",
    ]
    assert [words.tokens(count) for count in (0, 512, 8192, 32768, 10000)] == ["short", "512", "8k", "32k", "10000"]
    assert (words.number(None), words.number(21400, 0), words.number(0.25)) == (words.NONE, "21\u202f400", "0.2")
    assert words.cut("\n the journal:\n out of memory\nmore") == "the journal: out of memory"


def test_a_failure_after_the_gates_is_not_laid_on_the_model() -> None:
    gates = [(made_up.task("gates", "coherence_gate"), made_up.coherence())]
    gates += [(made_up.task("gates", "throughput_gate"), made_up.throughput())]
    broke: tuple[evidence.Task, dict[str, Any]] = (made_up.task("gates", "deployment", "failed", "disk is full"), {})
    html = render(made_up.run(*gates, broke, failed=True))
    head = html.partition("</header>")[0]
    assert "Right and fast enough, but the run failed" in head
    assert "disk is full" in head
    assert "What failed" in html
