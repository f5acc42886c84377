"""Wheels of a few lines, their locks and wheelhouses: what installers work on in tests, with no network."""

from __future__ import annotations

import base64
import hashlib
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    scripts: Mapping[str, str] | None = None,
    *,
    requires: Iterable[str] = (),
) -> Path:
    """Build a pure Python wheel; `scripts` are console scripts, "module:function" by name."""
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if scripts:
        lines = [f"{script} = {target}" for script, target in scripts.items()]
        contents[f"{info}/entry_points.txt"] = "\n".join(["[console_scripts]", *lines, ""])
    record = "".join(f"{path},sha256={_record_hash(text)},{len(text.encode())}\n" for path, text in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return made


def greeter(folder: Path, version: str = "1.0") -> Path:
    """A wheel with a module `greeter` that knows its version, and a console script `greet` that prints it."""
    text = f"__version__ = {version!r}\n\n\ndef main():\n    print('hello from', __version__)\n"
    return wheel(folder, "greeter", version, {"greeter.py": text}, {"greet": "greeter:main"})


def requirement(made: Path) -> str:
    """The lock's entry of a wheel."""
    name, version, *_ = made.name.split("-")
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}\n"


def lock(path: Path, wheels: Iterable[Path]) -> Path:
    """A lock of exactly these wheels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# made by a test\n" + "".join(requirement(made) for made in wheels))
    return path


def pack(path: Path, wheels: Iterable[Path]) -> Path:
    """A wheelhouse archive of these wheels."""
    with tarfile.open(path, "w") as tar:
        for made in wheels:
            tar.add(made, arcname=made.name)
    return path


def index(folder: Path, wheels: Iterable[Path]) -> str:
    """A package index on disk (PEP 503) that has these wheels; returns its URL."""
    folder.mkdir(parents=True)
    for made in wheels:
        project = folder / made.name.split("-")[0].replace("_", "-")
        project.mkdir(exist_ok=True)
        (project / made.name).write_bytes(made.read_bytes())
        links = [f'<a href="{quote(path.name)}">{path.name}</a>' for path in sorted(project.glob("*.whl"))]
        (project / "index.html").write_text("\n".join(links))
    return folder.as_uri()


def _record_hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
