"""The cases of each suite, and what tells whether a result still speaks of them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Union

from tests.faults import daily, merge, redeploy, service
from tests.faults.host import Host

Case = Union[service.Fault, redeploy.Case]
SUITES: Mapping[str, Sequence[Case]] = {
    "service": [fault for fault in service.FAULTS if fault.engine != "real"],
    "vllm": [fault for fault in service.FAULTS if fault.engine != "fake"],
    "redeploy": [*redeploy.CASES, *merge.CASES],
    "daily": daily.CASES,
}
#: What the cases run on a host and against it; whole folders, so that no new module is forgotten. Not the results.
COVERS = (
    *("action_plugins", "callback_plugins", "filter_plugins", "library", "module_utils", "playbooks", "roles"),
    *("site.yml", "ansible.cfg", "templates", "requirements/host.txt", "scripts/redeploy.py", "files/sandbox"),
    *("files/profiles/tiny_glm.yml", "tests/faults", "tests/fixtures/fake_engine", "tests/fixtures/nvml_stub"),
    *("tests/molecule/fake_engine", "tests/molecule/service", "tests/molecule/redeploy"),
    *("tests/unit/fake_openai_server.py", "tests/unit/tiny_wheels.py", "tests/gates/scripted_model.py"),
    ":(exclude)*.md",
    ":(exclude)tests/faults/*.json",
)


def digest(case: Case) -> str:
    """Changes where the source of what meets a case does, or how it must end: then its row is of another case."""
    met = [_source(value) for _, value in sorted(vars(case).items()) if callable(value)]
    return hashlib.sha256("\n".join([case.ends, *met]).encode()).hexdigest()[:12]


def meet(host: Host, case: Case) -> Any:
    """Meet one case. Returns what it tells: the seconds from fault to end, the task that was killed, or nothing."""
    return service.meet(host, case) if isinstance(case, service.Fault) else redeploy.meet(host, case)


def _source(value: object) -> str:
    """Source of a function and of what it closes over; any other value as it is written."""
    if not isinstance(value, FunctionType):
        return repr(value)
    functions, text = _functions(value.__code__.co_filename)
    own = [ast.get_source_segment(text, node) or "" for node in functions.get(value.__code__.co_firstlineno, [])]
    return "\n".join([*own, *(_source(cell.cell_contents) for cell in value.__closure__ or ())])


@cache
def _functions(path: str) -> tuple[dict[int, list[ast.AST]], str]:
    """The functions of a file by the line that they begin in."""
    text = Path(path).read_text(encoding="utf-8")
    found: dict[int, list[ast.AST]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            found.setdefault(node.lineno, []).append(node)
    return found, text
