"""What several records make together: means with intervals, where their time went. Figures of one are the bench's own.

Times in seconds, sizes in bytes; None where nothing can be said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moestream.lab import statistics
from moestream.lab.bench_figures import hit_rate
from moestream.reports.records import Record

#: Intervals are the bench's own: the report and the bench say the same of the same runs.
Estimate = statistics.Interval


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The geometric mean of what is known, with its bootstrap interval (none of fewer than 3); None of nothing."""
    return statistics.mean_interval([value for value in values if value])


def rate(record: Record) -> float | None:
    """Decoded tokens a second, without the steps that warm up."""
    return statistics.rate(record)


def saw_routes(record: Record) -> bool:
    """Whether the engine saw which experts were routed, and so can tell stalls from computing."""
    return hit_rate(record) is not None


def _all_in_memory(record: Record) -> bool:
    return str(record["document"]["mechanism"]["effective"]).startswith("resident")


@dataclass(frozen=True)
class Split:
    """Where a token's seconds went. ``stall_s`` is None where no route was seen: then page faults are in
    ``compute_s``, and nobody can tell them apart."""

    stall_s: float | None
    compute_s: float
    memory_work_s: float

    @property
    def total_s(self) -> float:
        return (self.stall_s or 0.0) + self.compute_s + self.memory_work_s


def split(records: Sequence[Record]) -> Split | None:
    """The mean token of all records together, by where its time went."""
    phases = [record["document"]["decode"] for record in records]
    tokens = sum(phase["tokens"] for phase in phases)
    if not tokens:
        return None
    seconds = sum(sum(phase["step_ms"]) for phase in phases) / 1e3
    stall = sum(phase["stall_s"] for phase in phases)
    work = sum(phase["memory_work_s"] for phase in phases)
    told = any(saw_routes(record) or _all_in_memory(record) for record in records)
    if not told:
        stall = 0.0
    compute = max(0.0, seconds - stall - work)
    return Split(stall / tokens if told else None, compute / tokens, work / tokens)


def step_percentiles(records: Sequence[Record]) -> tuple[float | None, float | None, float | None]:
    """p50, p95 and p99 of the steps of all records without their warm-up, in seconds."""
    steps = [ms / 1e3 for record in records for ms in statistics.step_ms(record)]
    if not steps:
        return None, None, None
    return (
        statistics.percentile(steps, 50),
        statistics.percentile(steps, 95),
        statistics.percentile(steps, 99),
    )
