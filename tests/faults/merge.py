"""Faults of the phase that merges a model, with the real tool: beside a deployment that serves, and goes on to."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.host import FaultError, Host
from tests.faults.redeploy import BY_HAND_PORT, MODELS, PROVEN, Case, Run, ends, playbook, serves, serving

FOLDER, ORIGINAL = f"{MODELS}/merged", "/srv/fixtures/tiny_glm"
MERGED = "tiny-glm.gguf"
SPLITS = {f"tiny-glm-{number:05}-of-00003.gguf" for number in (1, 2, 3)}
TOOL = "$(echo /opt/octoserve/llama.cpp/*/bin/llama-gguf-split)"
#: Two runs, and the build of the tool where no run before has made it, which takes as long as three.
RUNS = 5


def merging() -> Run:
    """A run as far as the merge, of another instance than the one that serves."""
    instance = ["-e", "octoserve_instance=merging", "-e", f"octoserve_port={BY_HAND_PORT}"]
    return playbook("site.yml", "-e", "octoserve_profile=merged", *instance, "--tags", "preflight,model")


@contextmanager
def tool_is(host: Host, run: Run, *lines: str) -> Iterator[None]:
    """From here on a run finds a script where the tool lies that merges; the tool itself is `$0.real`."""
    run.until("Folder of the model")  # by then it is built
    script = shlex.quote("\n".join(["#!/bin/sh", *lines]) + "\n")
    host.run(f"f={TOOL} && mv $f $f.real && printf %s {script} > $f && chmod 755 $f")
    try:
        yield
    finally:
        host.run(f"systemctl stop octoserve-job-merge-merged; f={TOOL} && mv $f.real $f", check=False)


def holds(host: Host, *names: str) -> None:
    """Of GGUF files, the model's folder has these and no other; splits are as they were fetched."""
    same = "for f in *-of-*; do [ ! -e $f ] || cmp $f " + ORIGINAL + "/$f >&2; done"
    found = {name for name in host.run(f"cd {FOLDER} && {same} && ls").split() if ".gguf" in name}
    if found != set(names):
        raise FaultError(f"{FOLDER} holds {sorted(found)}, wanted {sorted(names)}")


@contextmanager
def beside(host: Host) -> Iterator[None]:
    """What serves is served by the same start all the time."""
    good, start = serving(host), host.unit()["InvocationID"]
    yield
    serves(host, good)
    if host.unit()["InvocationID"] != start:
        raise FaultError("the service was restarted")


def disk_fills(host: Host) -> None:
    """The disk has room when the merge begins, and then only for the first 4 MB of 17."""
    host.run(f"mkdir -p {FOLDER} && mount -t tmpfs -o size=130m,mode=755 tmpfs {FOLDER}")
    left = f"$(( $(df --output=avail -B1 {FOLDER} | tail -n 1) - 4000000 ))"
    try:
        with beside(host):
            run = merging()
            with tool_is(host, run, f"fallocate -l {left} {FOLDER}/filler", 'exec "$0.real" "$@"'):
                ends(run, 2, f"{FOLDER}/{MERGED}", f"is the disk full? {FOLDER} has 0.00 GB free")
            holds(host, *SPLITS)
            host.run(f"rm {FOLDER}/filler")
            ends(merging(), 0)
            holds(host, MERGED)
    finally:
        host.run(f"umount {FOLDER}; rm -rf {FOLDER}")


def power_cut(host: Host) -> None:
    """The host loses its power when the merged file is written, and neither proven nor in its place."""
    good, run = serving(host), merging()
    try:
        with tool_is(host, run, '"$0.real" "$@"', "sleep 600"):
            there = f"ls {FOLDER}/{MERGED}.merging"
            host.until("the merge is under way", 120, lambda: bool(host.run(there, check=False)))
            host.cut_power()
            host.sandbox("start")
            run.end()
        serves(host, good)
        holds(host, *SPLITS, f"{MERGED}.merging")
        with beside(host):
            ends(merging(), 0)
            holds(host, MERGED)
    finally:
        host.run(f"rm -rf {FOLDER}")


CASES = [
    Case(
        "a disk that fills during a merge",
        "fails there and names the file, its splits stay, the old one serves; the next run goes on",
        disk_fills,
        runs=RUNS,
    ),
    Case("a power cut during a merge", PROVEN, power_cut, runs=RUNS),
]
