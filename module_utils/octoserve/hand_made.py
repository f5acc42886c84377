"""A service that somebody set up by hand: which unit serves at an address, and which GGUF file it serves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import give_way, listener

#: Units that Octoserve itself writes.
OWN = "octoserve-"
#: Of these the service sees nothing, or folders of its own: its unit says ProtectHome and PrivateTmp.
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - named, not used
#: Whoever stops them stops more than one server.
CONTAINER_ENGINES = ("docker.service", "containerd.service", "podman.service", "crio.service", "kubelet.service")
#: Unit files of systemd-run and of generators, such as Podman's.
TEMPORARY = ("/run/systemd/transient/", "/run/systemd/generator")
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
PROPERTIES = (*give_way.PROPERTIES, "FragmentPath", "User", "ExecStart")
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
    named = bool(unit)
    unit = with_suffix(unit) or _unit_at(address, port, proc)
    if unit in CONTAINER_ENGINES:
        raise HandMadeError(
            f"{unit} has {address}:{port}, and to stop it would stop every container of this host. Stop the one that "
            "serves by hand before the deploy, and name its file: gguf_model_merged_path"
        )
    if unit.startswith(OWN):
        raise HandMadeError(f"{unit} is Octoserve's own: this host needs no adoption, run site.yml")
    shown = show(unit)
    if shown["LoadState"] != "loaded":
        raise HandMadeError(
            f"systemd has no unit {unit} (LoadState={shown['LoadState']}); set octoserve_adopt_unit to the name that "
            "`systemctl list-units --type=service` shows"
        )
    if shown["FragmentPath"].startswith(TEMPORARY):
        raise HandMadeError(
            f"{unit} is made anew at each start or boot ({shown['FragmentPath']}), so it could not be taken out of the "
            "boot and put back; give it a unit file in /etc/systemd/system first"
        )
    found = _model_of(unit, shown, proc)
    if not named and not found:
        raise HandMadeError(
            f"{unit} listens on {address}:{port}, but none of its commands names a GGUF file that is there: a proxy? "
            "Name the unit that starts the server (octoserve_adopt_unit), and its file where no command names one "
            "(gguf_model_merged_path)"
        )
    return HandMade(
        unit=unit,
        active=shown["ActiveState"] in give_way.RUNS,
        enabled=shown["UnitFileState"] in give_way.STARTS_AT_BOOT,
        user=shown["User"] or "root",
        fragment=shown["FragmentPath"],
        model=_checked(unit, model or found),
    )


def with_suffix(unit: str) -> str:
    """The unit's whole name, as systemctl understands a short one: glm-5.1 is glm-5.1.service. None stays none."""
    return unit if not unit or unit.endswith(".service") else f"{unit}.service"


def show(unit: str) -> dict[str, str]:
    """What systemd says of a unit, whether there is one or not."""
    return give_way.show(unit, PROPERTIES)


def unit_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The system service that a process belongs to; empty for a login's, a user's or a container's process."""
    for parts in listener.groups(pid, proc):
        services = [part for part in parts if part.endswith(".service")]
        if services and "user.slice" not in parts:
            return services[-1]
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


def _model_of(unit: str, shown: Mapping[str, str], proc: Path) -> str:
    """The file that a process of the unit was started with, or that its ExecStart names; empty where none does."""
    model = _running_model(unit, proc)
    if not model and (found := _ARGV.search(shown["ExecStart"])):
        model = gguf_in(found[1].split(), Path("/"))
    return model


def _checked(unit: str, model: str) -> str:
    if not model:
        raise HandMadeError(f"no command of {unit} names a GGUF file that is there; name it: gguf_model_merged_path")
    path = Path(model)
    if not path.is_file():
        raise HandMadeError(f"{model}: no such file on this host; correct gguf_model_merged_path")
    if SPLIT.search(model):
        raise HandMadeError(
            f"{unit} serves {model}, one of several splits; wanted the merged file. Put the splits where the model "
            "chapter verifies and merges them (octoserve_models_dir), and run site.yml with octoserve_adopt_unit"
        )
    return str(path.resolve())


def _running_model(unit: str, proc: Path) -> str:
    for entry in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        if unit_of(int(entry.name), proc) == unit:
            with contextlib.suppress(OSError):  # ended meanwhile
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if model := gguf_in(words, (entry / "cwd").readlink()):
                    return model
    return ""


def unreadable(model: str, link: str) -> str:
    """Why the service could not read a file where it is, and what to do; empty where its folder is not hidden.

    ``link``: where a second name of the file would do.
    """
    hidden = next((folder for folder in HIDDEN if model.startswith(f"{folder}/")), "")
    if not hidden:
        return ""
    return (
        f"{model} lies below {hidden}, of which the service sees nothing (ProtectHome, PrivateTmp). On the same disk, "
        f"give it a second name, which copies nothing: mkdir -p {Path(link).parent} && ln {model} {link}; on another "
        f"one, move it there. Then set gguf_model_merged_path: {link}"
    )
