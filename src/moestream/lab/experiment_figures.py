"""The figures experiments are judged by: what each is, its unit, and how it comes out of a run's record.

Those of a run are pure functions of its record; those of a trace, a replay and a probe are made where these are, and
only described here. None where a record cannot say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moestream.lab import bench_figures, statistics

Record = dict[str, Any]
Of = Callable[[Record], float | None]


@dataclass(frozen=True)
class Figure:
    """``kind``: of which experiments; ``unit``: one of ``/s B B/s share s n``; ``timed``: it moves with the
    machine's mood, so that a single run says nothing. ``of``: from a record, for kind ``runs``."""

    what: str
    kind: str
    unit: str
    timed: bool = False
    of: Of | None = None


def _decode(name: str) -> Of:
    """A sum of the decode phase, a token."""

    def figure(record: Record) -> float | None:
        phase = bench_figures.decode(record)
        return phase[name] / phase["tokens"] if phase["tokens"] else None

    return figure


def _demand(record: Record) -> float | None:
    """Bytes a token's matmuls read; stock's document does not say, so its runs have no such figure."""
    model = record["document"].get("model") or {}
    demand: float | None = model.get("demand_bytes_per_token")
    return demand


def _from_device(record: Record) -> float | None:
    """Bytes a token the device gave, by the kernel's account; None where that does not move."""
    return _decode("read_bytes_os")(record) if bench_figures.counts_reads(record) else None


def _over_demand(per_token: Of) -> Of:

    def figure(record: Record) -> float | None:
        demand, read = _demand(record), per_token(record)
        return read / demand if demand and read is not None else None

    return figure


def _found_in_page_cache(record: Record) -> float | None:
    """Of the bytes routed, those that a reader that asks first found there; None for one that does not ask."""
    if "hybrid" not in record["document"]["mechanism"]["effective"]:
        return None
    read = _over_demand(_decode("bytes_read"))(record)
    return None if read is None else 1 - read


def _physical_over_asked(record: Record) -> float | None:
    read, asked = _from_device(record), _decode("bytes_read")(record)
    return read / asked if read is not None and asked else None


def _faults_per_gb(record: Record) -> float | None:
    demand, faults = _demand(record), _decode("majflt")(record)
    return faults / (demand / 1e9) if demand and faults is not None else None


def _asked_per_s(record: Record) -> float | None:
    phase = bench_figures.decode(record)
    return phase["bytes_read"] / phase["seconds"] if phase["seconds"] and phase["bytes_read"] else None


def _share_of_time(name: str) -> Of:
    def figure(record: Record) -> float | None:
        phase = bench_figures.decode(record)
        return phase[name] / phase["seconds"] if phase["seconds"] else None

    return figure


def _wrong(record: Record) -> float | None:
    told = bench_figures.decode(record)["speculative"]
    return 1 - told["used"] / told["issued"] if told["issued"] else None


def _wasted(record: Record) -> float | None:
    phase = bench_figures.decode(record)
    return phase["speculative"]["wasted_bytes"] / phase["bytes_read"] if phase["bytes_read"] else None


def _held(record: Record) -> float | None:
    memory = record["document"].get("memory")
    return float(memory["anon"] + memory["locked"]) if memory else None


def _budget(name: str) -> Of:
    def figure(record: Record) -> float | None:
        value = (record["document"].get("budget") or {}).get(name)
        return None if value is None else float(value)

    return figure


def _prefill(record: Record) -> float | None:
    rate: float | None = record["document"]["prefill"]["tok_per_s"]
    return rate


def _prefill_read(record: Record) -> float | None:
    phase = record["document"]["prefill"]
    read: int = phase["bytes_read"]
    if not read and not bench_figures.counts_reads(record):
        return None
    return (read or phase["read_bytes_os"]) / phase["tokens"] if phase["tokens"] else None


def _of_floor(record: Record) -> float | None:
    """Filled in by ``with_floor``, which knows the other arms."""
    share: float | None = record.get("of_floor")
    return share


def with_floor(records: list[Record]) -> list[Record]:
    """The records, each with ``of_floor``: the least time a token can take (its compute, as the ``resident`` arm of the
    same prompt and round had it, or its missed bytes at the disk's rate), over the time it took."""
    ceilings = {
        (r["prompt"], r.get("round")): 1 / rate
        for r in records
        if usable(r) and r["document"]["mechanism"]["effective"].startswith("resident")
        if (rate := statistics.rate(r))
    }
    made = []
    for record in records:
        share = None
        ceiling = ceilings.get((record["prompt"], record.get("round")))
        if usable(record) and ceiling is not None and record["disk_bytes_per_s"]:
            floor = bench_figures.floor_s(record, ceiling, record["disk_bytes_per_s"])
            rate = statistics.rate(record)
            share = floor * rate if floor is not None and rate is not None else None
        made.append({**record, "of_floor": share})
    return made


def usable(record: Record) -> bool:
    """May the record be counted: its run ended, nothing killed it, and nobody marked it invalid."""
    return bool(record.get("valid", not record.get("oom_kills"))) and record.get("document") is not None


_RUNS = {
    "tok_per_s": Figure(
        "tokens a second of decoding, the first steps left out", "runs", "/s", True, statistics.rate
    ),
    "hit_rate": Figure("routed experts found in memory", "runs", "share", False, bench_figures.hit_rate),
    "bytes_per_token": Figure(
        "read from the device a token, as the bench has it", "runs", "B", False, bench_figures.bytes_per_token
    ),
    "asked_per_token": Figure(
        "bytes the engine asked for a token, cached or not", "runs", "B", False, bench_figures.asked_per_token
    ),
    "routed_per_token": Figure("bytes a token routes to, by the model's header", "runs", "B", False, _demand),
    "asked_over_demand": Figure(
        "bytes the engine asked for, over those a token routes to",
        "runs",
        "share",
        False,
        _over_demand(_decode("bytes_read")),
    ),
    "asked_bytes_per_s": Figure("bytes the engine asked for a second", "runs", "B/s", True, _asked_per_s),
    "physical_over_demand": Figure(
        "read from the device, over what a token routes to",
        "runs",
        "share",
        False,
        _over_demand(_from_device),
    ),
    "physical_over_asked": Figure(
        "read from the device, over what was asked for", "runs", "share", False, _physical_over_asked
    ),
    "found_in_page_cache": Figure(
        "routed bytes that were in the page cache when asked", "runs", "share", False, _found_in_page_cache
    ),
    "majflt_per_token": Figure("major faults a token", "runs", "n", False, _decode("majflt")),
    "majflt_per_gb": Figure("major faults a GB that tokens route to", "runs", "n", False, _faults_per_gb),
    "minflt_per_token": Figure("minor faults a token", "runs", "n", False, _decode("minflt")),
    "stall_share": Figure("time a matmul waited for bytes", "runs", "share", True, _share_of_time("stall_s")),
    "compute_share": Figure("time of everything else", "runs", "share", True, _share_of_time("compute_s")),
    "memory_share": Figure(
        "time of moving pages, asking and copying", "runs", "share", True, _share_of_time("memory_work_s")
    ),
    "compute_s_per_token": Figure("compute a token", "runs", "s", True, _decode("compute_s")),
    "cpu_s_per_token": Figure("CPU a token", "runs", "s", True, bench_figures.cpu_per_token),
    "memory_work_s_per_gb": Figure(
        "memory work a GB read", "runs", "s", True, bench_figures.memory_work_per_gb
    ),
    "of_floor": Figure("share of the floor reached", "runs", "share", True, _of_floor),
    "wrong_share": Figure("experts read early that were not wanted", "runs", "share", False, _wrong),
    "wasted_share": Figure("bytes read early for nothing, of all read", "runs", "share", False, _wasted),
    "idle_bytes": Figure("memory held between tokens, the file's pages aside", "runs", "B", False, _held),
    "expert_bytes": Figure("memory left for experts", "runs", "B", False, _budget("expert_bytes")),
    "kv_bytes": Figure("the KV cache", "runs", "B", False, _budget("kv_bytes")),
    "prefill_tok_per_s": Figure("tokens of the prompt a second", "runs", "/s", True, _prefill),
    "prefill_bytes_per_token": Figure("read a token of the prompt", "runs", "B", False, _prefill_read),
}
_TRACE = {
    "needed_80_share": Figure("experts of a layer that take 80 % of its activations", "trace", "share"),
    "distinct_in_64_share": Figure("experts of a layer used in 64 tokens in a row", "trace", "share"),
    "overlap_1": Figure("of a token's experts, those of the token before", "trace", "share"),
    "overlap_8": Figure("of a token's experts, those of the token 8 before", "trace", "share"),
    "overlap_1_over_shuffled": Figure(
        "overlap with the token before, over that of shuffled tokens", "trace", "n"
    ),
    "overlap_8_over_1": Figure("overlap at distance 8, over that at 1", "trace", "n"),
}
_REPLAY = {
    "replayed_hit_rate": Figure("routed experts found in memory", "replay", "share"),
    "replayed_gain": Figure("of the way from lru to belady", "replay", "share"),
}
_PROBE = {
    "bytes_per_s": Figure("read a second", "probe", "B/s", True),
    "cpu_s_per_gb": Figure("CPU a GB read", "probe", "s", True),
    "device_ops_per_read": Figure("device operations a read", "probe", "n"),
    "device_op_bytes": Figure("bytes of a device operation", "probe", "B"),
    "amplification": Figure("read from the device for each byte asked for", "probe", "share"),
}
FIGURES: dict[str, Figure] = {**_RUNS, **_TRACE, **_REPLAY, **_PROBE}
