"""Programs that may never return are not waited for."""

from __future__ import annotations

import time

from octoserve import bounded


def test_what_a_program_says() -> None:
    assert bounded.run(["echo", "well"], timeout_s=10) == "well\n"


def test_one_that_does_not_end_or_start_says_nothing() -> None:
    began = time.monotonic()
    assert bounded.run(["sleep", "30"], timeout_s=0.2) == ""
    assert time.monotonic() - began < 10
    assert bounded.run(["/nowhere/tool"], timeout_s=1) == ""
