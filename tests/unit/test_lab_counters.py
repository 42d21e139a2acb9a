"""An account of physical reads that never moves (as in some containers) is no account: nothing is told from its 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab_fakes import Fake, made_record
from moestream.lab import execute
from moestream.lab.execute import BoxExecutor, probe_figures
from moestream.lab.experiment import Experiment, ProbeSpec, find
from moestream.lab.experiment_figures import FIGURES
from moestream.lab.experiment_plan import DEMO, jobs
from moestream.lab.experiment_run import run_experiment
from moestream.lab.runs import RUNS
from moestream.model import read_model
from moestream.probe.schedule import Measured, Shot

PHYSICAL = ("physical_over_asked", "physical_over_demand", "bytes_per_token")


def record_of(name: str, **changes: Any) -> dict[str, Any]:
    one = find(name)
    return made_record(jobs(one, one.quick, DEMO)[0], **changes)


def figure(name: str, record: dict[str, Any]) -> float | None:
    of = FIGURES[name].of
    assert of is not None
    return of(record)


def stuck(record: dict[str, Any]) -> dict[str, Any]:
    for phase in ("prefill", "decode"):
        record["document"][phase]["read_bytes_os"] = 0
    return record


def mapped(record: dict[str, Any]) -> dict[str, Any]:
    record["document"]["mechanism"]["effective"] = "mapped+willneed+none+none+mlock"
    return record


@pytest.mark.parametrize("name", PHYSICAL)
def test_what_the_device_gave_is_not_known_from_a_counter_that_is_stuck(name: str) -> None:
    assert figure(name, mapped(record_of("page-cache-hits"))) == pytest.approx(
        {"bytes_per_token": 1000.0}.get(name, 1.0)
    )
    assert figure(name, stuck(mapped(record_of("page-cache-hits")))) is None


@pytest.mark.parametrize("name", PHYSICAL)
def test_a_decode_that_reads_nothing_is_known_where_the_counter_moved_before(name: str) -> None:
    """Everything was cached: the prompt's reads show that the account works."""
    assert figure(name, mapped(record_of("page-cache-hits", read_bytes_os=0))) == 0


def test_a_prompt_without_an_account_has_no_bytes() -> None:
    record = stuck(record_of("prefill-batch"))
    assert figure("prefill_bytes_per_token", record) == 100  # by the engine's own account
    record["document"]["prefill"]["bytes_read"] = 0
    assert figure("prefill_bytes_per_token", record) is None


def test_a_stuck_counter_gives_no_verdict() -> None:
    """0 bytes for everything asked for would else lie outside of 0.98 to 1.02 and disagree."""

    class Stuck(Fake):
        def run(self, *arguments: Any) -> dict[str, Any]:
            return stuck(super().run(*arguments))

    outcome = run_experiment(find("bytes-per-token"), Stuck(), DEMO, quick=True)
    assert [claim["word"] for claim in outcome["claims"]][1] == "cannot tell"
    assert outcome["claims"][1]["why"] == "no valid value of arena"
    assert [doubt["kind"] for doubt in outcome["doubts"]] == ["counter stuck"]
    assert run_experiment(find("bytes-per-token"), Fake(), DEMO, quick=True)["doubts"] == []


def shots(*physical: int | None) -> list[Shot]:
    return [Shot(1000, 2, 0.5, 0.1, physical_bytes=one) for one in physical]


def test_a_probe_tells_no_amplification_from_a_counter_that_is_stuck() -> None:
    moving = probe_figures({"cold": shots(1000, 1100), "warm": shots(0, 0)})
    assert [one["amplification"] for one in moving["cold"]] == [1.0, 1.1]
    assert [one["amplification"] for one in moving["warm"]] == [0.0, 0.0]
    for stuck_ in (shots(0, 0), shots(None, None)):
        found = probe_figures({"cold": stuck_, "warm": shots(0)})
        assert all("amplification" not in one for rounds in found.values() for one in rounds)
        assert [one["bytes_per_s"] for one in found["cold"]] == [2000.0, 2000.0]


def test_every_timed_case_of_a_probe_leaves_a_row_that_says_where_it_is_from(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import moestream.probe.disk

    class Planted:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def measure(self, groups: tuple[str, ...]) -> Measured:
            return Measured({"advice/normal": shots(1000, 2000), "advice/willneed": shots(1000)}, {})

        def cases(self) -> list[Any]:
            return []

    monkeypatch.setattr(moestream.probe.disk, "Disk", Planted)
    one: Experiment = find("advice")
    model = read_model(tiny("olmoe"))
    figures, reasons = BoxExecutor(model, tmp_path).probed(
        one.name, ProbeSpec(groups=("advice",)), one.claims
    )
    assert reasons == {"advice/random": "this box has no such case"} | {
        key: "this box has no such case" for key in ("advice/normal", "advice/willneed")
    }
    rows = [json.loads(line) for line in (tmp_path / RUNS).read_text().splitlines()]
    assert [(row["arm"], row["round"]) for row in rows] == [
        ("advice/normal", 0),
        ("advice/normal", 1),
        ("advice/willneed", 0),
    ]
    assert [row["figures"] for row in rows] == [*figures["advice/normal"], *figures["advice/willneed"]]
    assert rows[1]["shot"]["physical_bytes"] == 2000
    made = execute.origin(model, tmp_path)
    for row in rows:
        assert (row["experiment"], row["kind"], row["schema"]) == ("advice", "probe", 1)
        assert {name: row[name] for name in ("commit", "modified", "versions", "kernel", "model")} == {
            name: made[name] for name in ("commit", "modified", "versions", "kernel", "model")
        }
