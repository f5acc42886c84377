"""GPU facts, guard and module against the NVML stub: the real nvidia-ml-py runs, in a process of its own."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest
from octoserve import nvml

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests/fixtures/nvml_stub"
EIGHT_CARDS = (STUB / "rtx_pro_6000_x8.state").read_text()
CARD_NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
MIB = 1024**2
# More than any PID that Linux hands out, so that no process has it.
NO_SUCH_PID = 2**30

# Runs in the child: waits with real NVML bindings but a clock of its own, and prints what came out as JSON.
# The container is an argument, because tests run both in containers and on plain machines.
DRIVER = """
import dataclasses, json, sys
from octoserve import nvml

options = json.loads(sys.argv[1])
nvml.container_kind = lambda: options["container"]
lines = []
try:
    with nvml.session() as read:
        if options["utilization"] is None:
            gpus = read()
        else:
            gpus = nvml.wait_until_free(
                read, options["utilization"], options["timeout"],
                expected_count=options["expected_count"], interval_s=0.2, report=lines.append,
            )
    print(json.dumps({"gpus": dataclasses.asdict(gpus), "lines": lines}))
except nvml.GpuError as error:
    print(json.dumps({"problem": error.problem, "message": str(error), "lines": lines}))
"""


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the compiled stub."""
    return compile_stub(tmp_path_factory.mktemp("nvml_stub"))


def compile_stub(folder: Path, *options: str) -> Path:
    """Compile the stub into the folder, and give the folder back."""
    for tool in ("make", "cc"):
        if shutil.which(tool) is None:
            pytest.fail(f"`{tool}` is missing: the NVML stub is compiled from C; install make and gcc")
    command = ["make", "-s", "-C", str(STUB), f"OUT={folder}", *options]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"the NVML stub does not compile:\n{built.stderr}"
    return folder


@pytest.fixture
def environment(stub_library: Path, tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Writes a state file and gives the environment in which the stub reads it."""

    def write(state: str) -> dict[str, str]:
        path = tmp_path / "state"
        path.write_text(state)
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(stub_library),
            "OCTOSERVE_NVML_STUB": str(path),
            "PYTHONPATH": str(ROOT / "module_utils"),
        }

    return write


def drive(
    environment: dict[str, str],
    *,
    utilization: float | None = None,
    timeout: float = 0,
    expected_count: int | None = None,
    container: str | None = None,
) -> dict[str, Any]:
    """Facts (no utilization) or a wait in a child; what DRIVER printed."""
    options = {
        "utilization": utilization,
        "timeout": timeout,
        "expected_count": expected_count,
        "container": container,
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def guard(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octoserve.guard_gpu", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_facts_of_eight_cards(environment: Callable[[str], dict[str, str]]) -> None:
    state = EIGHT_CARDS + f"process 2 {os.getpid()} 300\nprocess 2 {NO_SUCH_PID}\npcie 7 1 8 5 16\n"
    gpus = drive(environment(state))["gpus"]

    assert (gpus["driver_version"], gpus["nvml_version"], gpus["cuda_version"]) == (
        "590.48.01",
        "13.590.48.01",
        "13.1",
    )
    assert [card["index"] for card in gpus["cards"]] == list(range(8))
    assert {card["name"] for card in gpus["cards"]} == {CARD_NAME}
    assert len({card["uuid"] for card in gpus["cards"]}) == 8
    assert gpus["cards"][1]["pci_bus_id"] == "00000000:19:00.0"
    assert {card["memory_total"] for card in gpus["cards"]} == {97887 * MIB}
    assert {card["memory_free"] for card in gpus["cards"]} == {97249 * MIB}
    assert {card["memory_used"] for card in gpus["cards"]} == {638 * MIB}
    assert gpus["cards"][7]["pcie"] == {"generation": 1, "max_generation": 5, "width": 8, "max_width": 16}

    own, unknown = gpus["cards"][2]["processes"]
    assert (own["pid"], own["memory_used"]) == (os.getpid(), 300 * MIB)
    assert own["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert own["command"] == nvml.redact(Path("/proc/self/cmdline").read_text().replace("\0", " "))
    assert unknown == {
        "pid": NO_SUCH_PID,
        "memory_used": None,
        "user": None,
        "command": None,
        "state": None,
    }
    assert gpus["cards"][0]["processes"] == []
    assert gpus["cards"][0]["processes_visible"] is True


def test_a_session_closes_nvml(environment: Callable[[str], dict[str, str]]) -> None:
    """Else a long-lived caller keeps the driver's devices open, and the driver cannot be reloaded."""
    program = "from octoserve import nvml\nwith nvml.opened(): nvml.read_gpus()\nnvml.read_gpus()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(EIGHT_CARDS), capture_output=True, text=True, check=False
    )
    assert "NVML code 1)" in done.stderr or "(code 1)" in done.stderr, "a reading after the end was answered"


#: Runs the guard with a bound that a test can wait for.
IMPATIENT = """
import functools, sys
from octoserve import guard_gpu, nvml
nvml.session = functools.partial(nvml.session, timeout_s=0.5)
sys.exit(guard_gpu.main(sys.argv[1:]))
"""


def test_an_nvml_that_does_not_return_ends_the_guard(environment: Callable[[str], dict[str, str]]) -> None:
    """As where the GSP firmware hangs. The stub takes a minute to open."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT, "--utilization=0.95", "--timeout=300"],
        env=environment(EIGHT_CARDS + "init_seconds 60\n"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - began < 30
    assert done.returncode == 7, done.stderr
    assert "NVML did not answer within 0.5 s" in done.stderr
    assert "119 and 120 are the GSP firmware" in done.stderr
    assert done.stderr.count("\n") == 1, "one line for the journal"


def test_an_empty_process_list_proves_nothing_in_a_container(
    environment: Callable[[str], dict[str, str]],
) -> None:
    gpus = drive(environment(EIGHT_CARDS), container="lxc")["gpus"]
    assert gpus["container"] == "lxc"
    assert {card["processes_visible"] for card in gpus["cards"]} == {False}


def test_a_refused_process_list_is_not_an_empty_one(environment: Callable[[str], dict[str, str]]) -> None:
    cards = drive(environment(EIGHT_CARDS + "processes_result 1 4\n"))["gpus"]["cards"]
    assert [card["processes_visible"] for card in cards[:3]] == [True, False, True]


def test_waits_for_memory_that_frees_slowly(environment: Callable[[str], dict[str, str]]) -> None:
    result = drive(
        environment(EIGHT_CARDS + "free_mib * 3348 97249 1.5\n"),
        utilization=0.95,
        timeout=20,
        expected_count=8,
    )
    assert "8 cards of 8 not free yet" in result["lines"][0]
    assert min(card["memory_free"] for card in result["gpus"]["cards"]) >= 0.95 * 97887 * MIB


def test_memory_that_never_frees_names_the_cards_and_the_holders(
    environment: Callable[[str], dict[str, str]],
) -> None:
    state = EIGHT_CARDS + f"free_mib 3 3348\nfree_mib 6 90000\nprocess 3 {os.getpid()} 93902\nprocess 0 1 10\n"
    result = drive(environment(state), utilization=0.95, timeout=0.5)

    assert result["problem"] == nvml.MEMORY_NOT_FREE
    message = result["message"]
    user = pwd.getpwuid(os.getuid()).pw_name
    # 0.95 * 97887 MiB = 92992.65 MiB; less 3348 MiB = 87.54 GiB, less 90000 MiB = 2.92 GiB.
    assert "card 3 (00000000:29:00.0) has 3.27 GiB free of 95.59, 87.54 GiB less than wanted" in message
    assert f"held by PID {os.getpid()} (user {user}, 91.70 GiB: " in message
    assert "card 6 (00000000:41:00.0) has 87.89 GiB free of 95.59, 2.92 GiB less than wanted" in message
    assert "no process that NVML names" in message
    assert "card 0" not in message, "a card that is free enough is not blamed"
    assert "\n" not in message


def test_no_pids_visible_is_said_in_a_container(environment: Callable[[str], dict[str, str]]) -> None:
    result = drive(environment(EIGHT_CARDS + "free_mib 4 3348\n"), utilization=0.95, container="lxc")
    assert "held by processes that NVML cannot see from here" in result["message"]
    assert "run `nvidia-smi` outside this container (lxc)" in result["message"]


def test_a_lost_card_ends_the_wait_at_once(environment: Callable[[str], dict[str, str]]) -> None:
    """Card 5 falls off the bus while the others are waited for: a timeout of 10 minutes must not be used up."""
    state = EIGHT_CARDS + "free_mib 0 3348\nresult 5 15 3.0\n"
    result = drive(environment(state), utilization=0.95, timeout=600)
    assert result["problem"] == nvml.LOST_CARD
    assert "card 5 does not answer: GPU is lost (NVML code 15)" in result["message"]
    assert result["lines"], "the card was lost before the wait began, not in it"


@pytest.mark.parametrize(("container", "action"), [(None, "reboot"), ("docker", "the container's libraries")])
def test_a_driver_library_mismatch(
    environment: Callable[[str], dict[str, str]], container: str | None, action: str
) -> None:
    result = drive(environment(EIGHT_CARDS + "init_result 18\n"), container=container)
    assert result["problem"] == nvml.VERSION_MISMATCH
    assert "libnvidia-ml.so.1 (590.48.01)" in result["message"]
    assert action in result["message"].partition("Do: ")[2]


@pytest.mark.parametrize(("found", "expected"), [(7, 8), (8, 7), (0, None)])
def test_a_wrong_number_of_cards(
    environment: Callable[[str], dict[str, str]], found: int, expected: int | None
) -> None:
    state = EIGHT_CARDS + f"cards {found}\n"
    result = drive(environment(state), utilization=0.95, timeout=600, expected_count=expected)
    assert result["problem"] == nvml.WRONG_COUNT
    assert (
        f"Found: {found} cards in NVML. Wanted: {f'{expected} cards' if expected else 'at least'}"
        in (result["message"])
    )


@pytest.mark.parametrize(
    ("container", "problem", "words"),
    [(None, nvml.NO_DRIVER, "no libnvidia-ml.so.1"), ("lxc", nvml.CANNOT_SEE, "cannot be seen")],
)
def test_no_library(
    environment: Callable[[str], dict[str, str]],
    tmp_path: Path,
    container: str | None,
    problem: str,
    words: str,
) -> None:
    """An unreadable library in front of the search path stands for none, so that hosts with a driver pass too."""
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    result = drive({**environment(EIGHT_CARDS), "LD_LIBRARY_PATH": str(tmp_path)}, container=container)
    assert result["problem"] == problem
    assert words in result["message"]


def test_a_driver_that_is_not_loaded(environment: Callable[[str], dict[str, str]]) -> None:
    result = drive(environment(EIGHT_CARDS + "init_result 9\n"))
    assert result["problem"] == nvml.NO_DRIVER
    assert "modprobe nvidia" in result["message"]


def test_the_stub_reads_the_file_of_a_test_host_where_no_variable_names_one(
    environment: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    state = tmp_path / "host.state"
    state.write_text(EIGHT_CARDS + "cards 3\n")
    library = compile_stub(tmp_path, f"CFLAGS=-DSTATE_FILE='\"{state}\"'")
    without = {**environment(EIGHT_CARDS), "LD_LIBRARY_PATH": str(library)}
    del without["OCTOSERVE_NVML_STUB"]
    assert len(drive(without)["gpus"]["cards"]) == 3


def test_the_stub_refuses_a_state_that_it_cannot_read(environment: Callable[[str], dict[str, str]]) -> None:
    done = guard(environment("cards 8\nfree_mib 0 lots\n"), "--utilization=0.95", "--timeout=0")
    assert done.returncode != 0
    assert "line 2 cannot be read: free_mib 0 lots" in done.stderr


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("", 0, ""),
        ("free_mib 1 3348\n", 1, "card 1 "),
        ("init_result 9\n", 3, "NVML"),
        ("init_result 18\n", 4, "different drivers"),
        ("result 2 15\n", 5, "card 2 does not answer"),
        ("cards 7\n", 6, "7 cards"),
    ],
)
def test_guard_exit_codes(environment: Callable[[str], dict[str, str]], change: str, code: int, words: str) -> None:
    done = guard(environment(EIGHT_CARDS + change), "--utilization=0.95", "--timeout=0.3", "--expected-count=8")
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == (0 if code == 0 else 1), "one line for the journal"
    if code == 0:
        assert "at least 94.97 GiB each" in done.stdout


def test_guard_refuses_a_percentage_whatever_the_driver(environment: Callable[[str], dict[str, str]]) -> None:
    done = guard(environment(EIGHT_CARDS + "init_result 9\n"), "--utilization=95", "--timeout=0")
    assert done.returncode == 2
    assert "utilization is 95.0, wanted more than 0 and at most 1" in done.stderr


def ansible(environment: dict[str, str], arguments: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run the module on localhost as a user would; its exit code, result, and warnings with single spaces."""
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible"),
            "localhost",
            "--inventory=localhost,",
            "--connection=local",
            f"--extra-vars=ansible_python_interpreter={sys.executable}",
            "--module-name=gpu_memory",
            f"--args={arguments}",
            *options,
        ],
        cwd=ROOT,
        env={**environment, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    first = done.stdout.find("{\n")
    assert first >= 0, done.stdout + done.stderr
    result: dict[str, Any] = json.JSONDecoder().raw_decode(done.stdout[first:])[0]
    return done.returncode, result, " ".join(done.stderr.split())


def test_module_reports_the_cards(environment: Callable[[str], dict[str, str]]) -> None:
    code, result, _ = ansible(environment(EIGHT_CARDS), "state=free timeout=5 expected_count=8")
    assert code == 0, result
    assert result["changed"] is False
    assert result["free"] is True
    assert len(result["cards"]) == 8
    assert result["cards"][0]["memory_free"] == 97249 * MIB


def test_module_fails_with_the_reason(environment: Callable[[str], dict[str, str]]) -> None:
    code, result, _ = ansible(environment(EIGHT_CARDS + "free_mib 3 3348\n"), "state=free timeout=0.3")
    assert code != 0
    assert result["problem"] == nvml.MEMORY_NOT_FREE
    assert "card 3 " in result["msg"]


def test_module_counts_the_cards_in_its_facts(environment: Callable[[str], dict[str, str]]) -> None:
    code, result, _ = ansible(environment(EIGHT_CARDS + "cards 7\n"), "expected_count=8")
    assert code != 0
    assert result["problem"] == nvml.WRONG_COUNT


def test_module_warns_in_check_mode_where_memory_is_held(
    environment: Callable[[str], dict[str, str]],
) -> None:
    """The service that is to be replaced holds the memory in a check run: no failure, no wait, but a warning."""
    code, result, warnings = ansible(
        environment(EIGHT_CARDS + "free_mib 3 3348\n"), "state=free timeout=300 expected_count=8", "--check"
    )
    assert code == 0, result
    assert (result["free"], result["changed"]) == (False, False)
    assert "[WARNING]: not free now: card 3 " in warnings


# What needs neither bindings nor stub: pure functions and the wait with a clock of its own.


def card(free: int, total: int = 1000) -> nvml.Card:
    return nvml.Card(
        index=0,
        uuid="GPU-0",
        name="card",
        pci_bus_id="00000000:11:00.0",
        memory_total=total,
        memory_free=free,
        memory_used=total - free,
        processes=(),
        processes_visible=True,
        pcie=nvml.PcieLink(5, 5, 16, 16),
    )


def gpus_with(free: int) -> nvml.Gpus:
    return nvml.Gpus("590.48.01", "13.590.48.01", "13.1", None, (card(1000), card(free)))


class Clock:
    """Time that moves only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def test_vllms_threshold_is_met_exactly() -> None:
    assert nvml.required_free(card(0, total=1001), 0.95) == 951  # 950.95 rounded up
    assert nvml.short_cards(gpus_with(950), 0.95) == []
    assert [item.memory_free for item in nvml.short_cards(gpus_with(949), 0.95)] == [949]


def test_the_wait_is_bounded_and_reports_now_and_then() -> None:
    clock, lines = Clock(), list[str]()
    with pytest.raises(nvml.GpuError) as caught:
        nvml.wait_until_free(
            lambda: gpus_with(10),
            0.95,
            40,
            interval_s=7,
            report=lines.append,
            clock=lambda: clock.now,
            sleep=clock.sleep,
        )
    assert caught.value.problem == nvml.MEMORY_NOT_FREE
    assert clock.now == 140
    assert clock.sleeps == [7, 7, 7, 7, 7, 5]
    assert [line.partition("waiting ")[2].partition(":")[0] for line in lines] == ["up to 40 s", "up to 19 s"]


@pytest.mark.parametrize(("asked", "kept"), [(0.0, nvml.POLL_MIN_S), (600.0, nvml.POLL_MAX_S)])
def test_the_poll_interval_is_bounded(asked: float, kept: float) -> None:
    clock = Clock()
    readings = iter([10, 1000])
    nvml.wait_until_free(
        lambda: gpus_with(next(readings)),
        0.95,
        300,
        interval_s=asked,
        clock=lambda: clock.now,
        sleep=clock.sleep,
    )
    assert clock.sleeps == [kept]


@pytest.mark.parametrize("limits", [(0.0, 1.0), (1.01, 1.0), (0.95, -1.0), (0.95, float("inf"))])
def test_limits_that_make_no_sense_are_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        nvml.check_limits(*limits)


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build",
            "590.48.01",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023", "535.129.03"),
        ("", None),
    ],
)
def test_kernel_module_version(line: str, version: str | None) -> None:
    assert nvml.kernel_module_version(line) == version


def test_command_lines_lose_their_secrets_and_stay_short_and_on_one_line() -> None:
    assert nvml.redact("vllm serve --api-key s3cret --port 8000") == "vllm serve --api-key *** --port 8000"
    assert nvml.redact("vllm serve --api-key=s3cret") == "vllm serve --api-key=***"
    assert nvml.redact("vllm --max-num-batched-tokens 8192") == "vllm --max-num-batched-tokens 8192"
    assert nvml.redact("python3 -c \nimport time\n\ttime.sleep(1)") == "python3 -c import time time.sleep(1)"
    assert len(nvml.redact("x" * 1000)) == nvml.MAX_COMMAND


@pytest.mark.parametrize(
    ("path", "content", "kind"),
    [
        ("run/systemd/container", "systemd-nspawn\n", "systemd-nspawn"),
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("proc/1/environ", "PATH=/bin\0container=lxc\0TERM=linux\0", "lxc"),
        ("proc/1/environ", "PATH=/bin\0TERM=linux\0", None),
    ],
)
def test_container_kind(tmp_path: Path, path: str, content: str, kind: str | None) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(content)
    assert nvml.container_kind(tmp_path) == kind


def test_a_process_that_waits_in_the_driver_is_said(tmp_path: Path) -> None:
    """It has no arguments any more, and no signal ends it (pain 2): the message asks for a reboot."""
    (tmp_path / "77").mkdir()
    (tmp_path / "77/status").write_text("Name:\tVLLM::Worker\nState:\tD (disk sleep)\nUid:\t0\t0\t0\t0\n")
    (tmp_path / "77/cmdline").write_text("")
    process = nvml.describe_process(77, 90 * nvml.GIB, proc=tmp_path)
    assert process == nvml.GpuProcess(77, 90 * nvml.GIB, "root", "[VLLM::Worker]", "D")

    stuck = replace(card(10), processes=(process,))
    gpus = nvml.Gpus("590.48.01", "13.590.48.01", "13.1", None, (stuck,))
    with pytest.raises(nvml.GpuError, match=r"state D: \[VLLM::Worker\].*Do: reboot"):
        nvml.wait_until_free(lambda: gpus, 0.95, 0)


def test_the_guard_loads_the_module_that_the_service_may_not(
    environment: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    tool = tmp_path / "bin" / "nvidia-modprobe"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit 1\n')
    tool.chmod(0o755)
    with_tool = environment(EIGHT_CARDS)
    with_tool["PATH"] = f"{tool.parent}:/usr/bin:/bin"
    done = guard(with_tool, "--utilization=0.95", "--timeout=0", "--expected-count=8")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text() == "-u -c=0\n"
