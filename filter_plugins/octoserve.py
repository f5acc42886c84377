"""Jinja filters: small pure functions of module_utils/octoserve."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# Ansible finds module_utils for modules; plugins that run on the controller have to be told.
sys.path.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

import yaml
from octoserve import coherence_suite, hand_made, profile, reference, unit_file


def _reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function's ValueError a filter error, which Ansible shows without a traceback."""

    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except ValueError as error:
            raise AnsibleFilterError(str(error)) from error

    return run


def python_files(folder: str) -> dict[str, str]:
    """Text of each Python file of a folder on the controller, by name."""
    return {path.name: path.read_text() for path in sorted(Path(folder).glob("*.py"))}


def slurped_mapping(content: str, keys: list[str]) -> dict[str, Any]:
    """The JSON object of a file as slurp gives it (base64), empty where it is none, or lacks one of the keys."""
    try:
        found = json.loads(base64.b64decode(content))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.keys() >= set(keys) else {}


def gates_cases(
    suites: list[str], reference_file: str, perplexity: dict[str, Any], template_args: dict[str, Any]
) -> list[str]:
    """Names of the cases of some suites, after all that the gates read on the controller was checked.

    Raises ValueError that names the file.
    """
    read = [_of_file(path, _yaml, coherence_suite.parse_suite) for path in suites]
    references = _of_file(reference_file, json.loads, reference.check) if reference_file else {}
    coherence_suite.check_held(read, perplexity, references)
    cases = [case for suite in read for case in suite.cases]
    coherence_suite.check_names(cases)
    stale = [
        case.name
        for case in cases
        if isinstance(case, coherence_suite.Score)
        and case.name in references
        and references[case.name]["identity"] != case.identity(template_args)
    ]
    if stale:
        raise ValueError(
            f"{reference_file}: {', '.join(stale)}: of another text or other template arguments; take gates.reference "
            "out of the profile, deploy once with gates_bootstrap=true, and copy the host's record to this file"
        )
    return [case.name for case in cases]


def gates_suite(read: tuple[str, str]) -> Any:
    """The document of a suite, of the path and the text of its file, after it was checked.

    Raises ValueError that names the file.
    """
    path, text = read
    document = _named(path, lambda: _yaml(text))
    _named(path, lambda: coherence_suite.parse_suite(document))
    return document


def _of_file(path: str, parse: Callable[[str], Any], check: Callable[[Any], Any]) -> Any:
    return _named(path, lambda: check(parse(Path(path).read_text(encoding="utf-8"))))


def _named(path: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ValueError, TypeError) as error:  # a list where a text is wanted, say
        raise ValueError(f"{path}: {error}") from error


def _yaml(text: str) -> Any:
    """The document. Raises ValueError, which quotes nothing of the text: it may be private."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"no YAML: {where}{error.problem}") from None
    except yaml.YAMLError:
        raise ValueError("no YAML: it holds a character that YAML does not allow") from None


class FilterModule:
    """What Ansible asks a filter plugin for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as templates use them."""
        return {
            "python_files": python_files,
            "slurped_mapping": slurped_mapping,
            "service_unit": hand_made.with_suffix,
            "octoserve_profile": _reported(profile.check),
            "gates_cases": _reported(gates_cases),
            "gates_suite": _reported(gates_suite),
            "vllm_arguments": unit_file.arguments,
            "systemd_quote": unit_file.quote,
            "systemd_environment": _reported(unit_file.environment),
        }
