"""A service that somebody set up by hand: which unit serves at an address, and which GGUF file it serves."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import listener

#: Units that Octoserve itself writes.
OWN = "octoserve-"
#: Below these the service sees nothing: its unit says ProtectHome=yes.
HOMES = ("/home", "/root", "/run/user")
TRANSIENT = "/run/systemd/transient/"
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
PROPERTIES = ("LoadState", "ActiveState", "UnitFileState", "MainPID", "FragmentPath", "User", "ExecStart")
_ARGV = re.compile(r"argv\[\]=(.*?) ;")


class HandMadeError(Exception):
    """There is nothing to adopt; the message says what was found, what was wanted and what to do."""


@dataclass(frozen=True)
class HandMade:
    """The unit, how it stands with systemd, and the model file that it serves."""

    unit: str
    active: bool
    enabled: bool
    user: str
    fragment: str
    model: str


def find(address: str, port: int, unit: str = "", model: str = "", proc: Path = Path("/proc")) -> HandMade:
    """What serves at an address, or under a unit that is named. ``model``: its file, where no command names it.

    Raises HandMadeError.
    """
    unit = unit if not unit or "." in unit else f"{unit}.service"
    unit = unit or _unit_at(address, port, proc)
    if unit.startswith(OWN):
        raise HandMadeError(f"{unit} is Octoserve's own: this host needs no adoption, run site.yml")
    shown = show(unit)
    if shown["LoadState"] != "loaded":
        raise HandMadeError(
            f"systemd has no unit {unit} (LoadState={shown['LoadState']}); set octoserve_adopt_unit to the name that "
            "`systemctl list-units --type=service` shows"
        )
    if shown["FragmentPath"].startswith(TRANSIENT):
        raise HandMadeError(
            f"{unit} is transient (systemd-run), so nobody could start it again; write it a unit file first"
        )
    return HandMade(
        unit=unit,
        active=shown["ActiveState"] in ("active", "activating", "reloading"),
        enabled=shown["UnitFileState"] == "enabled",
        user=shown["User"] or "root",
        fragment=shown["FragmentPath"],
        model=_model(unit, shown, model, proc),
    )


def show(unit: str) -> dict[str, str]:
    """What systemd says of a unit, whether there is one or not."""
    command = ["systemctl", "show", f"--property={','.join(PROPERTIES)}", "--", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    return {name: found.get(name, "") for name in PROPERTIES}


def unit_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The system service that a process belongs to; empty for a login's, a user's or a container's process."""
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            parts = line.split(":", 2)[2].split("/")
            if "system.slice" in parts and parts[-1].endswith(".service"):
                return parts[-1]
    return ""


def gguf_in(words: Iterable[str], folder: Path) -> str:
    """The first file among the words of a command that is a GGUF; empty where none is. ``--model=x.gguf`` counts."""
    for word in words:
        path = folder / word.rpartition("=")[2]
        if path.suffix == ".gguf" and path.is_file():
            return str(path.resolve())
    return ""


def _unit_at(address: str, port: int, proc: Path) -> str:
    found = listener.holders(address, port, proc)
    if not found:
        raise HandMadeError(
            f"nothing listens on {address}:{port}, wanted the service that was set up by hand; start it, correct "
            "octoserve_host and octoserve_port, or name its unit: octoserve_adopt_unit"
        )
    units = {unit_of(holder.pid, proc) for holder in found}
    if len(units) == 1 and (unit := units.pop()):
        return unit
    raise HandMadeError(
        f"{listener.taken(address, port, found)}, which runs under no system service, so nobody could start it again. "
        "Stop it by hand before the deploy, and name its file: gguf_model_merged_path"
    )


def _model(unit: str, shown: Mapping[str, str], named: str, proc: Path) -> str:
    """The model's file: what is named, what a process of the unit was started with, or what its ExecStart says."""
    model = named or _running_model(unit, proc)
    if not model and (found := _ARGV.search(shown["ExecStart"])):
        model = gguf_in(found[1].split(), Path("/"))
    if not model:
        raise HandMadeError(f"no command of {unit} names a GGUF file that is there; name it: gguf_model_merged_path")
    if not Path(model).is_file():
        raise HandMadeError(f"{model}: no such file on this host; correct gguf_model_merged_path")
    if SPLIT.search(model):
        raise HandMadeError(
            f"{unit} serves {model}, one of several splits; wanted the merged file. Put the splits where the model "
            "chapter verifies and merges them (octoserve_models_dir), and run site.yml with octoserve_adopt_unit"
        )
    return model


def _running_model(unit: str, proc: Path) -> str:
    for entry in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        if unit_of(int(entry.name), proc) == unit:
            with contextlib.suppress(OSError):  # ended meanwhile
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if model := gguf_in(words, (entry / "cwd").readlink()):
                    return model
    return ""


def unreadable(model: str, link: str) -> str:
    """Why the service could not read a file where it is, and what to do; empty where its folder is no home.

    ``link``: where a second name of the file would do.
    """
    home = next((home for home in HOMES if model.startswith(f"{home}/")), "")
    if not home:
        return ""
    return (
        f"{model} lies below {home}, of which the service sees nothing (ProtectHome). Give it a second name on the "
        f"same disk, which copies nothing: mkdir -p {Path(link).parent} && ln {model} {link}; then set "
        f"gguf_model_merged_path: {link}"
    )
