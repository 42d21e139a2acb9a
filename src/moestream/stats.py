"""What one step did, and what a phase of steps adds up to. Plain numbers, no numpy: `run` stays small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value with at least ``share`` of all at or below it; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def phase_summary(steps: Sequence[Step]) -> dict[str, Any]:
    """The figures of ``run --json`` for one phase. Without a step, sums are 0 and rates and percentiles None."""
    seconds = sum(step.seconds for step in steps)
    tokens = sum(step.tokens for step in steps)
    step_ms = [round(step.seconds * 1e3, 3) for step in steps]
    stall = sum(step.stall_s for step in steps)
    memory = sum(step.memory_work_s for step in steps)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tok_per_s": tokens / seconds if seconds > 0 else None,
        "step_ms": step_ms,
        "p50_ms": percentile(step_ms, 0.50),
        "p95_ms": percentile(step_ms, 0.95),
        "p99_ms": percentile(step_ms, 0.99),
        "hits": sum(step.hits for step in steps),
        "misses": sum(step.misses for step in steps),
        "bytes_read": sum(step.bytes_read for step in steps),
        "stall_s": stall,
        "compute_s": max(0.0, seconds - stall - memory),
        "memory_work_s": memory,
        "speculative": {
            "issued": sum(step.speculative_issued for step in steps),
            "used": sum(step.speculative_used for step in steps),
            "wasted_bytes": sum(step.speculative_wasted_bytes for step in steps),
        },
        "majflt": sum(step.majflt for step in steps),
        "minflt": sum(step.minflt for step in steps),
        "read_bytes_os": sum(step.read_bytes_os for step in steps),
    }
