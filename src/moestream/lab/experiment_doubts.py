"""How far an experiment's times can be trusted: its own noise floor, and what speaks against them.

Both are the bench's: its floor of two equal runs, and its doubts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from moestream.lab import bench_doubts, statistics
from moestream.lab.bench_doubts import Kind, Typed
from moestream.lab.verdicts import NOISE

Record = dict[str, Any]
#: Of the bench's doubts those about the machine and the code; how many runs there are, each claim says itself.
_KINDS = (
    Kind.DRIFT,
    Kind.FILE_SYSTEM,
    Kind.DISK_SPREAD,
    Kind.OTHER_LOAD,
    Kind.STOLEN,
    Kind.THROTTLED,
    Kind.COLD_UNKNOWN,
    Kind.COUNTER_STUCK,
    Kind.MODIFIED,
)


#: Where nobody says what was typed.
ANYWHERE = Typed("moestream lab run NAME --out DIR", "demo", "MODEL")


def noise_of(records: Iterable[Record]) -> float:
    """By how much one arm differs from itself on one prompt from repeat to repeat, as a share; at least ``NOISE``.

    Each two repeats in a row stand for the two runs of the bench's sentinel in one cell."""
    return max(NOISE, statistics.noise_floor(_pairs(records)) or 0.0)


def doubts_of(records: Sequence[Record], typed: Typed) -> list[dict[str, Any]]:
    """What speaks against the times of runs that may be counted, as plain values with the next command to type."""
    if not records:
        return []
    ran = sorted(({**record, "valid": True} for record in records), key=lambda one: str(one.get("date", "")))
    setup = {"caged": True, "tokens": min(one["document"]["decode"]["tokens"] for one in ran)}
    found = bench_doubts.doubts(setup, ran, None, has_ceiling=True, typed=typed)
    return [{**asdict(doubt), "kind": doubt.kind.value} for doubt in found if doubt.kind in _KINDS]


def _pairs(records: Iterable[Record]) -> Iterator[Record]:
    """The repeats of each arm on each prompt, two and two, as the first and second run of a cell."""
    repeats: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        repeats.setdefault((record["arm"], record["prompt"]), []).append(record)
    cell = 0
    for runs in repeats.values():
        runs.sort(key=lambda one: int(one["round"]))
        for first, second in zip(runs[::2], runs[1::2], strict=False):
            yield {**first, "round": cell, "again": False}
            yield {**second, "round": cell, "again": True}
            cell += 1
