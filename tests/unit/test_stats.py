"""Steps add up to phases exactly, and percentiles are values that were seen."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestream.report import split_steps
from moestream.stats import Phase, Step, bound_by, percentile, phase_summary


def step(tokens: int = 1, seconds: float = 0.5, **values: float) -> Step:
    zero = {field.name: 0 for field in fields(Step)}
    return Step(**{**zero, "tokens": tokens, "seconds": seconds, **values})  # type: ignore[arg-type]


def test_percentiles_are_of_the_values() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.95) == percentile(values, 0.99) == percentile(values, 1.0) == 5.0
    assert percentile(values, 0.2) == percentile(values, 0.0) == 1.0
    assert percentile(values, 0.21) == 2.0
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_has_its_share_below_it_and_no_smaller_value_has(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_a_phase_is_the_sum_of_its_steps() -> None:
    steps = [
        step(4, 1.0, hits=3, misses=5, bytes_read=50, stall_s=0.25, memory_work_s=0.25, majflt=1),
        step(1, 0.5, hits=1, misses=2, bytes_read=20, stall_s=0.125, minflt=7, read_bytes_os=4096),
        step(1, 0.5, speculative_issued=3, speculative_used=2, speculative_wasted_bytes=10),
    ]
    assert phase_summary(steps) == {
        "tokens": 6,
        "seconds": 2.0,
        "tok_per_s": 3.0,
        "step_ms": [1000.0, 500.0, 500.0],
        "p50_ms": 500.0,
        "p95_ms": 1000.0,
        "p99_ms": 1000.0,
        "hits": 4,
        "misses": 7,
        "bytes_read": 70,
        "stall_s": 0.375,
        "compute_s": 1.375,
        "memory_work_s": 0.25,
        "speculative": {"issued": 3, "used": 2, "wasted_bytes": 10},
        "majflt": 1,
        "minflt": 7,
        "read_bytes_os": 4096,
    }


def test_a_phase_without_a_step_says_nothing_of_rates() -> None:
    phase = phase_summary([])
    assert (phase["tokens"], phase["seconds"], phase["step_ms"]) == (0, 0, [])
    assert phase["tok_per_s"] is phase["p50_ms"] is phase["p95_ms"] is phase["p99_ms"] is None


def test_overlapping_times_never_make_compute_negative() -> None:
    assert phase_summary([step(1, 0.5, stall_s=0.4, memory_work_s=0.2)])["compute_s"] == 0.0


@pytest.mark.parametrize(
    ("sizes", "prompt", "prefill"),
    [
        ([5, 1, 1], 5, 1),
        ([4, 1, 1, 1], 5, 2),  # the prompt's last step is a single token
        ([1, 1, 1, 1], 3, 3),  # a budget that runs prompts one token a step
        ([1], 1, 1),
        ([4, 4], 20, 2),  # stopped within the prompt
        ([], 3, 0),
    ],
)
def test_the_prompts_steps_are_told_by_its_length(sizes: list[int], prompt: int, prefill: int) -> None:
    before, after = split_steps([step(size) for size in sizes], prompt)
    assert [s.tokens for s in before] == sizes[:prefill]
    assert [s.tokens for s in after] == sizes[prefill:]


@given(st.lists(st.integers(0, 10**12), max_size=40), st.integers(1, 50))
def test_a_long_phase_keeps_its_sums_and_its_last_steps(read: list[int], kept: int) -> None:
    phase = Phase(kept)
    steps = [step(2, float(at), bytes_read=value, misses=at) for at, value in enumerate(read)]
    for one in steps:
        phase.add(one)
    whole, last = phase_summary(steps), phase_summary(steps[-kept:])
    of_single_steps = ("step_ms", "p50_ms", "p95_ms", "p99_ms")
    assert phase.summary() == {**whole, **{name: last[name] for name in of_single_steps}}


@pytest.mark.parametrize(
    ("stall", "compute", "memory", "said"),
    [
        (0.5, 0.3, 0.0, "disk, 62%"),
        (0.1, 0.3, 0.0, "compute, 75%"),
        (0.1, 0.1, 0.3, "memory work, 60%"),
        (0, 0, 0, ""),
    ],
)
def test_what_time_went_to_is_said_in_words(stall: float, compute: float, memory: float, said: str) -> None:
    assert bound_by(stall, compute, memory) == said
