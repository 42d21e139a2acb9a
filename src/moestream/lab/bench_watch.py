"""What else happened on the machine while a run ran: swapping, throttling, other load, the device's bytes, energy.

Two snapshots of the kernel's counters and their difference. The counters are the machine's, not the process's: that is
the point. What a kernel does not count is None.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box.accounts import device_counter
from moestream.box.cgroup import groups

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment. ``busy_s`` and ``stolen_s``: CPU seconds of all CPUs since boot; ``own_s``: of this
    process and its ended children; ``energy_uj``: one counter a processor package, with the value it wraps at."""

    at_s: float
    cpus: int
    busy_s: float
    stolen_s: float
    own_s: float
    swapped_bytes: int | None
    throttled: int | None
    device_read_bytes: int | None
    energy_uj: tuple[tuple[int, int], ...]


def snapshot(device: str = "", root: str | Path = "/") -> Snapshot:
    """The counters now. ``device``: major:minor of the block device to watch; ``root``: holds ``proc`` and ``sys``."""
    root = Path(root)
    cpus, busy, stolen = _cpu(root)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Snapshot(
        at_s=time.monotonic(),
        cpus=cpus,
        busy_s=busy,
        stolen_s=stolen,
        own_s=sum(one.ru_utime + one.ru_stime for one in usage),
        swapped_bytes=_swapped(root),
        throttled=_throttled(root),
        device_read_bytes=device_counter(device, root),
        energy_uj=_energy(root),
    )


def between(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """The conditions of a run, as a record holds them; shares are of all CPUs' time."""
    available = max((after.at_s - before.at_s) * max(after.cpus, 1), 1e-9)
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return {
        "swapped_bytes": _difference(before.swapped_bytes, after.swapped_bytes),
        "throttled": _difference(before.throttled, after.throttled),
        "device_read_bytes": _difference(before.device_read_bytes, after.device_read_bytes),
        "other_cpu_share": round(min(1.0, max(0.0, others / available)), 4) if after.cpus else None,
        "stolen_share": round(min(1.0, max(0.0, (after.stolen_s - before.stolen_s) / available)), 4)
        if after.cpus
        else None,
        "energy_j": _joules(before.energy_uj, after.energy_uj),
    }


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def _joules(before: tuple[tuple[int, int], ...], after: tuple[tuple[int, int], ...]) -> float | None:
    """A counter that is lower than before has wrapped once: packages take minutes to hours for that."""
    if not after or len(before) != len(after):
        return None
    pairs = zip(before, after, strict=True)
    used = sum((end - start) if end >= start else end + most - start for (start, most), (end, _) in pairs)
    return used / 1e6


def _cpu(root: Path) -> tuple[int, float, float]:
    """CPUs, and the seconds they were busy and were taken by the hypervisor; zeros when not known."""
    lines = _text(root / "proc/stat").splitlines()
    cpus = sum(1 for line in lines if line.startswith("cpu") and not line.startswith("cpu "))
    total = next((line.split()[1:] for line in lines if line.startswith("cpu ")), [])
    ticks = [int(word) for word in total] + [0] * (8 - len(total))
    user, nice, system, _idle, _iowait, irq, softirq, stolen = ticks[:8]
    return cpus, (user + nice + system + irq + softirq) * _TICK_S, stolen * _TICK_S


def _swapped(root: Path) -> int | None:
    """Bytes swapped in and out since boot."""
    table = dict(line.split() for line in _text(root / "proc/vmstat").splitlines() if line.count(" ") == 1)
    if "pswpin" not in table or "pswpout" not in table:
        return None
    return (int(table["pswpin"]) + int(table["pswpout"])) * _PAGE


def _throttled(root: Path) -> int | None:
    """How often a processor was slowed for heat, or this process's cgroup for its CPU quota."""
    counts = [
        int(text)
        for path in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle"))
        for name in ("core_throttle_count", "package_throttle_count")
        if (text := _text(path / name)).isdigit()
    ]
    for group in groups(root, "cpu"):
        throttled = group.table("cpu.stat").get("nr_throttled")
        counts += [throttled] if throttled is not None else []
    return sum(counts) if counts else None


def _energy(root: Path) -> tuple[tuple[int, int], ...]:
    """Each package's energy counter in microjoules and where it wraps; () where RAPL cannot be read."""
    found = []
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        used, most = _text(zone / "energy_uj"), _text(zone / "max_energy_range_uj")
        # A package is intel-rapl:0; intel-rapl:0:1 is a part of it.
        if zone.name.count(":") == 1 and used.isdigit() and most.isdigit():
            found.append((int(used), int(most)))
    return tuple(found)


def _text(path: Path) -> str:
    """A file without its last newline; '' when it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
