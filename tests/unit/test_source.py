"""A source arrives as the bytes that were named, or an error says found and wanted and nothing is left."""

from __future__ import annotations

import io
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from octoserve import source
from octoserve.digest import sha256_file
from octoserve.source import Origin, SourceError

#: A build backend inside the source itself, which leaves a mark where pip runs it.
BACKEND = """
import pathlib

def get_requires_for_build_wheel(config_settings=None):
    pathlib.Path({mark!r}).write_text("ran")
    return []

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    info = pathlib.Path(directory) / "demo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: demo\\nVersion: 1.0\\n")
    return info.name

def build_wheel(directory, config_settings=None, metadata_directory=None):
    raise RuntimeError("nobody asked for a wheel")
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def tar_gz(path: Path, files: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def sdist(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """demo 1.0 as the only thing that pip can see."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    files = {
        "demo-1.0/PKG-INFO": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
        "demo-1.0/pyproject.toml": PROJECT,
        "demo-1.0/backend.py": BACKEND.format(mark=str(mark)),
    }
    return tar_gz(tmp_path / "links/demo-1.0.tar.gz", files)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the tag v1 and a later commit."""
    path = tmp_path / "repository"
    run("git", "init", "--quiet", "--initial-branch=main", str(path))
    for number in (1, 2):
        (path / "file.txt").write_text(f"version {number}\n")
        run("git", "-C", str(path), "add", "file.txt")
        who = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
        run("git", "-C", str(path), *who, "commit", "--quiet", f"--message={number}")
        run("git", "-C", str(path), "tag", f"v{number}")
    return path


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def member(archive: Path, name: str) -> str:
    with tarfile.open(archive) as tar:
        file = tar.extractfile(name)
        assert file is not None
        return file.read().decode()


def test_any_change_of_an_origin_makes_another_archive(tmp_path: Path) -> None:
    origins = [Origin("git", "a", "1"), Origin("archive", "a", "1"), Origin("git", "b", "1"), Origin("git", "a", "2")]
    origins.append(Origin("git", "a", "1", "0" * 64))
    assert len({origin.path(tmp_path) for origin in origins}) == len(origins)
    assert Origin("git", "a", "1").path(tmp_path) == origins[0].path(tmp_path)


@pytest.mark.parametrize("version", ["v1", "commit"])
def test_a_tag_and_a_commit_of_a_repository(repository: Path, tmp_path: Path, version: str) -> None:
    if version == "commit":
        version = run("git", "-C", str(repository), "rev-parse", "v1")
    origin = Origin("git", str(repository), version)
    first, again = tmp_path / "out/first.tar.gz", tmp_path / "out/again.tar.gz"
    source.fetch(origin, first)
    assert member(first, "source/file.txt") == "version 1\n"
    source.fetch(origin, again)
    assert first.read_bytes() == again.read_bytes(), "the commit is the digest"
    assert left_in(tmp_path / "out") == ["again.tar.gz", "first.tar.gz"]


def test_a_version_that_a_repository_does_not_have_is_named(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="v9"):
        source.fetch(Origin("git", str(repository), "v9"), tmp_path / "out/source.tar.gz")
    assert left_in(tmp_path / "out") == []


@pytest.fixture
def private_server() -> Iterator[str]:
    """A server that asks everybody for a password, as a forge does for a repository with a misspelt name."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="forge"')
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/repository.git"
    server.shutdown()
    thread.join()
    server.server_close()


def test_nobody_is_asked_for_a_password(private_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, a playbook would hang in git's question."""
    monkeypatch.delenv("GIT_TERMINAL_PROMPT", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(SourceError, match="prompts disabled"):
        source.fetch(Origin("git", private_server, "v1"), tmp_path / "source.tar.gz")


def test_an_archive_from_a_path(tmp_path: Path) -> None:
    made = tar_gz(tmp_path / "made.tar.gz", {"demo/file.txt": "text\n"})
    origin = Origin("archive", str(made), "1", sha256_file(made))
    source.fetch(origin, tmp_path / "out/source.tar.gz")
    assert (tmp_path / "out/source.tar.gz").read_bytes() == made.read_bytes()


@pytest.mark.parametrize("sha256", ["", "0" * 63])
def test_an_archive_without_a_digest_is_refused(tmp_path: Path, sha256: str) -> None:
    made = tar_gz(tmp_path / "made.tar.gz", {"demo/file.txt": "text\n"})
    with pytest.raises(SourceError, match="64 digits is wanted"):
        source.fetch(Origin("archive", str(made), "1", sha256), tmp_path / "source.tar.gz")


def test_another_archive_is_refused(tmp_path: Path) -> None:
    made = tar_gz(tmp_path / "made.tar.gz", {"demo/file.txt": "text\n"})
    with pytest.raises(SourceError) as caught:
        source.fetch(Origin("archive", str(made), "1", "0" * 64), tmp_path / "out/source.tar.gz")
    assert f"sha256 is {sha256_file(made)}, wanted {'0' * 64}" in str(caught.value)
    assert left_in(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("/nowhere/source.tar.gz", "/nowhere/source.tar.gz"),
        ("http://example.org/a.tar.gz", "wanted an https"),
        ("https://127.0.0.1:1/a.tar.gz", "refused"),
    ],
)
def test_an_archive_that_cannot_be_had_is_named(tmp_path: Path, url: str, named: str) -> None:
    with pytest.raises(SourceError, match=named):
        source.fetch(Origin("archive", url, "1", "0" * 64), tmp_path / "out/source.tar.gz")
    assert left_in(tmp_path / "out") == []


def test_an_sdist(sdist: Path, tmp_path: Path) -> None:
    source.fetch(Origin("sdist", "demo", "1.0", sha256_file(sdist)), tmp_path / "out/source.tar.gz")
    assert (tmp_path / "out/source.tar.gz").read_bytes() == sdist.read_bytes()
    assert left_in(tmp_path / "out") == ["source.tar.gz"]


def test_no_code_of_another_sdist_is_run(sdist: Path, tmp_path: Path, mark: Path) -> None:
    """pip runs a source's build backend for its metadata; not before the bytes are known to be the right ones."""
    with pytest.raises(SourceError) as caught:
        source.fetch(Origin("sdist", "demo", "1.0", "0" * 64), tmp_path / "out/source.tar.gz")
    assert sha256_file(sdist) in str(caught.value)
    assert not mark.exists()
    assert left_in(tmp_path / "out") == []


@pytest.mark.usefixtures("sdist")
def test_an_sdist_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"demo==2\.0"):
        source.fetch(Origin("sdist", "demo", "2.0", "0" * 64), tmp_path / "source.tar.gz")
