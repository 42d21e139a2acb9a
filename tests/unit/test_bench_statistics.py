"""Rates, intervals, the noise floor and verdicts, on times made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench_records import DEFAULT, SLOW, document
from moestream.lab import statistics
from moestream.lab.bench_arms import Arm
from moestream.lab.statistics import Verdict


def run(
    ms: float | list[float], round: int = 0, prompt: str = "one", arm: Arm = DEFAULT, again: bool = False
) -> dict[str, Any]:
    steps = ms if isinstance(ms, list) else [ms] * 16
    return {
        "arm": arm.key,
        "asked": arm.label,
        "round": round,
        "prompt": prompt,
        "again": again,
        "document": document(arm, steps, list(range(len(steps) + 1))),
    }


@pytest.mark.parametrize(("steps", "cut"), [(0, 0), (3, 0), (4, 1), (16, 4), (31, 7), (32, 8), (1000, 8)])
def test_the_first_eight_steps_are_left_out_of_a_short_run_a_quarter(steps: int, cut: int) -> None:
    assert statistics.warm_up(steps) == cut


def test_a_rate_is_of_the_steps_that_count() -> None:
    one = run([1000.0] * 4 + [100.0] * 12)
    assert statistics.rate(one) == pytest.approx(10)
    # Of the first eight steps two are warm-up, two more slow.
    assert statistics.rate(one, 8) == pytest.approx(6 / 2.4)
    assert statistics.rate(run([])) is None


def test_equal_values_have_an_interval_of_no_width() -> None:
    found = statistics.mean_interval([5.0] * 6)
    assert found is not None
    assert (found.value, found.low, found.high, found.n) == pytest.approx((5, 5, 5, 6))


def test_the_mean_is_geometric_and_few_values_have_no_interval() -> None:
    found = statistics.mean_interval([1.0, 4.0])
    assert found is not None
    assert found.value == pytest.approx(2)
    assert found.low is None
    assert found.high is None
    assert statistics.mean_interval([]) is None


def test_an_interval_is_the_same_every_time_and_holds_its_value() -> None:
    values = [8.0, 9.0, 10.0, 11.0, 14.0]
    one, other = statistics.mean_interval(values), statistics.mean_interval(values)
    assert one == other
    assert one is not None
    assert one.low is not None
    assert one.high is not None
    assert 8 < one.low < one.value < one.high < 14


def test_ratios_are_within_a_cell_and_over_the_steps_both_made() -> None:
    # The longer run is faster later on, where the other has no steps.
    ours = [run([100.0] * 8 + [10.0] * 8), run(100.0, prompt="elsewhere")]
    theirs = [run([400.0] * 8, arm=SLOW), run(100.0, round=1, arm=SLOW)]
    assert statistics.ratios(ours, theirs) == pytest.approx([4.0])


def test_two_runs_of_an_arm_in_a_cell_count_as_one() -> None:
    ours = [run(100.0), run(400.0, again=True)]
    assert statistics.ratios(ours, [run(200.0, arm=SLOW)]) == pytest.approx([1.0])


def sentinel(*shares: float) -> list[dict[str, Any]]:
    """A sentinel whose second run takes ``share`` of the time of its first, a round each."""
    first = [run(100.0, round) for round in range(len(shares))]
    return first + [run(100.0 * share, round, again=True) for round, share in enumerate(shares)]


def test_the_noise_floor_is_what_equal_arms_differ_by() -> None:
    assert statistics.noise_floor(sentinel(1.0, 1.0, 1.0)) == pytest.approx(statistics.LEAST_NOISE)
    assert statistics.noise_floor(sentinel(1.25, 1.25, 1.25)) == pytest.approx(0.25)
    assert statistics.noise_floor(sentinel(0.8, 0.8, 0.8)) == pytest.approx(0.25)
    assert statistics.noise_floor(sentinel(1.0, 1.0)) is None
    assert statistics.noise_floor([run(100.0)]) is None


@pytest.mark.parametrize(
    ("ms", "noise", "verdict"),
    [
        (90.0, 0.10, Verdict.FASTER),
        (91.0, 0.10, Verdict.NO_DIFFERENCE),  # 9.9 % faster
        (100.0, 0.10, Verdict.NO_DIFFERENCE),
        (109.0, 0.10, Verdict.NO_DIFFERENCE),
        (111.0, 0.10, Verdict.SLOWER),
        (10.0, None, Verdict.NO_DIFFERENCE),  # without a floor nothing is claimed
    ],
)
def test_a_verdict_lies_outside_the_noise_floor(ms: float, noise: float | None, verdict: Verdict) -> None:
    ours = [run(ms, round) for round in range(4)]
    theirs = [run(100.0, round, arm=SLOW) for round in range(4)]
    found = statistics.compare(ours, theirs, noise)
    assert found is not None
    assert found.verdict is verdict
    assert found.ratio.value == pytest.approx(100 / ms)


def test_an_interval_that_reaches_into_the_floor_shows_nothing() -> None:
    ours = [run(ms, round) for round, ms in enumerate((50.0, 50.0, 50.0, 150.0))]
    found = statistics.compare(ours, [run(100.0, round, arm=SLOW) for round in range(4)], 0.01)
    assert found is not None
    assert found.ratio.value > 1.4
    assert found.verdict is Verdict.NO_DIFFERENCE


def test_two_pairs_show_nothing_and_none_are_no_comparison() -> None:
    theirs = [run(100.0, round, arm=SLOW) for round in range(2)]
    found = statistics.compare([run(1.0, 0), run(1.0, 1)], theirs, 0.01)
    assert found is not None
    assert found.verdict is Verdict.NO_DIFFERENCE
    assert statistics.compare([run(1.0, 5)], theirs, 0.01) is None


def test_a_session_that_slows_down_is_seen_whatever_its_arms() -> None:
    arms = (DEFAULT, SLOW)
    steady = [run(100.0 if arm is DEFAULT else 900.0, round, arm=arm) for round in range(4) for arm in arms]
    assert statistics.session_drift(steady) == pytest.approx(0)
    slowing = [
        run((100.0 if arm is DEFAULT else 900.0) * (1 if round < 2 else 1.25), round, arm=arm)
        for round in range(4)
        for arm in arms
    ]
    assert statistics.session_drift(slowing) == pytest.approx(-0.2)


def test_runs_that_were_made_once_say_nothing_of_drift() -> None:
    once = [run(100.0, prompt=prompt) for prompt in ("a", "b", "c", "d", "e")]
    assert statistics.session_drift(once) is None


def test_a_run_that_slows_down_is_seen() -> None:
    assert statistics.run_drift(run([500.0] * 4 + [100.0] * 6 + [125.0] * 6)) == pytest.approx(-0.2)
    assert statistics.run_drift(run([100.0] * 8)) is None
