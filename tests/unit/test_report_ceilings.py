"""Ceilings as lines in pictures: of benches and of experiments, from runs and probes of the same box and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moestream.reports import read_results, summarize
from moestream.reports.canvas import Limit, Picture, edge_with
from moestream.reports.lab_plots import bars
from moestream.reports.labs import Lab, read_labs
from moestream.reports.plots import rate_limits, series, speed, time_split, waterfall
from moestream.reports.summary import Ceilings
from report_records import BOX, MODEL, OTHER_BOX, a_bench, outcome, run, save, save_lab

#: A token computes for 20 ms and asks for 100 ms of disk.
COMPUTE, DISK = "compute alone: ", "disk alone, nothing kept: "


def shows(found: Picture | None, *labels: str) -> bool:
    assert found is not None
    return all(label in svg for label in labels for svg in (found.wide, found.narrow))


def test_every_picture_of_speed_and_time_has_both_ceilings(tmp_path: Path) -> None:
    records = [
        *a_bench(),
        *(run("arena+gate:1", 90.0, prompt=prompt) for prompt in ("prose", "code", "chat")),
    ]
    (group,) = summarize([read_results(save(tmp_path / "a", records))])
    cap = group.caps[0]
    assert shows(speed(group, "speed"), COMPUTE + "50.0 tok/s", DISK + "10.0 tok/s")
    assert shows(waterfall(group, cap, "steps"), COMPUTE + "50.0 tok/s", DISK + "10.0 tok/s")
    assert shows(time_split(group, "split"), COMPUTE + "20 ms", DISK + "100 ms")
    assert shows(series(group, cap, "tokens"), COMPUTE + "20 ms", DISK + "100 ms")


def test_a_ceiling_out_of_reach_is_named_and_takes_no_room(tmp_path: Path) -> None:
    records = [run(ms=1000.0, disk_bytes_per_s=1e12)]
    (group,) = summarize([read_results(save(tmp_path / "a", records))])
    assert shows(speed(group, "far"), DISK + "10000.0 tok/s", "(beyond")
    near, far = Limit(3.0, "near"), Limit(5.0, "far")
    assert edge_with(1.0, [near, far]) == 3.0
    assert edge_with(1.0, []) == 1.0


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """An experiment with runs beside it, one of them of another box, which is no ceiling of this one."""
    directory = save_lab(tmp_path / "lab", [outcome()])
    fast = run("resident+uring:8+none+none+anon", 1.0, cap=None, box=OTHER_BOX, disk_bytes_per_s=9e9)
    save(directory / "app-lru", [*a_bench(), fast])
    (found,) = read_labs(directory)
    return found


def test_an_experiments_bars_have_the_ceilings_of_its_box(lab: Lab) -> None:
    assert (lab.ceilings.compute_s, lab.ceilings.disk_bytes_per_s) == (pytest.approx(0.02), 1e9)
    assert shows(bars(lab.outcomes[0], lab.ceilings, "bars"), DISK + "10.0 tok/s", COMPUTE + "50.0 tok/s")


@pytest.mark.parametrize(
    ("figure", "values", "labels"),
    [
        ("bytes_per_token", 50e6, ["nothing kept: ", "the disk takes as long as computing: "]),
        ("asked_bytes_per_s", 5e8, ["the disk's best rate: "]),
        ("compute_s_per_token", 0.03, ["all in memory: "]),
        ("of_floor", 0.8, ["the floor: "]),
        ("hit_rate", 0.8, []),
    ],
)
def test_other_figures_have_the_ceilings_that_bound_them(
    lab: Lab, figure: str, values: float, labels: list[str]
) -> None:
    seen = {"value": values, "low": values, "high": values, "n": 1}
    one: dict[str, Any] = {
        **outcome(),
        "figures": [figure],
        "claims": [],
        "table": {"a": {figure: seen}, "b": {figure: seen}},
    }
    drawn = bars(one, lab.ceilings, "other")
    assert drawn is not None
    for label in labels:
        assert label in drawn.wide
    assert ("Dashed lines" in drawn.caption) == bool(labels)


def test_without_runs_a_probe_gives_the_ceilings_and_without_one_there_are_none(tmp_path: Path) -> None:
    directory = save_lab(tmp_path / "lab", [outcome()])
    (bare,) = read_labs(directory)
    assert bare.ceilings == Ceilings()
    assert rate_limits(bare.ceilings) == []
    probe = {
        "schema": 1,
        "box": BOX,
        "identity": {"model": MODEL["identity"]},
        "disk_bytes_per_s": 2e9,
        "compute_s_per_token": 0.01,
    }
    (tmp_path / "probe.json").write_text(json.dumps(probe))
    (found,) = read_labs(directory, tmp_path / "probe.json")
    assert (found.ceilings.disk_bytes_per_s, found.ceilings.compute_s) == (2e9, 0.01)
    (directory / "probe-other.json").write_text(json.dumps({**probe, "box": OTHER_BOX}))
    (other,) = read_labs(directory)
    assert other.ceilings == Ceilings()
