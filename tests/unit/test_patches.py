"""A patch series is applied whole or not at all, once, to exactly the files that it is for."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import patch_stack
import pytest
import yaml
from octoserve import atomic, patches
from octoserve.patches import PatchError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return patch_stack.install(tmp_path / "site-packages")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return patch_stack.write_series(tmp_path / "stack")


def snapshot(site: Path) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text() for path in sorted(site.rglob("*.py"))}


def texts(site: Path) -> dict[str, str | None]:
    return {path: (site / path).read_text() if (site / path).exists() else None for path in patch_stack.RELEASED}


def apply(folder: Path, site: Path) -> patches.Plan:
    series = patches.load_series(folder)
    patches.check_versions(series, site)
    plan = patches.plan(series, site)
    patches.write(plan, site)
    return plan


def edit_series(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = yaml.safe_load((folder / "series.yml").read_text())
    change(document)
    (folder / "series.yml").write_text(yaml.safe_dump(document))


def test_the_series_is_applied_and_recorded(folder: Path, site: Path) -> None:
    plan = apply(folder, site)
    assert texts(site) == patch_stack.patched()
    assert plan.changes() == ["engine/core.py", "engine/new.py", "engine/util.py", "plugin/load.py"]
    assert patches.verify(patches.final_hashes(patches.load_series(folder)), site) == []


def test_a_second_run_changes_nothing(folder: Path, site: Path) -> None:
    apply(folder, site)
    stamps = {path: (site / path).stat() for path in snapshot(site)}
    plan = apply(folder, site)
    assert plan.changes() == [] and not any(plan.pending.values())
    assert {path: (site / path).stat() for path in snapshot(site)} == stamps


def test_the_same_files_under_another_distribution_name_are_patched(folder: Path, tmp_path: Path) -> None:
    site = patch_stack.install(tmp_path / "cpu", name="engine_cpu", version="1.2.0+cpu")
    apply(folder, site)
    assert texts(site) == patch_stack.patched()


def test_hard_links_to_a_package_cache_are_left_alone(folder: Path, site: Path, tmp_path: Path) -> None:
    os.link(site / "engine/util.py", tmp_path / "cache.py")
    apply(folder, site)
    assert (tmp_path / "cache.py").read_text() == patch_stack.RELEASED["engine/util.py"]


def test_byte_code_of_changed_files_goes_and_other_stays(folder: Path, site: Path) -> None:
    (site / "engine/other.py").write_text("x = 1\n")
    compiled = [py_compile.compile(str(site / f"engine/{name}.py")) for name in ("util", "other")]
    apply(folder, site)
    assert [Path(str(path)).exists() for path in compiled] == [False, True]


def test_the_mode_of_a_file_is_kept(folder: Path, site: Path) -> None:
    (site / "engine/util.py").chmod(0o755)
    apply(folder, site)
    assert (site / "engine/util.py").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_run_killed_between_two_files_is_carried_on(
    folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    calls: list[Path] = []
    real = atomic.write_text

    def dies(path: Path, text: str, mode: int = 0o644) -> None:
        if len(calls) == written:
            (path.parent / f".{path.name}.k1ll3d__").write_text(text[:3])  # what SIGKILL leaves of a write
            raise KeyboardInterrupt
        calls.append(path)
        real(path, text, mode)

    with monkeypatch.context() as patched:
        patched.setattr(atomic, "write_text", dies)
        with pytest.raises(KeyboardInterrupt):
            apply(folder, site)
    assert texts(site) not in (patch_stack.RELEASED, patch_stack.patched())
    apply(folder, site)
    assert texts(site) == patch_stack.patched()
    assert not list(site.rglob(".*k1ll3d__"))


def test_a_file_that_cannot_be_written_puts_everything_back(
    folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(site)
    real = atomic.write_text

    def full(path: Path, text: str, mode: int = 0o644) -> None:
        if path.name == "util.py" and "/ 2" in text:
            raise OSError(28, "No space left on device", str(path))
        real(path, text, mode)

    monkeypatch.setattr(atomic, "write_text", full)
    with pytest.raises(PatchError, match=r"util\.py: No space left on device; nothing is changed"):
        apply(folder, site)
    assert snapshot(site) == before


@pytest.mark.parametrize("state", ["released", "patched"])
def test_an_edited_file_is_refused_with_its_line(folder: Path, site: Path, state: str) -> None:
    if state == "patched":
        apply(folder, site)
    path = site / "engine/core.py"
    path.write_text(path.read_text().replace("step_28 = 28\n", "step_28 = 0\n"))
    before = snapshot(site)
    with pytest.raises(
        PatchError,
        match=rf"engine/core\.py was edited .*\({'as released' if state == 'released' else ''}"
        r".*core\.py:28: found 'step_28 = 0\\n', wanted 'step_28 = 28\\n'",
    ):
        apply(folder, site)
    assert snapshot(site) == before


def test_an_edit_far_from_the_patched_lines_is_refused_too(folder: Path, site: Path) -> None:
    (site / "engine/core.py").write_text("# mine\n" + (patch_stack.RELEASED["engine/core.py"] or ""))
    with pytest.raises(PatchError, match=r"engine/core\.py was edited by somebody else"):
        apply(folder, site)
    path = site / "engine/core.py"
    path.write_text((patch_stack.RELEASED["engine/core.py"] or "").replace("step_1 = 1", "step_1 = 0"))
    with pytest.raises(PatchError, match="the edit lies elsewhere"):
        apply(folder, site)


def test_a_missing_file_is_named(folder: Path, site: Path) -> None:
    (site / "engine/util.py").unlink()
    with pytest.raises(PatchError, match=r"engine/util\.py.*the file to patch is missing"):
        apply(folder, site)


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("engine", "1.2.1", "found engine 1.2.1 .* wanted engine or engine-cpu 1.2.0"),
        ("engine_cpu", "1.3+cpu", r"found engine-cpu 1\.3\+cpu"),
        ("motor", "1.2.0", "found none in .* wanted engine or engine-cpu 1.2.0"),
    ],
)
def test_another_version_is_refused(folder: Path, tmp_path: Path, name: str, version: str, message: str) -> None:
    site = patch_stack.install(tmp_path / "other", name=name, version=version)
    before = snapshot(site)
    with pytest.raises(PatchError, match=message):
        apply(folder, site)
    assert snapshot(site) == before


@pytest.mark.parametrize("path", ["../outside.py", "/etc/outside.py", "engine/../../outside.py", "engine//core.py"])
def test_a_path_out_of_site_packages_is_refused(folder: Path, site: Path, path: str) -> None:
    name = next(file.name for file in folder.glob("0003*"))
    text = (folder / name).read_text().replace("plugin/load.py", path)
    (folder / name).write_text(text)
    edit_series(folder, lambda document: rename(document["patches"][2]["files"], path))
    with pytest.raises(PatchError, match="leads out of site-packages"):
        apply(folder, site)


def rename(files: dict[str, Any], path: str) -> None:
    files[path] = files.pop("plugin/load.py")


def test_a_link_out_of_site_packages_is_refused(folder: Path, site: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    (site / "plugin/load.py").replace(outside)
    (site / "plugin/load.py").symlink_to(outside)
    with pytest.raises(PatchError, match=r"leads out of .* not patched through a link"):
        apply(folder, site)
    assert outside.read_text() == patch_stack.RELEASED["plugin/load.py"]


def test_a_truncated_patch_is_refused_before_anything_is_written(folder: Path, site: Path) -> None:
    before = snapshot(site)
    path = next(folder.glob("0002*"))
    path.write_text(path.read_text()[:-10])
    with pytest.raises(PatchError, match=rf"{path.name}:\d+: "):
        apply(folder, site)
    assert snapshot(site) == before


def test_a_patch_that_needs_fuzz_is_refused(folder: Path, site: Path) -> None:
    """Hashes recorded for the shifted file cannot make a patch fit that names other lines."""
    before = "# one line more\n" + (patch_stack.RELEASED["engine/core.py"] or "")
    (site / "engine/core.py").write_text(before)
    digest = patches.sha256(before)
    edit_series(folder, lambda document: document["patches"][1]["files"]["engine/core.py"].update(before=digest))
    with pytest.raises(PatchError, match=r"0002.*does not fit: engine/core\.py:27: found 'step_26 = 26"):
        apply(folder, site)


def test_a_patch_whose_result_is_not_the_recorded_one_is_refused(folder: Path, site: Path) -> None:
    path = next(folder.glob("0003*"))
    path.write_text(path.read_text().replace("+names = []", "+names = [0]"))
    with pytest.raises(PatchError, match=r"0003.*plugin/load\.py comes out as .* export the series again"):
        apply(folder, site)


def test_a_patch_taken_out_of_the_middle_is_noticed_where_others_build_on_it(folder: Path) -> None:
    next(folder.glob("0001*")).unlink()
    edit_series(folder, lambda document: document["patches"].pop(0))
    assert patches.load_series(folder).paths() == ["engine/core.py", "engine/new.py", "plugin/load.py"]
    folder_site = patch_stack.install(folder / "site")
    with pytest.raises(PatchError, match=r"engine/new\.py.*the file to patch is missing"):
        apply(folder, folder_site)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(patches=None), "wanted a mapping with a list 'patches'"),
        (lambda d: d["patches"].append(d["patches"][0]), "twice"),
        (lambda d: d["patches"].pop(), "does not list 0003"),
        (lambda d: d["patches"][0].update(file="0009-gone.patch"), "not in the folder"),
        (lambda d: d["patches"][0].pop("proof"), "exactly file, distribution, version, proof, files"),
        (lambda d: d["patches"][0].update(proof="hope"), "found proof 'hope'"),
        (lambda d: d["patches"][0].update(version=1.2), "of the wrong type: version"),
        (lambda d: d["patches"][0].update(version="1.3"), "is for engine 1.2.0"),
        (lambda d: d["patches"][0]["files"].pop("engine/new.py"), "changes .* series.yml lists"),
        (lambda d: d["patches"][0]["files"]["engine/util.py"].update(before="abc"), "wanted two different SHA-256"),
        (lambda d: d["patches"][1]["files"]["engine/new.py"].update(before="0" * 64), "0002.* starts from 0000"),
    ],
)
def test_a_wrong_series_file_is_refused(folder: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    edit_series(folder, change)
    with pytest.raises(PatchError, match=message):
        patches.load_series(folder)


@pytest.mark.parametrize("field", ["Description", "Origin", "Bug", "Last-Update", "Applies-To", "Proof"])
def test_every_dep3_field_is_wanted(folder: Path, field: str) -> None:
    path = next(folder.glob("0003*"))
    lines = [line for line in path.read_text().splitlines(True) if not line.startswith(f"{field}:")]
    path.write_text("".join(lines))
    with pytest.raises(PatchError, match=rf"DEP-3 fields missing:.*{field}"):
        patches.load_series(folder)


def test_an_unreadable_series_is_an_error_that_says_so(folder: Path) -> None:
    with pytest.raises(PatchError, match="cannot run /no/python"):
        patches.load_series(folder, "/no/python")
    (folder / "series.yml").write_text("patches: [")
    with pytest.raises(PatchError, match=r"cannot read .*series\.yml"):
        patches.load_series(folder)


def test_verify_names_each_wrong_file(folder: Path, site: Path) -> None:
    hashes = patches.final_hashes(patches.load_series(folder))
    assert [fault.split(":")[0] for fault in patches.verify(hashes, site)] == sorted(hashes)
    apply(folder, site)
    (site / "plugin/load.py").write_text("names = ()\n")
    (site / "engine/new.py").unlink()
    assert [fault.split(",")[0][:28] for fault in patches.verify(hashes, site)] == [
        "engine/new.py: found no file",
        "plugin/load.py: found " + str(patches.sha256("names = ()\n"))[:6],
    ]


def test_the_module_checks_applies_shows_and_verifies(folder: Path, site: Path) -> None:
    arguments = {"series": str(folder), "site_packages": str(site)}
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "vars": {"ansible_python_interpreter": sys.executable},
        "tasks": [
            {"patch_series": arguments, "check_mode": True, "diff": True, "register": "checked"},
            {"patch_series": {**arguments, "state": "verified"}, "register": "early", "ignore_errors": True},
            {"patch_series": arguments, "register": "first"},
            {"patch_series": arguments, "register": "second"},
            {"patch_series": {**arguments, "state": "verified"}, "register": "verified"},
            {
                "ansible.builtin.assert": {
                    "that": [
                        "checked is changed and checked.diff | length == 4",
                        "checked.patches | map(attribute='changed') is all",
                        "early is failed and 'not patched: engine/core.py' in early.msg",
                        "first is changed and first.files['plugin/load.py'] == hash",
                        "second is not changed and second.files == first.files",
                        "verified is not changed",
                    ]
                },
                "vars": {"hash": patches.sha256("names = []\n")},
            },
        ],
    }
    playbook = folder / "play.yml"
    playbook.write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", "-c", "local", "-D", str(playbook)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert texts(site) == patch_stack.patched()
