"""What a start that dies or takes long says to the operator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from octoserve import startup
from octoserve.startup import UnitState

SHOW = """Result=exit-code
NRestarts=2
ExecMainStatus=1
ActiveState=failed
SubState=failed
InvocationID=0123456789abcdef0123456789abcdef
"""
SECONDARY = """(APIServer pid=10) ERROR 11-30 01:02:09 [core.py:99] Traceback (most recent call last):
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def state(active: str, sub: str) -> UnitState:
    return UnitState(active, sub, "success", "0", "", 0)


def program(folder: Path, name: str, output: str, status: int = 0) -> Path:
    """A stand-in that writes its arguments to a file, one a line, and prints the output."""
    path = folder / name
    path.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" >'{folder / name}.args'\ncat <<'END'\n{output}END\nexit {status}\n"
    )
    path.chmod(0o755)
    return path.with_name(f"{name}.args")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_what_systemd_says_is_read(path: Path) -> None:
    asked = program(path, "systemctl", SHOW)
    assert startup.unit_state("octoserve-main.service") == UnitState(
        active="failed",
        sub="failed",
        result="exit-code",
        exit_status="1",
        invocation="0123456789abcdef0123456789abcdef",
        restarts=2,
    )
    assert asked.read_text().splitlines()[0] == "show"
    assert asked.read_text().splitlines()[-1] == "octoserve-main.service"


def test_only_one_start_is_read_from_the_journal(path: Path) -> None:
    asked = program(path, "journalctl", "one\ntwo\n")
    assert startup.journal("octoserve-main.service", "0123") == ["one", "two"]
    words = asked.read_text().splitlines()
    assert words[-3:] == ["_SYSTEMD_INVOCATION_ID=0123", "+", "INVOCATION_ID=0123"]
    startup.journal("octoserve-main.service", since="2026-12-01 03:15:45")
    assert "--since=2026-12-01 03:15:45" in asked.read_text().splitlines()
    assert asked.read_text().splitlines()[-2:] == ["-u", "octoserve-main.service"]


@pytest.mark.parametrize(
    ("active", "sub", "alive"),
    [
        ("activating", "start-pre", True),
        ("activating", "start", True),
        ("active", "running", True),
        ("activating", "auto-restart", False),
        ("activating", "auto-restart-queued", False),
        ("deactivating", "stop-sigterm", False),
        ("failed", "failed", False),
        ("inactive", "dead", False),
    ],
)
def test_a_unit_that_waits_for_its_restart_has_died(active: str, sub: str, alive: bool) -> None:
    assert state(active, sub).alive is alive


@pytest.mark.parametrize(
    ("line", "bare"),
    [
        ("(EngineCore pid=12) INFO 11-30 01:02:03 [core.py:12] Loading weights", "Loading weights"),
        ("(Worker_TP0 pid=12) ValueError: too long", "ValueError: too long"),
        ("WARNING 11-30 01:02:03 [envs.py:1] Unknown variable", "Unknown variable"),
        ("Loading safetensors: 50%", "Loading safetensors: 50%"),
        ("(no prefix) INFO", "(no prefix) INFO"),
    ],
)
def test_a_line_without_its_prefix(line: str, bare: str) -> None:
    assert startup.bare(line) == bare


def test_the_last_line_that_says_something() -> None:
    lines = ["INFO 11-30 01:02:03 [a.py:1] Capturing CUDA graphs", "(EngineCore pid=1) ----", "", "   "]
    assert startup.last_words(lines) == "Capturing CUDA graphs"
    assert len(startup.last_words(["x" * 500])) == 150
    assert startup.last_words(["", "---"]) == startup.last_words([]) == "nothing in the journal yet"


def traceback(error: str, prefix: str = "(EngineCore pid=12) ") -> str:
    body = f'Traceback (most recent call last):\n  File "/a/b.py", line 1, in load\n    raise it\n{error}\n'
    return "".join(f"{prefix}{line}\n" for line in body.splitlines())


@pytest.mark.parametrize(
    ("journal", "cause"),
    [
        (traceback("KeyError: 'indexer.weights_proj.weight'") + SECONDARY, "KeyError: 'indexer.weights_proj.weight'"),
        (
            traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
            + traceback("RuntimeError: WorkerProc initialization failed due to an exception in a background process.")
            + SECONDARY,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (traceback("AssertionError"), "AssertionError"),
        (
            traceback("OSError: [Errno 2] No such file") + "\nDuring handling of the above exception:\n"
            "" + traceback("RuntimeError: cannot load"),
            "OSError: [Errno 2] No such file",
        ),
        (
            traceback(
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
                "  Value error, max_model_len (9000) is greater than 1024 [type=value_error, input_type=ArgsKwargs]\n"
                "    For further information visit https://errors.pydantic.dev/2.12/v/value_error",
                prefix="(APIServer pid=10) ",
            ),
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig: Value error, "
            "max_model_len (9000) is greater than 1024 [type=value_error, input_type=ArgsKwargs]",
        ),
        (
            "usage: api_server.py [options]\napi_server.py: error: unrecognized arguments: --nonsense\n",
            "usage: api_server.py [options]; api_server.py: error: unrecognized arguments: --nonsense",
        ),
        (SECONDARY, "Traceback (most recent call last):; RuntimeError: Engine core initialization failed. See root"),
        ("", "its journal is empty"),
        ("\n\n", "its journal is empty"),
        (
            "Starting octoserve-main.service.\noctoserve.guard_gpu: Found: card 3 is lost. Wanted: eight. Do: reboot.\n"
            "octoserve-main.service: Failed with result 'exit-code'.\n",
            "octoserve.guard_gpu: Found: card 3 is lost. Wanted: eight. Do: reboot.",
        ),
        ("INFO 11-30 01:02:03 [a.py:1] Error: is a word here\nKilled\n", "Error: is a word here; Killed"),
    ],
    ids=[
        "key",
        "memory",
        "assertion",
        "chained",
        "pydantic",
        "usage",
        "secondary",
        "empty",
        "blank",
        "guard",
        "no exception",
    ],
)
def test_the_cause_of_a_death(journal: str, cause: str) -> None:
    assert startup.cause(journal.splitlines()).startswith(cause)


def test_the_end_of_a_long_journal_without_a_cause_is_short() -> None:
    assert startup.cause([f"line {number}" for number in range(100)]).split("; ")[0] == "line 88"
