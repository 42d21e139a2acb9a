"""A whole probe: every part in its turn, within its time, into one document."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from moestream.box import Box, hindrance
from moestream.box.abilities import huge, io_uring
from moestream.model import Model
from moestream.probe import compute, disk
from moestream.probe.counters import physical_counters
from moestream.probe.device import Device, find_device, layout
from moestream.probe.memory import copy_rates, memory_facts
from moestream.probe.sample import Sample, directory_sample, model_sample
from moestream.probe.saved import SCHEMA, identity
from moestream.version import __version__

#: Of a whole probe but its start and end, in seconds; a part that comes late gets what is left. The second: ``quick``.
TOTAL_S, QUICK_S = 165.0, 16.5
#: More than this of the processors taken by others before the probe began, by the load average.
BUSY = 0.5
#: What a part gets, however late it is.
_LEAST_S = 4.0
#: A rate that moved by more than this between the rounds is not one to plan with.
DRIFT = 0.5

#: ``progress(share)``: how much of the whole is done, 0 to 1.
Progress = Callable[[float], None]
#: Where each part begins and ends, as shares of the whole.
_PARTS = {"file": (0.0, 0.08), "disk": (0.08, 0.6), "memory": (0.6, 0.65), "compute": (0.65, 1.0)}


def run_probe(
    model: Model | None, directory: Path | None, *, quick: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure this box with a model's file, or with one made in ``directory`` and removed. One of the two is None.
    The document is described in docs/formats/probe.md. Raises RefusedError, ReadError."""
    started = time.monotonic()
    end = started + (QUICK_S if quick else TOTAL_S)

    def left(seconds: float) -> float:
        return max(_LEAST_S, min(seconds, end - time.monotonic()))

    with _sample(model, directory, _part(progress, "file")) as sample:
        place = model.paths[0] if model is not None else directory
        assert place is not None
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "moestream": __version__,
            "measured_at": time.time(),
            "quick": quick,
            "disk_bytes_per_s": None,
            "compute_s_per_token": None,
            "identity": identity(place, model),
            "box": Box().describe(place),
            "load_average": os.getloadavg()[0],
            "model": _model(model),
        }
        device = find_device(place)
        document["counters"] = physical_counters(sample, device)
        disk_scope = disk.QUICK if quick else disk.FULL
        disk_scope = replace(disk_scope, seconds=left(disk_scope.seconds))
        document["disk"] = _disk(sample, place, device, disk_scope, _part(progress, "disk"))
    document["memory"] = _memory(quick)
    if model is not None:
        scope = compute.QUICK if quick else compute.FULL
        scope = replace(scope, seconds=left(scope.seconds))
        document["compute"] = _compute(model, scope, _part(progress, "compute"))
    else:
        document["compute"] = {"best": None, "reason": "without a model there is nothing to compute"}
    document["disk_bytes_per_s"] = document["disk"]["random_bytes_per_s"]
    best = document["compute"]["best"]
    document["compute_s_per_token"] = best["s_per_token"] if best is not None else None
    document["doubts"] = doubts(document)
    document["seconds"] = time.monotonic() - started
    return document


@contextlib.contextmanager
def _sample(
    model: Model | None, directory: Path | None, progress: Callable[[int, int], None]
) -> Iterator[Sample]:
    if model is not None:
        yield model_sample(model)
    else:
        assert directory is not None
        with directory_sample(directory, progress=progress) as sample:
            yield sample


def _disk(
    sample: Sample,
    place: Path,
    device: Device | None,
    scope: disk.Scope,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    refused = io_uring()
    measurer = disk.Disk(sample, scope, device, uring=not refused, huge_pages=not huge())
    found = disk.tables(measurer.measure(progress), sample)
    if refused:
        found["not_measured"]["random/uring"] = refused
    whole = [made for path in sample.files if (made := layout(path)) is not None]
    return {
        **found,
        "layout": whole or None,
        "read_ahead_kb": Box().read_ahead_kb(place),
        "device": device.describe() if device is not None else None,
    }


def _memory(quick: bool) -> dict[str, Any]:
    cpus = Box().cpus()
    counts = (cpus,) if quick else tuple(sorted(compute.doublings(cpus)))
    return {**memory_facts(), "copy_bytes_per_s": copy_rates(counts, 0.05 if quick else 0.15)}


def _compute(
    model: Model, scope: compute.ComputeScope, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    if not model.is_moe:
        return {"best": None, "reason": "a dense model has no experts to hold in memory"}
    return compute.measure_compute(model, scope, progress=progress)


def _model(model: Model | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return {
        "name": model.name or model.arch,
        "arch": model.arch,
        "identity": model.identity,
        "bytes": model.bytes,
        "shards": len(model.shards),
        "demand_bytes_per_token": model.demand_bytes_per_token,
    }


def doubts(document: dict[str, Any]) -> list[str]:
    """What speaks against taking the figures at their word, each with what would help."""
    found = []
    measured, box = document["disk"], document["box"]
    hindered = hindrance(box["fs"], box["kernel"])
    if hindered:
        found.append(f"the file lies on {hindered}")
    if not measured["direct"]:
        found.append(
            f"{measured.get('direct_refusal') or 'O_DIRECT is refused'}: cold reads went through the page cache; put "
            "the model, not compressed, on ext4, xfs or btrfs and probe again"
        )
    if not measured["cold_checked"]:
        found.append(
            "the file is another user's: the kernel does not say whether it was cold; own it, or copy it"
        )
    if measured["random_bytes_per_s"] is None and measured["not_measured"]:
        reason = next(iter(measured["not_measured"].values()))
        found.append(f"no cold read could be measured, so the disk's rate is not known: {reason}")
    top = measured.get("knee", {}).get("uring") or measured.get("knee", {}).get("threads")
    rates = measured.get("random", {})
    name = "uring" if measured.get("knee", {}).get("uring") else "threads"
    at = rates.get(f"{name}:{top['at']}") if top else None
    if at is not None and at["bytes_per_s"]["spread"] > DRIFT:
        found.append(
            f"random reads moved by {at['bytes_per_s']['spread']:.0%} between rounds: something else uses the disk; "
            "probe again when it is quiet"
        )
    load, cpus = document["load_average"], box["cpus"]
    if load > BUSY * cpus:
        found.append(
            f"other processes kept the box busy (load {load:.1f} on {cpus} CPUs): it can do more than this; "
            "probe again when they are done"
        )
    best = document["compute"].get("best")
    if best is not None:
        times = document["compute"]["by_threads"][str(best["threads"])]["s_per_token"]
        if times["spread"] > 2 * DRIFT:
            found.append(
                f"a token's time moved by {times['spread']:.0%}: something else uses the processors; probe again"
            )
    return found


def _part(progress: Progress | None, name: str) -> Callable[[int, int], None]:
    begin, end = _PARTS[name]

    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(begin + (end - begin) * done / max(1, total))

    return tell
