"""Jinja filters: small pure functions of module_utils/octoserve."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# Ansible finds module_utils for modules; plugins that run on the controller have to be told.
sys.path.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from octoserve import profile, unit_file


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


class FilterModule:
    """What Ansible asks a filter plugin for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as templates use them."""
        return {
            "python_files": python_files,
            "octoserve_profile": _reported(profile.check),
            "vllm_arguments": unit_file.arguments,
            "systemd_quote": unit_file.quote,
            "systemd_environment": _reported(unit_file.environment),
        }
