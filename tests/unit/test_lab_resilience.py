"""Experiments one after another: one that fails, runs they have in common, what is told meanwhile, and going on."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lab_fakes import Fake, made_record
from moestream.errors import BudgetError, RefusedError, UsageError
from moestream.lab import session
from moestream.lab.bench_progress import Lines
from moestream.lab.experiment import experiments, find
from moestream.lab.experiment_plan import DEMO, Job, jobs, not_shared, steps
from moestream.lab.experiment_progress import Progress
from moestream.lab.experiment_sharing import SharedRuns
from moestream.lab.experiment_text import summary_lines
from moestream.lab.runs import RUNS, append
from moestream.lab.session import Asked, run_all
from moestream.model import read_model


class Writing(Fake):
    """A ``Fake`` that keeps its records; it fails on experiments named in ``broken``."""

    broken: tuple[str, ...] = ()
    error: Exception = BudgetError("the smallest cap that works is 3 GB")
    all_runs: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, model: Any, out: Path) -> None:
        super().__init__(shots={"advice/normal": [{"bytes_per_s": 1e9}]})
        self._out = out

    def run(self, job: Job, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if job.experiment in self.broken:
            raise self.error
        self.all_runs.append((job.experiment, job.arm.key))
        record = {**super().run(job, earlier), "schema": 1, "experiment": job.experiment}
        append(self._out / RUNS, record)
        return record


@pytest.fixture
def lab(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    monkeypatch.setattr(session, "BoxExecutor", Writing)
    monkeypatch.setattr(session, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(Writing, "all_runs", [])
    model = read_model(tiny("olmoe"))

    def run(*names: str, out: Path | None = tmp_path / "out", **more: bool) -> Any:
        told = io.StringIO()
        asked = Asked(model, None, True, out, more.get("resume", False), more.get("force", False))
        outcomes = run_all([find(name) for name in names], asked, tell=None, show=Lines(told))
        return outcomes, told.getvalue()

    return run


@pytest.mark.parametrize("error", [BudgetError("no cap is enough"), KeyError("decode")])
def test_an_experiment_that_fails_cannot_tell_and_the_others_are_run(
    lab: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(Writing, "broken", ("recycling",))
    monkeypatch.setattr(Writing, "error", error)
    outcomes, told = lab("recycling", "prefill-batch")
    assert [(one["experiment"], one["verdict"]) for one in outcomes] == [
        ("recycling", "cannot tell"),
        ("prefill-batch", "disagrees"),
    ]
    reason = str(error) if isinstance(error, BudgetError) else "KeyError: 'decode'"
    kept = json.loads((tmp_path / "out/recycling/verdict.json").read_text())
    assert kept["failed"] == reason and kept["box"] and kept["model"]
    assert f"recycling failed: {reason}" in told
    assert outcomes[1]["failed"] == ""
    monkeypatch.setattr(Writing, "broken", ())
    again, _ = lab("recycling", "prefill-batch", resume=True)
    assert again[0]["failed"] == "" and len(again[0]["table"]) == 4


def test_without_a_cgroup_it_is_said_what_is_not_enforced(
    lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.Cage, "available", classmethod(lambda _: (False, "no memory controller")))
    assert "arms that only the kernel can cap are left out: no memory controller" in lab("recycling")[1]


def test_a_summary_says_what_came_of_each(lab: Callable[..., Any]) -> None:
    outcomes, _ = lab("recycling", "prefill-batch")
    assert summary_lines(outcomes) == [
        "recycling      disagrees",
        "prefill-batch  disagrees",
        "of 2: 0 agrees, 2 disagrees, 0 cannot tell",
    ]


def test_the_only_experiment_that_fails_is_an_error(
    lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writing, "broken", ("recycling",))
    with pytest.raises(BudgetError, match="smallest cap"):
        lab("recycling")


def test_what_must_be_refused_is_refused_before_the_first_run(
    lab: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "out/prefill-batch").mkdir(parents=True)
    (tmp_path / "out/prefill-batch/letters.txt").write_text("mine")
    with pytest.raises(RefusedError, match="holds files that are no benchmark's"):
        lab("recycling", "prefill-batch")
    assert Writing.all_runs == []
    with pytest.raises(UsageError, match="--resume goes on with what --out holds"):
        lab("recycling", out=None, resume=True)


def test_a_probe_that_is_done_is_not_done_again(
    lab: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = lab("advice", "prefill-batch")
    monkeypatch.setattr(Fake, "probed", lambda *_: pytest.fail("probed again"))
    runs = len(Writing.all_runs)
    after, _ = lab("advice", "prefill-batch", resume=True)
    assert after[0] == json.loads((tmp_path / "out/advice/verdict.json").read_text()) == before[0]
    assert len(Writing.all_runs) == runs


def test_a_probe_that_was_not_finished_leaves_no_row_behind(lab: Callable[..., Any], tmp_path: Path) -> None:
    lab("advice", "prefill-batch")
    append(tmp_path / "out/advice" / RUNS, {"schema": 1, "arm": "advice/normal", "round": 0})
    (tmp_path / "out/advice/verdict.json").unlink()
    lab("advice", "prefill-batch", resume=True)
    assert (tmp_path / "out/advice/verdict.json").exists()
    assert not (tmp_path / "out/advice" / RUNS).exists()


def test_without_what_intervals_need_nothing_is_begun(
    lab: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(RefusedError, match="intervals need scipy"):
        lab("recycling")
    assert Writing.all_runs == [] and not (tmp_path / "out").exists()


def test_runs_that_two_experiments_have_in_common_are_made_once(
    lab: Callable[..., Any], tmp_path: Path
) -> None:
    outcomes, told = lab("compute-ceiling", "io-floor", "recycling")
    assert {name for name, _ in Writing.all_runs} == {"compute-ceiling", "recycling"}
    assert set(outcomes[1]["table"]) == {"resident", "default", "study"}
    copies = [json.loads(line) for line in (tmp_path / "out/io-floor" / RUNS).read_text().splitlines()]
    assert {record["made_for"] for record in copies} == {"compute-ceiling"}
    assert {record["experiment"] for record in copies} == {"io-floor"}
    assert told.count("tok/s") == len(Writing.all_runs)


def test_runs_are_not_taken_from_an_experiment_that_lacks_one(tmp_path: Path) -> None:
    order, other = (jobs(find(name), find(name).quick, DEMO) for name in ("compute-ceiling", "io-floor"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    for job in order[:-1]:
        record = {**made_record(job), "schema": 1, "experiment": job.experiment}
        append(tmp_path / "a" / RUNS, record)
    shared = SharedRuns()
    shared.add(tmp_path / "a", order)
    assert shared.take(tmp_path / "b", other) == []
    append(
        tmp_path / "a" / RUNS,
        {**made_record(order[-1]), "schema": 1, "experiment": "compute-ceiling", "trace": "t.parquet"},
    )
    (tmp_path / "a/t.parquet").write_text("routes")
    shared.add(tmp_path / "a", order)
    assert len(shared.take(tmp_path / "b", other)) == len(other)
    assert (tmp_path / "b/t.parquet").read_text() == "routes"


def test_the_estimate_counts_shared_runs_once() -> None:
    times = not_shared(list(experiments().values()), quick=True)
    assert [name for name, time in times.items() if time == 0] == ["locality", "time-breakdown", "io-floor"]


def test_the_time_left_follows_how_long_runs_really_take() -> None:
    """Estimated at 40 s each, they take 60: half as long again is left of what remains."""
    now = 0.0
    told = io.StringIO()
    runs = {("a", "prose", number): 40.0 for number in range(4)}
    progress = Progress(Lines(told), {"one": runs, "two": {("b", "code", 0): 100.0}}, lambda: now)
    assert progress.left_s() == 260.0
    progress.enter("one")
    for step in list(runs)[:2]:
        progress.begin(step)
        now += 60.0
        progress.end(step, {"valid": False, "invalid": ["failed: it"]})
    assert progress.left_s() == pytest.approx(1.5 * (2 * 40 + 100))
    progress.end(("a", "prose", 2), None)
    progress.leave()
    assert progress.left_s() == pytest.approx(1.5 * 100)
    progress.enter("two")
    progress.begin(("b", "code", 0))
    assert told.getvalue().splitlines() == [
        "[1/5] round 1, prose, a (one, 1 of 2): begins, about 4 min left",
        "[1/5] round 1, prose, a (one, 1 of 2): EXCLUDED, failed: it",
        "[2/5] round 2, prose, a (one, 1 of 2): begins, about 4 min left",
        "[2/5] round 2, prose, a (one, 1 of 2): EXCLUDED, failed: it",
        "[5/5] round 1, code, b (two, 2 of 2): begins, about 2 min left",
    ]


def test_steps_are_the_runs_of_an_experiment_and_a_probe_is_one() -> None:
    one = find("recycling")
    assert list(steps(one, True)) == [job.key for job in jobs(one, one.quick, DEMO)]
    assert len(steps(find("advice"), True)) == 1
