"""How a probe measures: the order of cases, when it ends, medians and the knee, on a clock that is told the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moestream.probe.schedule import Case, Shot, figure, knee, rate, run_rounds, spread


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def case(key: str, clock: Clock, log: list[str], warm: bool = False, takes: float = 1.0) -> Case:
    def measure() -> Shot:
        log.append(key)
        clock.now += takes
        return Shot(bytes=100, reads=1, seconds=takes)

    return Case(key, warm, measure)


def ready(_case: Case) -> str:
    return ""


def test_rounds_alternate_and_cold_cases_come_before_warm_ones() -> None:
    clock, log = Clock(), list[str]()
    cases = [case("w1", clock, log, warm=True), case("c1", clock, log), case("c2", clock, log)]
    cases.append(case("w2", clock, log, warm=True))
    found = run_rounds(cases, 3, ready, seconds=99, clock=clock)
    assert log == ["c1", "c2", "w1", "w2", "c2", "c1", "w2", "w1", "c1", "c2", "w1", "w2"]
    assert {key: len(shots) for key, shots in found.shots.items()} == {"c1": 3, "c2": 3, "w1": 3, "w2": 3}
    assert found.reasons == {}


def test_it_ends_before_the_case_that_would_begin_too_late_and_says_what_is_missing() -> None:
    clock, log = Clock(), list[str]()
    cases = [case(name, clock, log, takes=2.0) for name in ("a", "b", "c")]
    found = run_rounds(cases, 5, ready, seconds=4.0, clock=clock)
    assert log == ["a", "b"]
    assert found.reasons == {"c": "the time was up before its turn"}


def test_time_that_is_up_in_a_later_round_leaves_fewer_shots_and_no_reason() -> None:
    clock, log = Clock(), list[str]()
    cases = [case(name, clock, log) for name in ("a", "b")]
    found = run_rounds(cases, 5, ready, seconds=3.0, clock=clock)
    assert [len(found.shots[key]) for key in ("a", "b")] == [1, 2]
    assert found.reasons == {}


def test_a_case_whose_state_cannot_be_had_is_not_measured() -> None:
    clock, log = Clock(), list[str]()
    cases = [case(name, clock, log) for name in ("a", "b")]
    prepare: Callable[[Case], str] = lambda c: "12 MB stay in the page cache" if c.key == "a" else ""  # noqa: E731
    found = run_rounds(cases, 2, prepare, seconds=99, clock=clock)
    assert log == ["b", "b"]
    assert found.reasons == {"a": "12 MB stay in the page cache"}
    assert "a" not in found.shots


def test_progress_counts_every_shot() -> None:
    clock, seen = Clock(), list[tuple[int, int]]()
    cases = [case(name, clock, []) for name in ("a", "b")]
    run_rounds(
        cases, 2, ready, seconds=99, clock=clock, progress=lambda done, all_: seen.append((done, all_))
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_spread_is_of_the_median() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "spread": 1.0, "n": 3}
    assert spread([1.0, 3.0])["median"] == 2.0
    assert spread([0.0])["spread"] == 0.0


def test_a_figure_is_made_of_medians() -> None:
    shots = [
        Shot(1000, 2, 1.0, 0.5, physical_bytes=1000, device_reads=4, device_bytes=2000),
        Shot(1000, 2, 2.0, 1.0, physical_bytes=8000, device_reads=8, device_bytes=8000),
        Shot(1000, 2, 4.0, 0.1, physical_bytes=1500, device_reads=2, device_bytes=400),
    ]
    found = figure(shots)
    assert found["bytes_per_s"] == {"median": 500.0, "low": 250.0, "high": 1000.0, "spread": 1.5, "n": 3}
    assert found["cpu_s_per_gb"] == pytest.approx(0.5e6)
    assert found["read_bytes"] == 500
    assert found["device_ops_per_read"] == 2
    assert found["device_op_bytes"] == 500
    assert found["amplification"] == 1.5


def test_where_no_account_is_kept_none_is_invented() -> None:
    found = figure([Shot(1000, 1, 1.0)])
    assert found["device_ops_per_read"] is None
    assert found["device_op_bytes"] is None
    assert found["amplification"] is None


def test_a_shot_that_read_nothing_is_no_figure() -> None:
    assert figure([Shot(0, 0, 1.0)]) == {}
    assert rate({"a": {}}, "a") is None
    assert rate({}, "a") is None
    assert rate({"a": figure([Shot(10, 1, 2.0)])}, "a") == 5.0


@pytest.mark.parametrize(
    ("rates", "at"),
    [
        ({}, None),
        ({1: 5.0}, 1),
        ({1: 1.0, 2: 1.9, 4: 2.0, 8: 1.99}, 2),  # 1.9 is exactly 5 % below the best
        ({1: 1.0, 2: 1.89, 4: 2.0}, 4),
        ({1: 2.0, 2: 2.0, 4: 0.1}, 1),
    ],
)
def test_the_knee_is_the_smallest_within_five_percent_of_the_best(
    rates: dict[int, float], at: int | None
) -> None:
    assert knee(rates) == at
