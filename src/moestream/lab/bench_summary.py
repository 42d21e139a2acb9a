"""What a benchmark found, as one document: figures of each arm beside their ceilings, comparisons, doubts.

Rates and percentiles are of the steps after the warm-up (``statistics.warm_up``); sums a token (bytes, faults, CPU
seconds, the split of time) are of all steps of decoding, because that is how they were counted. Only valid runs count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moestream.lab import bench_figures as figures
from moestream.lab import statistics
from moestream.lab.bench_arms import STOCK
from moestream.lab.bench_doubts import Doubt, Typed, doubts
from moestream.lab.statistics import Comparison, Interval
from moestream.lab.validity import Record, check_one_box, judge_all

SCHEMA = 1


@dataclass(frozen=True)
class Ceilings:
    """What the box cannot exceed. ``compute_s``: a token's seconds with everything in memory, and where that is from;
    ``compute_cpu_s``: its CPU seconds; ``disk_bytes_per_s``: the best rate that was measured before a run."""

    compute_s: float | None
    compute_from: str
    compute_cpu_s: float | None
    disk_bytes_per_s: float | None


def summarise(
    setup: Mapping[str, Any], records: Sequence[Record], probe_compute_s: float | None = None
) -> dict[str, Any]:
    """The summary of a benchmark's records. ``setup``: its setup.json; ``probe_compute_s``: a token's seconds as a
    probe measured them, for a model that does not fit into memory. Raises RefusedError for records of two boxes."""
    check_one_box(records)
    judged = judge_all(records)
    valid = [record for record in judged if record["valid"]]
    by_arm = {arm["key"]: [r for r in valid if r["arm"] == arm["key"]] for arm in setup["arms"]}
    noise = statistics.noise_floor(by_arm.get(setup["sentinel"], []))
    ceilings = _ceilings(by_arm.get("resident", []), valid, probe_compute_s)
    arms = []
    previous: list[Record] = []
    for arm in setup["arms"]:
        mine = by_arm[arm["key"]]
        found = arm_summary(arm, mine, ceilings)
        found["excluded"] = sum(1 for r in judged if r["arm"] == arm["key"] and not r["valid"])
        if arm["key"] != STOCK:
            found["against_stock"] = _compared(mine, by_arm.get(STOCK, []), noise)
        if arm["key"] != setup["sentinel"]:
            found["against_sentinel"] = _compared(mine, by_arm.get(setup["sentinel"], []), noise)
        if setup.get("ladder") and arm["cap_bytes"] is not None:
            found["against_previous"] = _compared(mine, previous, noise)
            previous = mine or previous
        arms.append(found)
    return {
        "schema": SCHEMA,
        "setup": dict(setup),
        "box": next((r["box"] for r in valid if r.get("box")), setup.get("box")),
        "commit": next((r["commit"] for r in valid), None),
        "date": max((r["date"] for r in valid), default=None),
        "runs": len(records),
        "valid_runs": len(valid),
        "written_bytes": sum((r["document"] or {}).get("write_bytes_os") or 0 for r in records),
        "noise_floor": noise,
        "session_drift": statistics.session_drift(valid),
        "ceilings": asdict(ceilings),
        "arms": arms,
        "best": _best(arms),
        "doubts": _listed(doubts(setup, judged, noise, has_ceiling=ceilings.compute_s is not None)),
    }


def as_typed(summary: Mapping[str, Any], records: Sequence[Record], typed: Typed) -> dict[str, Any]:
    """The summary for whoever typed the benchmark: the commands of its doubts name things as they did."""
    has_ceiling = summary["ceilings"]["compute_s"] is not None
    judged, noise = judge_all(records), summary["noise_floor"]
    again = doubts(summary["setup"], judged, noise, has_ceiling=has_ceiling, typed=typed)
    return {**summary, "doubts": _listed(again)}


def _listed(found: Sequence[Doubt]) -> list[dict[str, Any]]:
    return [{**asdict(doubt), "kind": doubt.kind.value} for doubt in found]


def arm_summary(arm: Mapping[str, Any], records: Sequence[Record], ceilings: Ceilings) -> dict[str, Any]:
    """The figures of one arm's valid runs: medians over runs unless a name says otherwise, None for not known."""
    steps = [ms for record in records for ms in statistics.step_ms(record)]

    def of(figure: Callable[[Record], float | None]) -> float | None:
        return figures.median(figure(record) for record in records)

    def floor(record: Record) -> float | None:
        if ceilings.compute_s is None or ceilings.disk_bytes_per_s is None:
            return None
        return figures.floor_s(record, ceilings.compute_s, ceilings.disk_bytes_per_s)

    def floor_share(record: Record) -> float | None:
        least, rate = floor(record), statistics.rate(record)
        return least * rate if least is not None and rate is not None else None

    def cpu_per_gb(record: Record) -> float | None:
        if ceilings.compute_cpu_s is None or arm["key"] == "resident":
            return None
        return figures.cpu_beyond_compute_per_gb(record, ceilings.compute_cpu_s)

    rate = statistics.rate_of(records)
    return {
        "key": arm["key"],
        "asked": arm["asked"],
        "lever": arm.get("lever", ""),
        "effective": records[0]["document"]["mechanism"]["effective"] if records else None,
        "cap_bytes": arm["cap_bytes"],
        "runs": len(records),
        "tok_per_s": asdict(rate) if rate is not None else None,
        **{f"p{q}_ms": statistics.percentile(steps, q) if steps else None for q in (50, 95, 99)},
        "hit_rate": of(figures.hit_rate),
        "bytes_per_token": {
            "read": of(figures.bytes_per_token),
            "asked": of(figures.asked_per_token),
            "wasted": of(figures.wasted_per_token),
        },
        "read_source": ", ".join(sorted(filter(None, {figures.read_source(r) for r in records}))) or None,
        "written_bytes_run": of(lambda record: record["document"].get("write_bytes_os")),
        "device_bytes_run": of(lambda record: _condition(record, "device_read_bytes")),
        "stall_s": of(figures.split_per_token("stall_s")),
        "compute_s": of(figures.split_per_token("compute_s")),
        "memory_work_s": of(figures.split_per_token("memory_work_s")),
        "majflt": of(figures.per_token("majflt")),
        "minflt": of(figures.per_token("minflt")),
        "cpu_s_per_token": of(figures.cpu_per_token),
        "cpu_s_per_gb": of(cpu_per_gb),
        "peak_bytes": max(
            (held for r in records if (held := figures.held_bytes(r)) is not None), default=None
        ),
        "cage_peak_bytes": max((r["cage_peak_bytes"] for r in records if r["cage_peak_bytes"]), default=None),
        "energy_j_per_token": of(figures.energy_per_token),
        "floor_s": of(floor),
        "floor_share": of(floor_share),
    }


def _best(arms: Sequence[dict[str, Any]]) -> str | None:
    """The key of the arm under the cap to use: the fastest of those shown to be faster than the sentinel, else the
    sentinel itself, which is the default where that ran. None where neither has a valid run."""
    shown = [
        arm
        for arm in arms
        if arm["cap_bytes"] is not None and (arm.get("against_sentinel") or {}).get("verdict") == "faster"
    ]
    if shown:
        return str(max(shown, key=lambda arm: arm["against_sentinel"]["value"])["key"])
    return next((str(arm["key"]) for arm in arms if "against_sentinel" not in arm and arm["runs"]), None)


def _ceilings(resident: Sequence[Record], valid: Sequence[Record], probe_s: float | None) -> Ceilings:
    rates = [rate for record in resident if (rate := statistics.rate(record)) is not None]
    disks = [record["disk_bytes_per_s"] for record in valid if record["disk_bytes_per_s"]]
    middle = figures.median(rates)
    if middle is not None:
        probe_s, source = 1 / middle, "the arm with everything in memory"
    else:
        source = "moestream probe" if probe_s is not None else ""
    return Ceilings(
        compute_s=probe_s,
        compute_from=source,
        compute_cpu_s=figures.median(figures.cpu_per_token(record) for record in resident),
        disk_bytes_per_s=max(disks, default=None),
    )


def _compared(ours: Sequence[Record], theirs: Sequence[Record], noise: float | None) -> dict[str, Any] | None:
    found: Comparison | None = statistics.compare(ours, theirs, noise)
    if found is None:
        return None
    ratio: Interval = found.ratio
    return {**asdict(ratio), "verdict": found.verdict.value, "against": theirs[0]["arm"]}


def _condition(record: Record, name: str) -> float | None:
    value: float | None = (record.get("conditions") or {}).get(name)
    return value
