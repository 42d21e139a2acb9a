"""What one step did, and what a phase of steps adds up to. Plain numbers, no numpy: `run` stays small."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """One ``llama_decode`` of ``tokens`` tokens. Times in seconds, sizes in bytes.

    ``stall_s``: asleep until a slab was there; ``memory_work_s``: moving pages, submitting reads, deciding;
    ``bytes_read``: of slabs, by the engine's own account; ``read_bytes_os``: by the kernel's.
    """

    tokens: int
    seconds: float
    hits: int
    misses: int
    bytes_read: int
    stall_s: float
    memory_work_s: float
    speculative_issued: int
    speculative_used: int
    speculative_wasted_bytes: int
    majflt: int
    minflt: int
    read_bytes_os: int

    def __add__(self, other: Step) -> Step:
        return Step(*(mine + others for mine, others in zip(_values(self), _values(other), strict=True)))


_values = attrgetter(*(field.name for field in fields(Step)))
NO_STEP = Step(0, 0.0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0, 0)


class Phase:
    """What steps add up to, however many, and the last ``kept`` of them one by one."""

    def __init__(self, kept: int) -> None:
        self.steps: deque[Step] = deque(maxlen=kept)
        self._sum = NO_STEP

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self._sum += step

    def summary(self) -> dict[str, Any]:
        """``phase_summary`` of all; its times of single steps, and their percentiles, are of those that are kept."""
        return _figures(self._sum, self.steps)


def bound_by(stall_s: float, compute_s: float, memory_work_s: float) -> str:
    """What most of this time went to and how much of it: ``disk, 62%``; '' of no time."""
    parts = {"disk": stall_s, "compute": compute_s, "memory work": memory_work_s}
    most, whole = max(parts, key=lambda part: parts[part]), sum(parts.values())
    return f"{most}, {parts[most] / whole:.0%}" if whole > 0 else ""


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value with at least ``share`` of all at or below it; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def phase_summary(steps: Sequence[Step]) -> dict[str, Any]:
    """The figures of ``run --json`` for one phase. Without a step, sums are 0 and rates and percentiles None."""
    return _figures(sum(steps, NO_STEP), steps)


def _figures(whole: Step, steps: Collection[Step]) -> dict[str, Any]:
    step_ms = [round(step.seconds * 1e3, 3) for step in steps]
    return {
        "tokens": whole.tokens,
        "seconds": whole.seconds,
        "tok_per_s": whole.tokens / whole.seconds if whole.seconds > 0 else None,
        "step_ms": step_ms,
        "p50_ms": percentile(step_ms, 0.50),
        "p95_ms": percentile(step_ms, 0.95),
        "p99_ms": percentile(step_ms, 0.99),
        "hits": whole.hits,
        "misses": whole.misses,
        "bytes_read": whole.bytes_read,
        "stall_s": whole.stall_s,
        "compute_s": max(0.0, whole.seconds - whole.stall_s - whole.memory_work_s),
        "memory_work_s": whole.memory_work_s,
        "speculative": {
            "issued": whole.speculative_issued,
            "used": whole.speculative_used,
            "wasted_bytes": whole.speculative_wasted_bytes,
        },
        "majflt": whole.majflt,
        "minflt": whole.minflt,
        "read_bytes_os": whole.read_bytes_os,
    }
