"""Every role's defaults, argument specs and README name the same variables with the same values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROLES = sorted(path.parents[1] for path in ROOT.glob("roles/*/tasks/main.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def spec_of(role: Path) -> dict[str, Any]:
    options: dict[str, Any] = load(role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    return options


@pytest.mark.parametrize("role", ROLES, ids=lambda role: str(role.name))
def test_defaults_equal_argument_specs(role: Path) -> None:
    specs = {name: option["default"] for name, option in spec_of(role).items() if "default" in option}
    defaults = load(role / "defaults/main.yml") if (role / "defaults/main.yml").exists() else {}
    assert defaults == specs


@pytest.mark.parametrize("role", ROLES, ids=lambda role: str(role.name))
def test_an_option_without_default_says_whether_it_is_required(role: Path) -> None:
    silent = [name for name, option in spec_of(role).items() if "default" not in option and "required" not in option]
    assert silent == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: str(role.name))
def test_public_variables_carry_the_role_name(role: Path) -> None:
    assert [name for name in spec_of(role) if not name.startswith(f"{role.name}_")] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: str(role.name))
def test_readme_lists_every_variable_with_its_default(role: Path) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|]*?)`? \|", (role / "README.md").read_text(), re.MULTILINE))
    shown = {name: rows.get(name) for name in spec_of(role)}
    assert shown == {name: as_shown(option) for name, option in spec_of(role).items()}


def as_shown(option: dict[str, Any]) -> str:
    """How a README writes an option's default: as one line of YAML, or *required*."""
    if "default" not in option:
        return "*required*" if option["required"] else "unset"
    text = yaml.safe_dump(option["default"], default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def test_there_are_roles() -> None:
    assert ROLES
