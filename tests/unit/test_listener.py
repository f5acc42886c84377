"""Whether an address is free is asked of the kernel, and whoever has it is named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from octoserve import listener

SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def listen(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError:
        if family == socket.AF_INET6:
            pytest.skip("this machine has no IPv6")
        raise


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


@pytest.fixture
def program() -> Iterator[tuple[int, int]]:
    """PID and port of another program that listens on 127.0.0.1."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, "marker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdin
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


def test_an_address_is_taken_while_somebody_listens() -> None:
    with listen() as server:
        port = port_of(server)
        assert not listener.is_free("127.0.0.1", port)
        assert not listener.is_free("0.0.0.0", port)
        assert listener.is_free("127.0.0.2", port), "another address of this machine"
    assert listener.is_free("127.0.0.1", port)


def test_a_server_on_all_addresses_takes_each() -> None:
    with listen("0.0.0.0") as server:
        assert not listener.is_free("127.0.0.1", port_of(server))


def test_connections_of_an_earlier_server_do_not_count() -> None:
    """The end that closes first stays in TIME_WAIT for a minute."""
    with listen() as server:
        port = port_of(server)
        with socket.create_connection(server.getsockname()) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(("127.0.0.1", port))
    assert listener.is_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        listener.is_free("192.0.2.1", 8000)


def test_the_program_that_has_it_is_named(program: tuple[int, int]) -> None:
    pid, port = program
    (found,) = listener.holders("127.0.0.1", port)
    assert found.pid == pid
    assert found.command.startswith(sys.executable)
    assert found.command.endswith("marker")
    text = listener.describe("127.0.0.1", port, [found])
    assert text.startswith(f"127.0.0.1:{port} is taken, held by PID {pid} ({sys.executable}")
    assert text.endswith(": stop it, or choose another port")


def test_this_very_process_is_found_too() -> None:
    """Its list of open files changes while it is read; that must not hide it."""
    with listen() as server:
        assert os.getpid() in [holder.pid for holder in listener.holders("127.0.0.1", port_of(server))]


@pytest.mark.parametrize(
    ("served", "wanted", "hit"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.2", "0.0.0.0", True),
        ("127.0.0.1", "localhost", True),
        ("::1", "::1", True),
        ("::1", "127.0.0.1", False),
        ("::", "127.0.0.1", True),
    ],
)
def test_only_whoever_is_in_the_way_is_named(served: str, wanted: str, hit: bool) -> None:
    with listen(served) as server:
        pids = [holder.pid for holder in listener.holders(wanted, port_of(server))]
    assert (os.getpid() in pids) is hit


def test_one_who_cannot_be_seen_is_said_to_be() -> None:
    assert "not visible from here" in listener.describe("127.0.0.1", 8000, [])


def test_connected_clients_are_no_listeners() -> None:
    with listen() as server, socket.create_connection(server.getsockname()) as client:
        own = int(client.getsockname()[1])
        assert listener.holders("127.0.0.1", own) == []


def test_a_process_belongs_to_its_unit(tmp_path: Path) -> None:
    for pid, groups in {
        7: "0::/system.slice/octoserve-main.service\n",
        8: "1:name=systemd:/payload/system.slice/octoserve-main.service/worker\n0::/\n",
        9: "0::/system.slice/octoserve-main.service.d\n",
    }.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(groups)
    found = [listener.is_of_unit(pid, "octoserve-main.service", tmp_path) for pid in (7, 8, 9, 10)]
    assert found == [True, True, False, False]
