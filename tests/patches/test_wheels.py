"""Every stack's series applies, strictly and whole, to the released wheels of each of its variants.

The proofs run on the CPU build; production serves the CUDA build, whose Python files are not all the same. The
wheels are those of the locks, fetched once (CUDA: 330 MB a stack).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import stack_wheels
import yaml
from conftest import ROOT
from octoserve import patches, stack

VARIANTS = [
    pytest.param(path.parent, variant, id=f"{path.parent.name}-{variant}")
    for path in sorted(ROOT.glob("files/patches/*/stack.yml"))
    for variant in yaml.safe_load(path.read_text(encoding="utf-8"))["variants"]
]


@pytest.mark.parametrize(("folder", "variant"), VARIANTS)
def test_the_series_applies_to_the_locked_wheels(folder: Path, variant: str) -> None:
    document = yaml.safe_load((folder / "stack.yml").read_text(encoding="utf-8"))
    series = patches.load_series(folder)
    wheels = stack_wheels.fetch(stack.variant(folder, document, variant), series.distributions())
    plan = stack_wheels.plan(series, wheels)
    assert [patch for patch, pending in plan.pending.items() if not pending] == []
    assert {path: patches.sha256(text) for path, text in plan.after.items()} == patches.final_hashes(series)
