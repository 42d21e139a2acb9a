"""How long a benchmark is expected to take: exact where sizes and rates are round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_records import ARMS, DEFAULT, PROMPTS, RESIDENT, SLOW, STOCK_ARM, Mock, Silent, setup
from moestream.lab.arm import generate
from moestream.lab.bench_session import make_runs
from moestream.lab.bench_time import START_S, Pace, expected_s, left_s, seconds_by_arm
from moestream.lab.schedule import schedule

#: The model of the records has 3 GiB, and here 2 GB of experts, of which a token takes 100 MB.
PACE = Pace(disk_bytes_per_s=float(3 << 30), compute_s=0.05, expert_bytes=500)


def sized(out: Path, **changes: Any) -> Any:
    found = setup(out, tokens=101)
    model = SimpleNamespace(bytes=3 << 30, expert_bytes=1000, demand_bytes_per_token=(3 << 30) // 10)
    return replace(found, model=model, **changes)


def test_each_arm_is_expected_to_take_its_load_its_prompt_and_its_tokens(tmp_path: Path) -> None:
    arms = [replace(STOCK_ARM, tokens=None), SLOW, DEFAULT, RESIDENT]
    # A second reads the file once. Half of the experts are missing: 50 ms of disk and 50 of compute a token.
    assert expected_s(sized(tmp_path), arms, PACE) == pytest.approx(
        {
            "stock": START_S + 2 + 101,
            SLOW.key: START_S + 1 + 10.1,
            "default": START_S + 1 + 10.1,
            "resident": START_S + 1 + 5.05,
        }
    )
    limited = expected_s(sized(tmp_path, limit_s=7.0), arms, PACE)
    # Eleven tokens take stock longer than the limit; the others end by it, or by their tokens.
    assert limited == pytest.approx(
        {
            "stock": START_S + 2 + 11,
            SLOW.key: START_S + 1 + 7,
            "default": START_S + 1 + 7,
            "resident": START_S + 1 + 5.05,
        }
    )


def test_what_runs_took_replaces_what_was_expected(tmp_path: Path) -> None:
    slots = schedule(ARMS, list(PROMPTS), 1, "default")
    expected = {arm.key: 10.0 for arm in ARMS}
    assert left_s({}, {}, slots) is None
    assert left_s(expected, {}, slots) == pytest.approx(10 * len(slots))
    took = seconds_by_arm([{"arm": "stock", "seconds": 2.0}, {"arm": "stock", "seconds": 4.0}])
    assert left_s(expected, took, slots) == pytest.approx(3 * 3.0 + 10 * (len(slots) - 3))
    show = Silent()
    make_runs(setup(tmp_path), slots, [], show, Mock(), expected=expected)
    assert show.left[0] == pytest.approx(10 * len(slots))
    # The sentinel came first and took 17 tokens at 100 ms and a second before them.
    assert show.left[1] == pytest.approx(5 * 2.7 + 10 * (len(slots) - 6))


class Slowly:
    """A model that takes a second of a fake clock for each token."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def tokenize(self, text: bytes, **_: Any) -> list[int]:
        return list(text)

    def generate(self, tokens: list[int], **_: Any) -> Any:
        for token in range(1000):
            self.clock[0] += 1.0
            yield token

    def detokenize(self, tokens: list[int]) -> bytes:
        return bytes(len(tokens))


@pytest.mark.parametrize(
    ("tokens", "seconds", "fewest", "made", "ended"),
    [
        (20, None, 0, 20, "tokens"),
        (20, 7.0, 3, 8, "time"),
        (20, 7.0, 11, 11, "time"),
        (20, 100.0, 11, 20, "tokens"),
        (5, 7.0, 5, 5, "tokens"),
    ],
)
def test_decoding_ends_by_its_tokens_or_by_its_time(
    monkeypatch: pytest.MonkeyPatch, tokens: int, seconds: float | None, fewest: int, made: int, ended: str
) -> None:
    clock = [0.0]
    monkeypatch.setattr("moestream.lab.arm.time.monotonic", lambda: clock[0])
    options: Any = SimpleNamespace(prompt="abc", tokens=tokens, seconds=seconds, fewest=fewest)
    done = generate(Slowly(clock), options)
    assert (len(done.tokens), done.ended, done.prompt_tokens) == (made, ended, 3)
