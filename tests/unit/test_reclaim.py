"""What may go from the disk: never what runs, what can be gone back to, what another instance uses, or a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from module_runner import Runner
from octoserve import deployment, reclaim


class Host:
    """An instance with deployments of the given releases, each with its folder and cache."""

    def __init__(self, folder: Path) -> None:
        self.state, self.releases, self.cache = folder / "state", folder / "releases", folder / "cache"

    def deploy(self, release: str, state: str = "passed", *, instance: str = "main", model: str = "m") -> int:
        for place in (self.releases, self.cache):
            (place / release).mkdir(parents=True, exist_ok=True)
        models = self.state / "models" / model
        models.mkdir(parents=True, exist_ok=True)
        folder = self.state / "deployments" / instance
        content = {"release": release, "model": f"{models}/m.gguf"}
        number = deployment.record(folder, content)
        deployment.set_state(folder, number, state)
        if state == "passed":
            deployment.make_current(folder, number)
        return number

    def surplus(self, keep: int) -> reclaim.Surplus:
        return reclaim.surplus(self.places, keep)

    @property
    def places(self) -> reclaim.Places:
        return reclaim.Places(self.state, self.state / "models", self.releases, self.cache, "main")

    def numbers(self) -> list[int]:
        return deployment.numbers(self.state / "deployments/main")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_last_that_passed_stay_and_the_rest_goes(host: Host) -> None:
    for release in ("one", "two", "three", "four"):
        host.deploy(release)
    found = host.surplus(keep=2)
    assert [path.name for path in found.deployments] == ["0001", "0002"]
    assert [path.name for path in (*found.caches, *found.releases)] == ["one", "two", "one", "two"]
    reclaim.remove(found.folders)
    assert host.numbers() == [3, 4]
    assert sorted(path.name for path in host.releases.iterdir()) == ["four", "three"]
    assert host.surplus(keep=2).folders == (), "a second time there is nothing"


def test_failed_ones_go_with_their_time_and_newer_ones_stay(host: Host) -> None:
    host.deploy("one")
    host.deploy("bad", "failed")
    host.deploy("two")
    host.deploy("new", "failed")
    found = host.surplus(keep=1)
    assert [path.name for path in found.deployments] == ["0001", "0002"]
    assert {path.name for path in found.releases} == {"one", "bad"}


def test_after_a_way_back_nothing_newer_goes(host: Host) -> None:
    for release in ("one", "two", "three"):
        host.deploy(release)
    folder = host.state / "deployments/main"
    deployment.set_state(folder, 3, "retired")
    deployment.make_current(folder, 1)
    assert host.surplus(keep=1).folders == ()


def test_a_release_of_several_deployments_stays_while_one_does(host: Host) -> None:
    host.deploy("shared")
    host.deploy("shared")
    found = host.surplus(keep=1)
    assert [path.name for path in found.deployments] == ["0001"]
    assert found.releases == ()


def test_what_another_instance_uses_and_what_is_installed_ahead_stays(host: Host) -> None:
    host.deploy("one")
    host.deploy("one", instance="second")
    host.deploy("two")
    (host.releases / "ahead").mkdir()
    assert host.surplus(keep=1).releases == ()


def test_without_a_current_one_nothing_goes(host: Host) -> None:
    host.deploy("one", "failed")
    host.deploy("two", "recorded")
    assert host.surplus(keep=1).folders == ()


def test_models_are_named_and_never_removed(host: Host) -> None:
    host.deploy("one", model="old")
    host.deploy("two", model="new")
    found = host.surplus(keep=1)
    assert [path.name for path in found.unused_models] == ["old"]
    reclaim.remove(found.folders)
    assert (host.state / "models/old").is_dir()
    assert [path.name for path in host.surplus(keep=1).unused_models] == ["old"]


def test_the_module_says_what_it_would_do_and_does_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for release in ("one", "two"):
        host.deploy(release)
    run = Runner(monkeypatch, capsys)
    arguments = {
        **{"state_dir": str(host.state), "releases": str(host.releases), "cache": str(host.cache)},
        **{"instance": "main", "keep": 1, "models": str(host.state / "models")},
    }
    would = run("reclaim", check=True, **arguments)
    assert would["changed"]
    assert host.numbers() == [1, 2]
    assert run("reclaim", **arguments)["removed"] == would["removed"]
    assert run.changed("reclaim", **arguments) is False
    assert "wanted at least 1" in run.error("reclaim", **{**arguments, "keep": 0})


def test_what_a_killed_run_left_half_removed_goes_first(host: Host) -> None:
    host.deploy("one")
    left = host.releases / ".gone.going"
    (left / "lib").mkdir(parents=True)
    found = reclaim.leftovers(host.places)
    assert found == [left]
    reclaim.remove(found)
    assert not left.exists()
