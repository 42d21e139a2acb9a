"""Which of this box's counters follow what is really read from the disk.

A known number of cold bytes is read, past the page cache and through it, and each account is looked at before and
after. Containers often show zeros, or the sums of everybody.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from moestream.box.accounts import cgroup_counter, process_counter
from moestream.core import _core
from moestream.probe.device import Device
from moestream.probe.sample import BLOCK, Sample

#: A counter follows when its median is within this share of what was read.
TOLERANCE = 0.05
READ_BYTES = 24 << 20
ROUNDS = 3
#: The account of the reads themselves, where no other can be had.
LEDGER = "ledger"

#: A counter's bytes now, or None where this box has none.
Counter = Callable[[], int | None]


def follow(
    counters: Mapping[str, Counter], ways: Mapping[str, Callable[[], tuple[int, str]]], rounds: int = ROUNDS
) -> dict[str, Any]:
    """Read in each way, ``rounds`` times, and say by way and counter what share of the bytes it counted (a median;
    None where there is no counter) and which counters ``follow`` in every way.

    A way returns the bytes it has read from the disk, or 0 and why it could not. ``source`` is the first counter
    that follows, else the ledger.
    """
    ratios: dict[str, dict[str, list[float]]] = {way: {name: [] for name in counters} for way in ways}
    notes: dict[str, str] = {}
    for _ in range(rounds):
        for way, read in ways.items():
            before = {name: counter() for name, counter in counters.items()}
            count, why = read()
            if count <= 0:
                notes[way] = why
                continue
            for name, counter in counters.items():
                now, then = counter(), before[name]
                if now is not None and then is not None:
                    ratios[way][name].append((now - then) / count)
    shares = {
        way: {name: statistics.median(values) if values else None for name, values in found.items()}
        for way, found in ratios.items()
    }
    tried = [way for way in ways if any(value is not None for value in shares[way].values())]
    follows = [name for name in counters if tried and all(_close(shares[way][name]) for way in tried)]
    return {
        "source": follows[0] if follows else LEDGER,
        "follows": follows,
        "counted": shares,
        "not_read": notes,
    }


def physical_counters(sample: Sample, device: Device | None) -> dict[str, Any]:
    """``follow`` on this box, reading the sample."""

    def device_bytes() -> int | None:
        reads = device.reads() if device is not None else None
        return reads.bytes if reads is not None else None

    number = device.number if device is not None else None
    counters: dict[str, Counter] = {
        "process": process_counter,
        "cgroup": lambda: cgroup_counter(number),
        "device": device_bytes,
    }

    def cold_reads(direct: bool) -> tuple[int, str]:
        ranges = sample.take(READ_BYTES)
        reason = sample.make_cold(ranges)
        if reason:
            return 0, reason
        timing = _core.probe_reads(
            sample.names,
            ranges,
            reader="threads:2",
            in_flight=2,
            direct=direct,
            buffer_bytes=BLOCK,
            seconds=2.0,
        )
        return int(timing["bytes"]), "nothing was read"

    ways = {"buffered": lambda: cold_reads(False)}
    if sample.direct:
        ways["direct"] = lambda: cold_reads(True)
    return follow(counters, ways)


def _close(share: float | None) -> bool:
    return share is not None and abs(share - 1) <= TOLERANCE
