"""Findings about the host around the cards, from made-up /proc trees and numbers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from made_up_host import write
from octoserve import listener, preflight_host
from octoserve.finding import CANNOT_SEE, ERROR, OK, WARNING, Host

GIB = 1024**3
MIB = 1024**2
UNIT = "octoserve-test.service"


def limits(hard: str) -> str:
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max locked memory         8388608              {hard:<20} bytes     \n"
    )


@pytest.mark.parametrize(
    ("hard", "rights", "users", "verdict", "words"),
    [
        ("unlimited", "0000000000000000", "0 0 4294967295", OK, "unlimited"),
        ("8388608", "000001ffffffffff", "0 0 4294967295", OK, "8.0 MiB for PID 1, which may raise it"),
        ("8388608", "00000000feffffff", "0 0 4294967295", WARNING, "capped at 8.0 MiB"),
        ("8388608", "000001ffffffffff", "0 100000 65536", WARNING, "capped at 8.0 MiB"),
    ],
    ids=["unlimited", "may raise", "no right", "user namespace"],
)
def test_locked_memory(tmp_path: Path, hard: str, rights: str, *, users: str, verdict: str, words: str) -> None:
    write(tmp_path, "proc/1/limits", limits(hard))
    write(tmp_path, "proc/1/status", f"Name:\tsystemd\nCapEff:\t{rights}\n")
    write(tmp_path, "proc/1/uid_map", f"         {users}\n")
    found = preflight_host.memlock(Host(tmp_path))
    assert (found.verdict, words in found.measured) == (verdict, True), found


def test_locked_memory_that_is_not_to_be_seen(tmp_path: Path) -> None:
    assert preflight_host.memlock(Host(tmp_path)).verdict == CANNOT_SEE


@pytest.mark.parametrize(
    ("total", "free", "verdict", "mend"),
    [
        (8 * GIB, 8 * GIB, OK, ""),
        (GIB, GIB, OK, ""),
        (64 * MIB, 64 * MIB, ERROR, "--shm-size"),
        (512 * MIB, 512 * MIB, WARNING, "--shm-size"),
        (8 * GIB, 100 * MIB, ERROR, "remove what ended services left"),
        (8 * GIB, GIB - 1, WARNING, "remove what ended services left"),
    ],
)
def test_shared_memory(total: int, free: int, verdict: str, mend: str) -> None:
    found = preflight_host.judge_shared_memory(total, free)
    assert (found.verdict, mend in found.mend) == (verdict, True), found


def test_shared_memory_is_read_and_missed(tmp_path: Path) -> None:
    assert preflight_host.shared_memory(Host(tmp_path)).verdict == ERROR
    (tmp_path / "dev/shm").mkdir(parents=True)
    total = os.statvfs(tmp_path)
    assert f"{total.f_blocks * total.f_frsize / GIB:.2f} free" in preflight_host.shared_memory(Host(tmp_path)).measured


@pytest.mark.parametrize(
    ("kib", "limit", "model", "verdict", "words"),
    [
        (1024**2 * 503, None, 402 * 10**9, OK, "503.00 GiB"),
        (1024**2 * 256, None, 402 * 10**9, WARNING, "256.00 GiB"),
        (1024**2 * 503, "max", 402 * 10**9, OK, "503.00 GiB"),
        (1024**2 * 503, str(64 * GIB), 402 * 10**9, WARNING, "64.00 GiB (limit of the control group)"),
        (1024**2 * 503, None, None, CANNOT_SEE, "the model's size is not known yet"),
    ],
)
def test_page_cache(
    tmp_path: Path, kib: int, limit: str | None, *, model: int | None, verdict: str, words: str
) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal:       {kib} kB\nMemFree: 1 kB\n")
    if limit:
        write(tmp_path, "sys/fs/cgroup/memory.max", f"{limit}\n")
    found = preflight_host.page_cache(Host(tmp_path), model)
    assert (found.verdict, words in found.measured) == (verdict, True), found


def test_page_cache_that_is_not_to_be_seen(tmp_path: Path) -> None:
    assert preflight_host.page_cache(Host(tmp_path), 1).verdict == CANNOT_SEE


@pytest.mark.parametrize(
    ("status", "ahead_s", "verdict", "words"),
    [
        (0x2001, 0.3, OK, "synchronized"),
        (0x2001, None, OK, "synchronized"),
        (0x0040, 0.3, WARNING, "not synchronized"),
        (0x2001, 90.0, WARNING, "90 s ahead of"),
        (0x2001, -90.0, WARNING, "90 s behind"),
        (0x2001, -86400.0, ERROR, "86400 s behind"),
        (None, 0.3, CANNOT_SEE, ""),
        (None, 7200.0, ERROR, "7200 s ahead of"),
    ],
)
def test_clock(status: int | None, ahead_s: float | None, verdict: str, words: str) -> None:
    found = preflight_host.clock(status, ahead_s)
    assert (found.verdict, words in found.measured) == (verdict, True), found


def test_the_kernels_clock_says_something() -> None:
    """Only its sanity: whether this machine is synchronized is not ours to say. Bits above 16 are never set."""
    status = preflight_host.clock_status()
    assert status is not None
    assert 0 <= status < 1 << 16


def test_a_free_and_a_taken_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = preflight_host.address("127.0.0.1", port, UNIT, "")
        assert found.verdict == ERROR
        assert f"127.0.0.1:{port} is taken, held by PID {os.getpid()} (" in found.measured
        assert "stop it" in found.mend
        assert "stop it" not in found.measured
    assert preflight_host.address("127.0.0.1", port, UNIT, "").verdict == OK


def test_the_running_service_has_its_address_by_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "is_of_unit", lambda pid, unit: unit == UNIT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert preflight_host.address("127.0.0.1", port, UNIT, "").verdict == OK
        assert preflight_host.address("127.0.0.1", port, "octoserve-other.service", "").verdict == ERROR
        assert preflight_host.address("127.0.0.1", port, "octoserve-other.service", UNIT).verdict == OK


def test_an_address_of_another_host() -> None:
    found = preflight_host.address("192.0.2.1", 8000, UNIT, "")
    assert (found.verdict, "cannot listen on 192.0.2.1" in found.measured) == (ERROR, True)
