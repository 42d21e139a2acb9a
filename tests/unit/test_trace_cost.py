"""The arithmetic of the recording's cost, on records made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from moestream.lab.trace_cost import AGAIN, ARMS, FILE, PLAIN, ratio, report


def records(rounds: int, sink_s: float = 0.0, slower: float = 1.0) -> list[dict[str, Any]]:
    """Rounds whose tokens take 100, 110, ... ms; the written arm ``slower`` times as long."""
    return [
        {
            "arm": arm,
            "mechanism": "arena",
            "token_s": [(0.1 + 0.01 * number) * (slower if arm == FILE else 1.0)] * 10,
            "sink_s": sink_s if arm == FILE else 0.0,
            "file_bytes": 100,
            "tokens": list(range(11)),
        }
        for number in range(rounds)
        for arm in ARMS
    ]


def test_the_ratio_and_its_interval() -> None:
    assert ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx((2, 2, 2))
    middle, low, high = ratio([1.0, 4.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    assert middle == pytest.approx(2)
    assert 1 <= low < 2 < high <= 4


@pytest.mark.parametrize(
    ("sink_s", "slower", "within"),
    [(0.0, 1.0, True), (0.01, 1.0, True), (0.05, 1.0, False), (0.0, 1.1, False)],
)
def test_the_verdict(sink_s: float, slower: float, within: bool) -> None:
    text, valid = report(records(3, sink_s, slower))
    assert valid is within
    assert ("within 2%" in text) is within
    assert f"| {PLAIN} | 110.0 | 1 | 1 | 0.00% |" in text
    assert "10 bytes a step" in text


def test_a_cost_that_noise_could_hide_is_not_within() -> None:
    found = records(4)
    for record in found:
        if record["arm"] == FILE:  # now faster, now slower than 2 %
            even = record["token_s"][0] in (0.1, 0.12)
            record["token_s"] = [seconds * (0.9 if even else 1.1) for seconds in record["token_s"]]
    text, valid = report(found)
    assert not valid
    assert "CANNOT TELL whether within 2%" in text


def test_both_runs_without_a_trace_count() -> None:
    found = records(3, slower=1.1)
    for record in found:
        if record["arm"] == AGAIN:
            record["token_s"] = [1.21 * seconds for seconds in record["token_s"]]
    text, valid = report(found)
    assert valid
    assert "the median token +0.0%" in text


def test_other_tokens_are_other_work() -> None:
    found = records(2)
    found[-1]["tokens"] = [0]
    assert report(found) == ("the runs differ in their tokens: their times are not of the same work", False)
