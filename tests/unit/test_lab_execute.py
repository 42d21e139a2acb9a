"""The executor of this box before any run: which caps are enough, and which batch all runs have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moestream.errors import BudgetError
from moestream.lab.execute import BoxExecutor
from moestream.lab.experiment import ArmSpec
from moestream.lab.experiment_plan import Job
from moestream.model import read_model


def job(cap_bytes: int) -> Job:
    return Job("it", ArmSpec("a", "arena"), "prose", 0, 0, cap_bytes, None, 8, 2, 512, None, False)


def test_a_cap_that_is_too_little_leaves_its_runs_out_and_only_those(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    executor = BoxExecutor(read_model(tiny("olmoe")), tmp_path)
    executor.begin([job(1 << 20), job(1 << 30)])
    assert "the smallest cap that works is" in executor.left_out(job(1 << 20))
    assert executor.left_out(job(1 << 30)) == ""


def test_caps_that_are_all_too_little_are_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="the smallest cap that works is"):
        BoxExecutor(read_model(tiny("olmoe")), tmp_path).begin([job(1 << 20)])
