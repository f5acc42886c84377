"""A summary as JUnit XML, which every CI shows: one test a phase, a case, a point of the sweeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from . import words

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
DID_NOT_RUN = "the gate did not run"


def junit(summary: Mapping[str, Any], cause: str) -> str:
    """The run as JUnit XML: suites for the phases and for each gate. A gate that did not run is an error."""
    root = ElementTree.Element("testsuites", name=f"octoserve {summary['host']}")
    _phases(_suite(root, "phases"), summary, cause)
    _coherence(_suite(root, "coherence"), summary["coherence"])
    _throughput(_suite(root, "throughput"), summary["throughput"])
    for suite in root:
        suite.set("tests", str(len(suite)))
        for kind in ("failure", "error", "skipped"):
            name = {"failure": "failures", "error": "errors"}.get(kind, kind)
            suite.set(name, str(len(suite.findall(f"testcase/{kind}"))))
        suite.set("time", f"{sum(float(case.get('time', 0)) for case in suite):.3f}")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _phases(suite: ElementTree.Element, summary: Mapping[str, Any], cause: str) -> None:
    for phase in summary["phases"]:
        _case(suite, phase["name"], phase["seconds"])
    if failed := summary["failed_phase"]:
        _case(suite, failed, 0.0, kind="failure", message=f"failed in {failed}", text=cause)


def _coherence(suite: ElementTree.Element, coherence: Mapping[str, Any]) -> None:
    for case in coherence["cases"]:
        kind = {"pass": "", "fail": "failure"}.get(case["verdict"], "error")
        text = f"prompt: {words.excerpt(case['prompt'])}\nanswer: {words.excerpt(case['answer'])}"
        # What was measured stands in a test that passed, too.
        output = "; ".join(f"{name} {value}" for name, value in words.measured(case))
        group = f"coherence.{case.get('kind', 'question')}"
        made = _case(suite, case["name"], case["seconds"], kind=kind, message=case["reason"], text=text, group=group)
        if output:
            ElementTree.SubElement(made, "system-out").text = NOT_XML.sub("\ufffd", output)
    if not coherence["cases"]:
        _case(suite, "coherence", 0.0, kind="error", message=DID_NOT_RUN)
    for case in coherence.get("left_out") or []:
        _case(suite, case["name"], 0.0, kind="skipped", message=case["reason"])


def _throughput(suite: ElementTree.Element, result: Mapping[str, Any]) -> None:
    kind = "" if result["ok"] else "failure" if result["verdict"] in ("fail", "regression") else "error"
    made = _case(suite, "decode_tok_s", 0.0, kind=kind, message=str(result["reason"]))
    if line := words.throughput_line(result):
        ElementTree.SubElement(made, "system-out").text = f"{line}{'; ' if result['reason'] else ''}{result['reason']}"
    for point in result.get("points") or []:
        # A request that failed keeps the gate from passing. A point that was cut short or left out only informs.
        kind = "error" if point["failed"] else "skipped" if point["reason"] else ""
        name = words.point_name(point)
        made = _case(
            suite, name, point["seconds"] or 0.0, kind=kind, message=point["reason"], group="throughput.points"
        )
        if point["requests"]:
            ElementTree.SubElement(made, "system-out").text = words.point_line(point)


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=name)


def _case(
    suite: ElementTree.Element,
    name: str,
    seconds: float,
    *,
    kind: str = "",
    message: str = "",
    text: str = "",
    group: str = "",
) -> ElementTree.Element:
    group = group or suite.get("name", "")
    case = ElementTree.SubElement(suite, "testcase", name=name, classname=group, time=f"{seconds:.3f}")
    if kind:
        reason = ElementTree.SubElement(case, kind, message=NOT_XML.sub("\ufffd", message))
        reason.text = NOT_XML.sub("\ufffd", text)
    return case
