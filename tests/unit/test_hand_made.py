"""Which unit was set up by hand, which file it serves, and what cannot be adopted."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from octoserve import hand_made, listener
from octoserve.hand_made import HandMadeError

SYSTEM = "0::/system.slice/glm5.service"
LOADED = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "UnitFileState": "enabled",
    "MainPID": "10",
    "FragmentPath": "/etc/systemd/system/glm5.service",
    "User": "",
    "ExecStart": "",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "GLM-5.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host where PID 10 listens at the address that is asked for."""
    folder = tmp_path / "proc"
    folder.mkdir()
    monkeypatch.setattr(listener, "holders", lambda *_: [listener.Holder(10, "python -m vllm")])
    shows(monkeypatch)
    return folder


def shows(monkeypatch: pytest.MonkeyPatch, **other: str) -> None:
    monkeypatch.setattr(hand_made, "show", lambda _unit: {**LOADED, **other})


def process(proc: Path, pid: int, cgroup: str, *words: str, cwd: Path = Path("/")) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cgroup").write_text(f"{cgroup}\n")
    (folder / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (folder / "cwd").symlink_to(cwd)


def find(proc: Path, unit: str = "", model: str = "") -> hand_made.HandMade:
    return hand_made.find("127.0.0.1", 8000, unit, model, proc)


def test_the_unit_and_the_file_of_its_server(proc: Path, model: Path) -> None:
    process(proc, 9, SYSTEM, "/bin/sh", "/opt/serve.sh")
    process(proc, 10, SYSTEM, "python", "-m", "vllm", "serve", "GLM-5.gguf", cwd=model.parent)
    found = find(proc)
    assert (found.unit, found.model) == ("glm5.service", str(model))
    assert (found.active, found.enabled, found.user) == (True, True, "root")


def test_a_file_that_an_option_names(proc: Path, model: Path) -> None:
    process(proc, 10, SYSTEM, "llama-server", f"--model={model}")
    assert find(proc).model == str(model)


def test_a_stopped_unit_is_named_and_its_start_says_the_file(
    proc: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = f"{{ path=/opt/vllm ; argv[]=/opt/vllm serve {model} --port 8000 ; ignore_errors=no ; pid=0 }}"
    shows(monkeypatch, ActiveState="inactive", UnitFileState="disabled", ExecStart=start)
    found = find(proc, unit="glm5")
    assert (found.unit, found.model, found.active, found.enabled) == ("glm5.service", str(model), False, False)


def test_a_file_that_is_named_counts_more(proc: Path, model: Path) -> None:
    other = model.with_name("other.gguf")
    other.write_bytes(b"GGUF")
    process(proc, 10, SYSTEM, "vllm", "serve", str(model))
    assert find(proc, model=str(other)).model == str(other)


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/user.slice/user-1000.slice/session-3.scope",
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service",
        "0::/system.slice/docker-0123456789ab.scope",
    ],
)
def test_what_no_system_service_runs_is_not_adopted(proc: Path, model: Path, cgroup: str) -> None:
    process(proc, 10, cgroup, "vllm", "serve", str(model))
    with pytest.raises(HandMadeError, match="under no system service, so nobody could start it again"):
        find(proc)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"LoadState": "not-found"}, "systemd has no unit glm5.service"),
        ({"FragmentPath": "/run/systemd/transient/glm5.service"}, "is made anew"),
        ({"FragmentPath": "/run/systemd/generator/glm5.service"}, "is made anew"),
    ],
)
def test_a_unit_that_could_not_come_back_is_not_adopted(
    proc: Path, model: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str], reason: str
) -> None:
    process(proc, 10, SYSTEM, "vllm", "serve", str(model))
    shows(monkeypatch, **other)
    with pytest.raises(HandMadeError, match=reason):
        find(proc)


@pytest.mark.parametrize(
    "cgroup", ["0::/ml.slice/glm5.service", "0::/system.slice/glm5.service/libpod-payload-0123", SYSTEM]
)
def test_a_service_is_found_in_its_slice_and_above_its_own_groups(proc: Path, model: Path, cgroup: str) -> None:
    process(proc, 10, cgroup, "vllm", "serve", str(model))
    assert find(proc).unit == "glm5.service"


def test_a_short_name_with_a_dot_gets_its_suffix(proc: Path, model: Path) -> None:
    process(proc, 10, "0::/system.slice/glm-5.1.service", "vllm", "serve", str(model))
    assert find(proc, unit="glm-5.1").unit == "glm-5.1.service"


@pytest.mark.parametrize("named", ["", "/models/GLM-5.gguf"])
def test_who_only_forwards_to_the_server_is_not_stopped(proc: Path, named: str) -> None:
    process(proc, 10, "0::/system.slice/docker.service", "docker-proxy", "-host-port", "8000")
    with pytest.raises(HandMadeError, match="would stop every container"):
        find(proc, model=named)


def test_a_proxy_is_not_adopted_with_somebody_elses_file(proc: Path, model: Path) -> None:
    process(proc, 10, "0::/system.slice/nginx.service", "nginx")
    with pytest.raises(HandMadeError, match="Name the unit that starts the server"):
        find(proc, model=str(model))


def test_own_services_are_not_adopted(proc: Path) -> None:
    process(proc, 10, "0::/system.slice/octoserve-main.service", "vllm")
    with pytest.raises(HandMadeError, match="Octoserve's own"):
        find(proc)


@pytest.mark.parametrize(
    ("words", "named", "reason"),
    [
        (("vllm", "serve", "zai-org/GLM-5"), "", "names a GGUF file that is there"),
        (("vllm", "serve", "zai-org/GLM-5"), "/nowhere/x.gguf", "/nowhere/x.gguf: no such file"),
        (("vllm", "serve", "{folder}/GLM-5-00001-of-00010.gguf"), "", "one of several splits"),
    ],
)
def test_a_model_that_is_no_merged_file(
    proc: Path, model: Path, words: tuple[str, ...], named: str, reason: str
) -> None:
    (model.parent / "GLM-5-00001-of-00010.gguf").write_bytes(b"GGUF")
    process(proc, 10, SYSTEM, *(word.format(folder=model.parent) for word in words))
    with pytest.raises(HandMadeError, match=reason):
        find(proc, unit="glm5" if named else "", model=named)


def test_nothing_listens(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "holders", lambda *_: [])
    with pytest.raises(HandMadeError, match=r"nothing listens on 127\.0\.0\.1:8000"):
        find(proc)


def test_a_file_in_a_home_gets_a_second_name() -> None:
    reason = hand_made.unreadable("/root/GLM-5.gguf", "/srv/models/GLM-5.gguf")
    assert "mkdir -p /srv/models && ln /root/GLM-5.gguf /srv/models/GLM-5.gguf" in reason
    assert "PrivateTmp" in hand_made.unreadable("/tmp/GLM-5.gguf", "/x")
    assert hand_made.unreadable("/srv/GLM-5.gguf", "/x") == ""
    assert hand_made.unreadable("/rooted/GLM-5.gguf", "/x") == ""


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_nothing_is_of_a_unit_without_a_name(listening: int) -> None:
    found = listener.holders("127.0.0.1", listening)
    assert found
    assert not listener.are_of_unit(found, "")
