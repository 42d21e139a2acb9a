"""How a probe measures: cases interleaved in rounds until time is up, medians with their spread, and the knee.

Nothing here reads a file or a clock of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: The knee is the smallest setting within this share of the best.
KNEE_SHARE = 0.05


@dataclass(frozen=True)
class Shot:
    """One timed run of a case. ``reads``: ranges asked for; ``bytes``: of them; ``cpu_s``: of the whole process.

    ``physical_bytes``: what the process read from the device by the kernel's account; ``device_reads`` and
    ``device_bytes``: by the block device's, which counts everybody's. None where there is no such account.
    """

    bytes: int
    reads: int
    seconds: float
    cpu_s: float = 0.0
    physical_bytes: int | None = None
    device_reads: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True)
class Case:
    """One thing to measure, by its unique ``key``. ``warm``: its ranges must be in the page cache before; else they
    must not be."""

    key: str
    warm: bool
    measure: Callable[[], Shot]


@dataclass
class Measured:
    """Shots by case, and why a case has none (or fewer): the last reason."""

    shots: dict[str, list[Shot]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def run_rounds(
    cases: Sequence[Case],
    rounds: int,
    prepare: Callable[[Case], str],
    *,
    seconds: float,
    clock: Callable[[], float],
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Each case once a round, every other round in reverse, so that a drift does not favour a place in the order.

    Cold cases come before warm ones in each round: what one warms the other would have to drop. ``prepare`` puts
    the state there and returns '' or why it could not; the case is then not measured. Ends after ``rounds``, or
    before the first case that would begin later than ``seconds`` from now.
    """
    result = Measured()
    cold, warm = [c for c in cases if not c.warm], [c for c in cases if c.warm]
    end, done = clock() + seconds, 0
    for number in range(rounds):
        step = -1 if number % 2 else 1
        for case in (*cold[::step], *warm[::step]):
            if clock() >= end:
                for left in cases:
                    if left.key not in result.shots:
                        result.reasons.setdefault(left.key, "the time was up before its turn")
                return result
            reason = prepare(case)
            if reason:
                result.reasons[case.key] = reason
            else:
                result.shots.setdefault(case.key, []).append(case.measure())
            done += 1
            if progress is not None:
                progress(done, rounds * len(cases))
    return result


def spread(values: Sequence[float]) -> dict[str, Any]:
    """``median``, ``low``, ``high``, ``spread`` (their distance over the median) and ``n`` of at least one value."""
    middle, low, high = statistics.median(values), min(values), max(values)
    width = (high - low) / middle if middle else 0.0
    return {"median": middle, "low": low, "high": high, "spread": width, "n": len(values)}


def figure(shots: Sequence[Shot]) -> dict[str, Any]:
    """``bytes_per_s`` as ``spread`` has it, and medians: CPU seconds a GB, device operations a read and their size,
    and ``amplification``, the bytes that came from the device for each byte asked for. None where not known."""
    whole = [shot for shot in shots if shot.bytes > 0 and shot.seconds > 0]
    if not whole:
        return {}
    operations = [s for s in whole if s.device_reads and s.device_bytes is not None]
    physical = [s.physical_bytes / s.bytes for s in whole if s.physical_bytes is not None]
    return {
        "bytes_per_s": spread([shot.bytes / shot.seconds for shot in whole]),
        "cpu_s_per_gb": statistics.median(shot.cpu_s / shot.bytes * 1e9 for shot in whole),
        "read_bytes": statistics.median(shot.bytes / max(1, shot.reads) for shot in whole),
        "device_ops_per_read": _median([(s.device_reads or 0) / max(1, s.reads) for s in operations]),
        "device_op_bytes": _median([(s.device_bytes or 0) / (s.device_reads or 1) for s in operations]),
        "amplification": _median(physical),
    }


def rate(figures: Mapping[str, Any], key: str) -> float | None:
    """The median rate of a case in bytes a second; None when it was not measured."""
    found = figures.get(key)
    return float(found["bytes_per_s"]["median"]) if found else None


def knee(rates: Mapping[int, float]) -> int | None:
    """The smallest setting whose rate is within ``KNEE_SHARE`` of the best; None of nothing."""
    if not rates:
        return None
    best = max(rates.values())
    return min(setting for setting, value in rates.items() if value >= best * (1 - KNEE_SHARE))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
