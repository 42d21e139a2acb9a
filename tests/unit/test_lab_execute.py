"""The executor of this box before any run: which caps are enough, and which batch all runs have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moestream.errors import BudgetError
from moestream.lab import execute
from moestream.lab.bench_arms import Arm
from moestream.lab.execute import BoxExecutor
from moestream.lab.experiment import ArmSpec
from moestream.lab.experiment_plan import Job
from moestream.lab.runs import Processes, Setup
from moestream.model import read_model


def job(cap_bytes: int, mechanism: str = "arena") -> Job:
    return Job("it", ArmSpec("a", mechanism), "prose", 0, 0, cap_bytes, None, 8, 2, 512, None, False)


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


def test_what_fills_the_page_cache_needs_the_kernels_cap(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute.Cage, "available", classmethod(lambda _: (False, "no memory controller")))
    executor = BoxExecutor(read_model(tiny("olmoe")), tmp_path)
    for mechanism in ("arena/cached", "arena/cached/thp+sync+lru", "mapped+willneed", "cow", "stock"):
        assert (
            executor.left_out(job(1 << 30, mechanism)) == "only a memory cgroup caps it: no memory controller"
        )
    for mechanism in ("arena", "arena/buffered"):
        assert executor.left_out(job(1 << 30, mechanism)) == ""


def test_a_run_that_is_stuck_is_ended_and_says_so(tiny: Callable[..., Path], tmp_path: Path) -> None:
    setup = Setup(read_model(tiny("olmoe")), 1, 64, 8, 4, False, tmp_path, timeout_s=0.3)
    ended = Processes().execute(setup, Arm("a", None, "resident"), ["sleep", "600"])
    assert ended["returncode"] == -9
    assert "it was stuck: ended after" in ended["error"]
    in_time = Processes().execute(setup, Arm("a", None, "resident"), ["true"])
    assert (in_time["returncode"], in_time["error"]) == (0, "")
