#!/usr/bin/env python3
"""Deploy where something changed, and end with a code that a CI job can act on.

    scripts/redeploy.py -i INVENTORY [--check] [--always] [-- further arguments of ansible-playbook]

First a check run: where it would change nothing, nothing is done. Else site.yml, and the exit code says how it ended:
0 deployed and proven, or nothing to do; 10 preflight, 11 install, 12 start, 13 coherence, 14 throughput: failed there;
15 failed, and the deployment before it is back and passed its gates; 1 no verdict; 2 wrong usage. With several hosts
the highest. `--check` only says what would change, with differences, and ends 0 where that run itself did not fail.
Each host's summary.md is printed and, where GITHUB_STEP_SUMMARY names a file, added to it.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CODES = {"preflight": 10, "install": 11, "start": 12, "coherence": 13, "throughput": 14}
ROLLED_BACK, NO_VERDICT = 15, 1
_RECAP = re.compile(r"^(?P<host>\S+)\s+: ok=\d+\s+changed=(?P<changed>\d+)\s", re.MULTILINE)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def code_of(summary: Mapping[str, Any]) -> int:
    """The exit code of one host's summary.json."""
    if summary.get("rolled_back"):
        return ROLLED_BACK
    if summary.get("failed_phase"):
        if _around_the_gates(summary):
            return NO_VERDICT
        return CODES.get(str(summary["failed_phase"]), NO_VERDICT)
    return 0 if summary.get("ok") else NO_VERDICT


def _around_the_gates(summary: Mapping[str, Any]) -> bool:
    """Whether what failed in the gates' chapter was neither gate: nothing was asked yet, or both had passed."""
    coherence, throughput = summary.get("coherence") or {}, summary.get("throughput") or {}
    before = summary["failed_phase"] == "coherence" and coherence.get("total") == 0
    return before or (summary["failed_phase"] == "throughput" and bool(throughput.get("ok")))


def changes(output: str) -> dict[str, int]:
    """Changes by host, from the recap of ansible-playbook's output."""
    return {match["host"]: int(match["changed"]) for match in _RECAP.finditer(_COLOR.sub("", output))}


def reports_since(folder: Path, since: float, hosts: Collection[str]) -> dict[str, Path]:
    """By host, the folder of its newest report, where that was written since a moment (seconds since 1970)."""
    latest = {host: (folder / host / "latest").resolve() for host in hosts}
    return {host: path for host, path in sorted(latest.items()) if _written(path) >= since}


def reports_folder(environment: Mapping[str, str]) -> Path:
    """Where callback_plugins/evidence.py is to write: OCTOSERVE_REPORTS, else ansible.cfg, else reports/ here."""
    if named := environment.get("OCTOSERVE_REPORTS"):
        return Path(named).absolute()
    config = ROOT / Path(environment.get("ANSIBLE_CONFIG") or "ansible.cfg").expanduser()
    config = config / "ansible.cfg" if config.is_dir() else config
    settings = configparser.ConfigParser(inline_comment_prefixes=(";",), interpolation=None)
    settings.read(config)
    named = settings.get("evidence", "reports", fallback="")
    return config.parent / Path(named).expanduser() if named else ROOT / "reports"


def _written(report: Path) -> float:
    try:
        return (report / "summary.json").stat().st_mtime
    except OSError:
        return 0.0


def run(command: Sequence[str], reports: Path) -> tuple[int, str]:
    """Run, show what it says as it says it, and return exit status and output. A signal for this process is its."""
    environment = {**os.environ, "OCTOSERVE_REPORTS": str(reports)}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if child.poll() is not None:  # between two runs: the next one does not begin
            raise SystemExit(128 + number)
        child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    lines = []
    for line in child.stdout or ():
        print(line, end="", flush=True)
        lines.append(line)
    return child.wait(), "".join(lines)


def tell(reports: Iterable[Path]) -> None:
    """Print each report's summary, also for the page of a GitHub job."""
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    for report in reports:
        text = (report / "summary.md").read_text(encoding="utf-8")
        print(text)
        if page:
            with Path(page).open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def ended(code: int, why: str) -> int:
    """Say the code and return it."""
    print(f"redeploy: exit code {code}, {why}", flush=True)
    return code


def main(argv: Sequence[str]) -> int:
    """Exit code as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-i", "--inventory", action="append", required=True, help="as for ansible-playbook")
    parser.add_argument("--check", action="store_true", help="only say what would change")
    parser.add_argument("--always", action="store_true", help="deploy, and so ask the gates, also without a change")
    parser.add_argument("further", nargs="*", help="further arguments of ansible-playbook, after --")
    options = parser.parse_args(argv)
    inventories = [f"--inventory={Path(path).resolve() if Path(path).exists() else path}" for path in options.inventory]
    folder = reports_folder(os.environ)
    command = ["ansible-playbook", "site.yml", *inventories, *options.further]
    if options.check or not options.always:
        status, output = run([*command, "--check", "--diff"], folder)
        found = changes(output)
        if status != 0:
            return ended(CODES["preflight"], "the check run failed, see above; nothing was touched")
        if not found:
            return ended(NO_VERDICT, "the check run met no host; is the inventory the right one?")
        if options.check or not any(found.values()):
            count = ", ".join(f"{host}: {number} changes" for host, number in found.items())
            return ended(0, f"{'would change' if options.check else 'nothing to do'} ({count})")
    started = time.time()
    status, output = run(command, folder)
    # Another run may write reports of its hosts meanwhile.
    met = changes(output)
    reports = reports_since(folder, started, met)
    tell(reports.values())
    codes = {host: code_of(json.loads((path / "summary.json").read_text())) for host, path in reports.items()}
    codes |= {host: NO_VERDICT for host in met if host not in codes}
    worst = max(codes.values(), default=NO_VERDICT)
    if status != 0 and worst == 0:
        worst = NO_VERDICT
    without = [host for host in codes if host not in reports]
    told = [f"{host}: {code}" for host, code in codes.items() if host in reports]
    told += [f"no report was written of {' and '.join(without) or 'any host'}"] if without or not codes else []
    return ended(worst, ", ".join(told))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
