"""What records add up to: estimates, ceilings and floors by hand, and boxes that are never put together."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from moestream.errors import RefusedError
from moestream.reports import Group, read_results, summarize
from moestream.reports.figures import estimate, split
from moestream.reports.summary import Arm, paired, short
from moestream.reports.tables import comparison, cost_table, excluded_table, headline, speed_table, work_table
from moestream.reports.text import print_report
from report_records import BOX, DEFAULT, MODEL, OTHER_BOX, a_bench, failed, run, save

#: The geometric mean of what the default does on the three prompts of ``a_bench``: 10, 5 and 3.33 tokens a second.
RATE = (10.0 * 5.0 * 10.0 / 3) ** (1 / 3)


def groups_of(directory: Path, records: list[dict[str, Any]], **options: Any) -> list[Group]:
    return summarize([read_results(save(directory, records))], **options)


def arm_of(group: Group, label: str) -> Arm:
    return next(arm for arm in group.arms if arm.label == label)


def test_an_estimate_is_the_geometric_mean_within_its_interval() -> None:
    found = estimate([10.0, 40.0, 20.0, None])
    assert found is not None
    assert (found.value, found.low, found.high, found.n) == pytest.approx((20.0, 10.0, 40.0, 3))
    assert estimate([10.0, 40.0, 20.0]) == found
    many = estimate([10.0 + n / 10 for n in range(21)])
    assert many is not None and many.low is not None and many.high is not None
    assert 10.0 < many.low < many.value < many.high < 12.0


def test_two_values_have_no_interval_and_none_is_nothing() -> None:
    alone = estimate([5.0, None, 5.0])
    assert alone is not None
    assert (alone.value, alone.low, alone.high, alone.n) == (pytest.approx(5.0), None, None, 2)
    assert estimate([None]) is None


def test_arms_have_rates_ratios_and_floors(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path / "a", a_bench())
    default = arm_of(group, "arena+uring:8+lfu-decay:16")
    assert default.rate is not None and default.ratio is not None
    # 10, 5 and 3.33 tokens a second; each 20 times stock on its own prompt.
    assert (default.rate.value, default.rate.n) == (pytest.approx(RATE), 3)
    assert default.ratio.value == pytest.approx(20.0)
    assert default.ratio.low == pytest.approx(20.0)
    # 25 MB a token at 1 GB/s is longer than the 20 ms of computing.
    assert default.floor_s == pytest.approx(0.025)
    assert default.floor_share == pytest.approx(0.025 * RATE)
    assert default.percentiles == (0.2, 0.3, 0.3)
    assert default.split is not None
    assert default.split.total_s == pytest.approx(0.2)
    assert default.split.stall_s == pytest.approx(0.1)
    assert arm_of(group, "resident").floor_s == pytest.approx(0.020)
    assert [arm.label for arm in group.arms] == ["stock", "arena+uring:8+lfu-decay:16", "resident"]


def test_ceilings_say_where_they_are_from(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path / "a", a_bench())
    ceilings = group.ceilings
    assert (ceilings.compute_s, ceilings.compute_source) == (
        pytest.approx(0.020),
        "resident, everything in memory",
    )
    assert ceilings.disk_source == "the best of one measurement a run"
    assert ceilings.disk_s == pytest.approx(0.1)
    assert ceilings.even_bytes == pytest.approx(20e6)


def probe(**changes: Any) -> dict[str, Any]:
    found = {"schema": 1, "box": BOX, "identity": {"model": MODEL["identity"]}}
    return {**found, "disk_bytes_per_s": 2e9, "compute_s_per_token": 0.010, **changes}


def test_a_probe_counts_for_its_own_box_and_model_only(tmp_path: Path) -> None:
    directory, path = tmp_path / "a", tmp_path / "p.json"
    for document, disk, compute in (
        (probe(), 2e9, 0.010),
        (probe(identity={"model": "another"}), 2e9, 0.020),
        (probe(box=OTHER_BOX), 1e9, 0.020),
    ):
        path.write_text(json.dumps(document))
        (group,) = groups_of(directory, a_bench(), probe=path)
        assert group.ceilings.disk_bytes_per_s == disk
        assert group.ceilings.compute_s == pytest.approx(compute)
    (directory / "probe.json").write_text(json.dumps(probe()))
    (group,) = groups_of(directory, a_bench())
    assert group.ceilings.disk_source == group.ceilings.compute_source == "probe"


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1}'])
def test_what_is_no_probe_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(RefusedError, match=r"p\.json"):
        groups_of(tmp_path / "a", a_bench(), probe=path)


def test_invalid_runs_are_in_no_figure_and_said(tmp_path: Path) -> None:
    records = [*a_bench(), run("default", 1.0, valid=False, invalid=["swapped"], round=1), failed()]
    (group,) = groups_of(tmp_path / "a", records)
    default = arm_of(group, "arena+uring:8+lfu-decay:16")
    assert default.rate is not None and default.rate.n == 3
    table = excluded_table(group)
    assert table is not None
    assert [row[2:] for row in table.rows] == [
        ("prose, round 1", "failed with code 4: the disk went away"),
        ("prose, round 2", "swapped"),
    ]
    assert excluded_table(groups_of(tmp_path / "b", a_bench())[0]) is None


def test_two_boxes_in_one_directory_are_kept_apart_and_named(tmp_path: Path) -> None:
    records = [run("default", 100.0), run("default", 10.0, box=OTHER_BOX)]
    groups = groups_of(tmp_path / "a", records)
    assert [group.name for group in groups] == ["a (1)", "a (2)"]
    assert [str(group.box)[:2] for group in groups] == ["2 ", "16"]
    rates = [group.arms[0].rate for group in groups]
    assert [(rate.value, rate.n) for rate in rates if rate] == [
        (pytest.approx(10.0), 1),
        (pytest.approx(100.0), 1),
    ]
    assert all("holds runs of 2 boxes or models" in group.notes[0] for group in groups)


def test_two_directories_of_one_box_get_a_ratio_two_boxes_none(tmp_path: Path) -> None:
    one = read_results(save(tmp_path / "one", [run("default", 100.0)]))
    same = read_results(save(tmp_path / "same", [run("default", 50.0)]))
    other = read_results(save(tmp_path / "other", [run("default", 50.0, box=OTHER_BOX)]))
    table = comparison(summarize([one, same]))
    assert table is not None
    assert table.columns[2:] == ("one, tok/s", "same, tok/s", "last / first")
    assert table.rows == (("1.00 GB", "arena+uring:8+lfu-decay:16", "10.00", "20.00", "2.00"),)
    table = comparison(summarize([one, other]))
    assert table is not None
    assert table.columns[2:] == ("one, tok/s", "other, tok/s")
    assert "different boxes" in table.notes[0]
    assert comparison(summarize([one])) is None


def test_directories_of_one_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    found = [read_results(save(tmp_path / where / "out", [run()])) for where in ("x", "y")]
    assert [group.name for group in summarize(found)] == ["out (1)", "out (2)"]


def test_pairs_are_of_one_prompt_and_round() -> None:
    ours = [{**run(ms=10.0), "round": 0}, {**run(ms=20.0), "round": 1}, run(ms=10.0, prompt="code", round=0)]
    theirs = [{**run(ms=100.0), "round": 0}, {**run(ms=100.0), "round": 1}]
    assert paired(ours, theirs) == [pytest.approx(10.0), pytest.approx(5.0)]
    assert paired(ours[1:2], theirs[:1]) == []


def test_the_first_of_two_that_are_close_is_not_called_faster(tmp_path: Path) -> None:
    def records(second: list[float]) -> list[dict[str, Any]]:
        ours = [run("default", 100.0, round=n) for n in range(3)]
        return ours + [run("arena+gate:1", ms, round=n) for n, ms in enumerate(second)]

    (close,) = groups_of(tmp_path / "a", records([90.0, 105.0, 95.0]))
    assert "no difference shown to arena+uring:8+lfu-decay:16 (default)" in headline(close)[0]
    (clear,) = groups_of(tmp_path / "b", records([50.0, 55.0, 52.0]))
    assert headline(clear)[0].endswith("; faster than the other.")
    (single,) = groups_of(tmp_path / "c", [run("default", 100.0), run("arena+gate:1", 10.0)])
    assert "no difference shown" in headline(single)[0]


def test_a_peak_is_the_most_of_all_runs(tmp_path: Path) -> None:
    records = [run(cage_anon_peak_bytes=size) for size in (700_000_000, 900_000_000, 800_000_000)]
    (group,) = groups_of(tmp_path / "a", records)
    assert group.arms[0].peak_bytes == 900_000_000
    table = cost_table(group)
    assert dict(zip(table.columns, table.rows[0], strict=True))["peak MB"] == "900"


def test_energy_faults_and_waste_are_told_where_they_were_counted(tmp_path: Path) -> None:
    record = run(conditions={"energy_j": 20.0})
    decode = record["document"]["decode"]
    decode.update(minflt=8, speculative={"issued": 2, "used": 1, "wasted_bytes": 6_000_000})
    told, silent = groups_of(tmp_path / "a", [record])[0], groups_of(tmp_path / "b", [run()])[0]

    def cells(group: Group) -> dict[str, str]:
        tables = (work_table(group), cost_table(group))
        return {name: cell for t in tables for name, cell in zip(t.columns, t.rows[0], strict=True)}

    # Four steps; five tokens were made.
    assert [cells(told)[name] for name in ("MB wasted", "minor faults", "joules")] == ["1.5", "2", "4.00"]
    assert [cells(silent)[name] for name in ("MB wasted", "minor faults", "joules")] == ["-", "-", "-"]


def test_where_no_route_was_seen_nothing_is_called_a_stall() -> None:
    stock = run("stock")
    stock["document"]["decode"]["stall_s"] = 0.1
    found = split([stock])
    assert found is not None
    assert found.stall_s is None
    assert found.compute_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        (DEFAULT, "arena+uring:8+lfu-decay:16"),
        ("resident+uring:8+none+none+anon", "resident"),
        ("mapped+willneed+none+none+mlock", "mapped+willneed+mlock"),
        ("mapped/random+fault+none+none+mapped", "mapped/random+fault"),
        ("stock", "stock"),
    ],
)
def test_labels_leave_out_what_goes_without_saying(mechanism: str, expected: str) -> None:
    assert short(mechanism) == expected


def test_labels_under_one_cap_differ(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path / "a", [run(arm="one"), run(arm="two"), run("stock")])
    labels = [arm.label for arm in group.arms]
    assert labels == ["stock", "arena+uring:8+lfu-decay:16 [one]", "arena+uring:8+lfu-decay:16 [two]"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [50, 110])
def test_a_narrow_terminal_loses_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    groups = groups_of(tmp_path / "a", a_bench())
    out = Terminal()
    print_report(groups, [None], [], out)
    words = out.getvalue().split()
    for table in (speed_table(groups[0]), work_table(groups[0]), cost_table(groups[0])):
        for row in table.rows:
            for cell in row[table.heads :]:
                assert all(word in words for word in cell.split()), cell
    assert DEFAULT.removesuffix("+none+anon") in words
