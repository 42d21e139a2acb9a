"""How long a benchmark will take, said before it begins: rough, from sizes and rates. What runs really take replaces it
as they end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moestream.lab.bench_arms import Arm
from moestream.lab.runs import Setup
from moestream.lab.schedule import Slot, time_left
from moestream.lab.validity import Record

#: A process and its imports, emptying the page cache, the disk's rate, taking everything down again.
START_S = 6.0
#: Without a probe: bytes of weights two or more processors multiply a second.
WEIGHTS_BYTES_PER_S = 10e9
#: Of a disk that cannot be measured (a file of a few MB).
DISK_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class Pace:
    """``disk_bytes_per_s``; ``compute_s``: a token's with everything in memory; ``expert_bytes``: of the cap, what is
    left for experts."""

    disk_bytes_per_s: float
    compute_s: float
    expert_bytes: int


def expected_s(setup: Setup, arms: Sequence[Arm], pace: Pace) -> dict[str, float]:
    """Seconds a run of each arm will take, by its key."""
    return {arm.key: _run_s(setup, arm, pace) for arm in arms}


def seconds_by_arm(records: Sequence[Record]) -> dict[str, list[float]]:
    """What runs took, by their arm's key."""
    took: dict[str, list[float]] = {}
    for record in records:
        took.setdefault(record["arm"], []).append(record["seconds"])
    return took


def left_s(
    expected: Mapping[str, float], took: Mapping[str, Sequence[float]], todo: Sequence[Slot]
) -> float | None:
    """Seconds that ``todo`` will take: an arm's own runs tell, and what was expected where there is none."""
    return time_left({key: [seconds] for key, seconds in expected.items()} | dict(took), todo)


def _run_s(setup: Setup, arm: Arm, pace: Pace) -> float:
    model, disk = setup.model, pace.disk_bytes_per_s
    whole_s = model.bytes / disk
    if arm.cap_bytes is None:
        return START_S + whole_s + _decode_s(setup, arm, pace.compute_s)
    if arm.faults:
        # Each fault reads around itself, and what was read first has left before it is used: about the file a token.
        load_s = whole_s if arm.is_stock else 0.0
        return START_S + load_s + whole_s + _decode_s(setup, arm, max(pace.compute_s, whole_s))
    missing = 1 - min(1.0, pace.expert_bytes / max(1, model.expert_bytes))
    token_s = pace.compute_s + missing * model.demand_bytes_per_token / disk
    # The load reads what is dense, the prompt nearly every expert.
    return START_S + whole_s + _decode_s(setup, arm, token_s)


def _decode_s(setup: Setup, arm: Arm, token_s: float) -> float:
    fewest, most = setup.tokens_of(arm)
    if setup.limit_s is None:
        return most * token_s
    return min(most * token_s, max(fewest * token_s, setup.limit_s))
