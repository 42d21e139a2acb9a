"""From records to figures: pure functions, times in seconds and sizes in bytes, None where nothing can be said.

The bench, its report and the experiments all take them from here: docs/formats/runs.md says what each name means.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from moestream.lab.bench_arms import STOCK

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


def counts_reads(record: Record) -> bool:
    """Whether the kernel's account of the process's reads moves on that box: some phase of the run shows it."""
    phases = (record["document"].get(name) or {} for name in ("load", "prefill", "decode"))
    return any(phase.get("read_bytes_os") for phase in phases)


def past_page_cache(record: Record) -> bool:
    """Whether what the engine asked for is what the device read: it held all experts, or read them with O_DIRECT."""
    store, *variants = str(record["document"]["mechanism"]["effective"]).partition("+")[0].split("/")
    return store in ("arena", "resident") and not {"buffered", "cached"} & set(variants)


def read_source(record: Record) -> str | None:
    """Whose account of reads from the device is taken: the kernel's of the ``process``, of its ``cgroup`` or of the
    ``device``, whichever first moves; else the ``engine``'s if it reads past the page cache; else None, because what
    was asked for may have been cached."""
    if counts_reads(record):
        return record.get("read_source") or "process"
    return "engine" if past_page_cache(record) else None


def bytes_per_token(record: Record) -> float | None:
    """Read from the device a decoded token, by the account that ``read_source`` names."""
    phase, source = decode(record), read_source(record)
    if not phase["tokens"] or source is None:
        return None
    return asked_per_token(record) if source == "engine" else float(phase["read_bytes_os"] / phase["tokens"])


def asked_per_token(record: Record) -> float | None:
    """Bytes of slabs the engine asked for a decoded token, cached or not; None where nothing asks (stock)."""
    phase = decode(record)
    if not phase["tokens"] or record["asked"] == STOCK:
        return None
    return float(phase["bytes_read"] / phase["tokens"])


def per_token(name: str) -> Figure:
    """One of decode's sums, such as ``majflt``, a token; None where the record has no such sum."""

    def figure(record: Record) -> float | None:
        phase = decode(record)
        value = phase.get(name)
        return float(value / phase["tokens"]) if phase["tokens"] and value is not None else None

    return figure


def split_per_token(name: str) -> Figure:
    """Seconds of ``stall_s``, ``compute_s`` or ``memory_work_s`` a token; None where the engine saw no route."""
    of = per_token(name)
    return lambda record: of(record) if hit_rate(record) is not None else None


def cpu_per_token(record: Record) -> float | None:
    """CPU seconds of the whole process, all threads, a token of decoding."""
    tokens, seconds = decode(record)["tokens"], (record["document"].get("cpu_s") or {}).get("decode")
    return float(seconds / tokens) if tokens and seconds is not None else None


def memory_work_per_gb(record: Record) -> float | None:
    """Seconds the engine moved pages, submitted reads and decided, a GB asked for."""
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


def held_bytes(record: Record) -> float | None:
    """Peak memory of the process that the kernel cannot take back: anonymous, and what is locked of a mapped file.

    Sampled from the cgroup while it ran; without one, the most it had resident, mapped libraries included."""
    document = record["document"]
    anon, memory = record["cage_anon_peak_bytes"], document.get("memory") or {}
    if anon is None:
        peak = document.get("peak_rss_bytes")
        return float(peak) if peak is not None else None
    mapped = str(document["mechanism"]["effective"]).startswith("mapped")
    # Elsewhere the locked pages are anonymous, and counted already.
    locked = memory.get("locked", 0) if mapped else 0
    return float(max(anon, memory.get("anon", 0)) + locked)


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def wasted_per_token(record: Record) -> float | None:
    """Bytes that were read early and for nothing, a decoded token; None for stock, and where nobody counted."""
    phase = decode(record)
    wasted = (phase.get("speculative") or {}).get("wasted_bytes") if record["asked"] != STOCK else None
    return wasted / phase["tokens"] if wasted is not None and phase["tokens"] else None


def energy_per_token(record: Record) -> float | None:
    """Joules of the processor packages over the whole run, load and prompt included, a token made."""
    joules = (record.get("conditions") or {}).get("energy_j")
    tokens = len(record["document"].get("tokens") or ())
    return joules / tokens if joules is not None and tokens else None
