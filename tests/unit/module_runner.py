"""Runs a module of library/ in this process: the same code as under Ansible, in a hundredth of the time."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import ansible.module_utils
import pytest
from ansible.module_utils.testing import patch_module_args

ROOT = Path(__file__).parents[2]


class Runner:
    """`run("deployment", path=…, state="recorded", content={})` returns what the module returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        places = [*ansible.module_utils.__path__, str(ROOT / "module_utils")]
        monkeypatch.setattr(ansible.module_utils, "__path__", places)

    def __call__(self, called: str, check: Any = False, **arguments: Any) -> dict[str, Any]:
        spec = importlib.util.spec_from_file_location(f"library_{called}", ROOT / "library" / f"{called}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._capsys.readouterr()
        with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            module.main()
        answer: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return answer

    def changed(self, called: str, check: Any = False, **arguments: Any) -> bool:
        """Run it, which must succeed, and return whether it changed something."""
        answer = self(called, check, **arguments)
        assert not answer.get("failed"), answer["msg"]
        return bool(answer["changed"])

    def error(self, called: str, **arguments: Any) -> str:
        """Run it, which must fail, and return its message."""
        answer = self(called, **arguments)
        assert answer.get("failed") is True, answer
        return str(answer["msg"])
