"""From records to figures: pure functions, times in seconds and sizes in bytes, None where nothing can be said."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]
Figure = Callable[[Record], float | None]


def decode(record: Record) -> dict[str, Any]:
    phase: dict[str, Any] = record["document"]["decode"]
    return phase


def rate(record: Record, steps: int | None = None) -> float | None:
    """Tokens a second of decoding, of the first ``steps`` steps only when given."""
    step_ms = decode(record)["step_ms"][:steps]
    return len(step_ms) / sum(step_ms) * 1e3 if step_ms else None


def hit_rate(record: Record) -> float | None:
    """Share of routed experts found in memory; None where the kernel's cache is the cache."""
    routed = decode(record)["hits"] + decode(record)["misses"]
    return decode(record)["hits"] / routed if routed else None


def bytes_per_token(record: Record) -> float | None:
    """Read from the disk: by the engine's account where it has one, else the kernel's."""
    phase = decode(record)
    read = phase["bytes_read"] or phase["read_bytes_os"]
    return read / phase["tokens"] if phase["tokens"] else None


def per_token(name: str) -> Figure:
    """Seconds of ``stall_s``, ``compute_s`` or ``memory_work_s`` a token; None where the engine saw no route."""

    def figure(record: Record) -> float | None:
        phase = decode(record)
        seconds: float = phase[name]
        return seconds / phase["tokens"] if phase["tokens"] and hit_rate(record) is not None else None

    return figure


def cpu_per_token(record: Record) -> float | None:
    """CPU seconds of the whole process, all threads, a token of decoding."""
    tokens = decode(record)["tokens"]
    return record["document"]["cpu_s"]["decode"] / tokens if tokens else None


def memory_work_per_gb(record: Record) -> float | None:
    """Seconds the engine moved pages, submitted reads and decided, a GB read."""
    phase = decode(record)
    seconds: float = phase["memory_work_s"]
    return seconds / (phase["bytes_read"] / 1e9) if phase["bytes_read"] else None


def cpu_beyond_compute_per_gb(record: Record, compute_cpu_s: float) -> float | None:
    """All CPU a token takes beyond what the same token takes with everything in memory, a GB read.

    An upper bound of what reading costs: the kernel's share, waiting threads' spinning and colder CPU caches
    are in it."""
    cpu, read = cpu_per_token(record), bytes_per_token(record)
    return (cpu - compute_cpu_s) / (read / 1e9) if cpu is not None and read else None


def floor_s(record: Record, compute_s: float, disk_bytes_per_s: float) -> float | None:
    """The least a token can take: its compute with everything in memory, or its missed bytes from the disk."""
    read = bytes_per_token(record)
    return max(compute_s, read / disk_bytes_per_s) if read is not None else None


def load_share(record: Record) -> float | None:
    """Bytes read by the load, by the kernel's account (what it reads ahead of a header included) or the engine's
    if that is more, over dense and boundary pages; None where the load reads the experts too."""
    document = record["document"]
    if not document["mechanism"]["effective"].startswith("arena"):
        return None
    budget, load = document["budget"], document["load"]
    read: float = max(load["bytes_read"], load["read_bytes_os"])
    return read / float(budget["dense_bytes"] + budget["boundary_bytes"])


def own_bytes(record: Record) -> float | None:
    """What of the cap is neither weights, experts, KV cache nor llama.cpp's buffers; None without a cap."""
    budget = record["document"].get("budget")
    if not budget or record["cap_bytes"] is None:
        return None
    return float(budget["other_bytes"] + budget["margin_bytes"])


def held_bytes(record: Record) -> float:
    """Peak memory of the process that the kernel cannot take back: anonymous, and what is locked of a mapped file.

    Sampled from the cgroup while it ran; without one, the most it had resident, mapped libraries included."""
    document = record["document"]
    locked = document["memory"]["locked"] if record["asked"].startswith("mapped") else 0
    if record["cage_anon_peak_bytes"] is None:
        return float(document["peak_rss_bytes"])
    return float(max(record["cage_anon_peak_bytes"], document["memory"]["anon"]) + locked)


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
