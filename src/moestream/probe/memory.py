"""The memory's side of a probe: its limit and who sets it, what swaps, what may be locked, and how fast it copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moestream.box import Box
from moestream.box.cgroup import groups
from moestream.core import _core
from moestream.probe.schedule import spread

_COPIED = 128 << 20
_ROUNDS = 3


def memory_facts(root: str | Path = "/") -> dict[str, Any]:
    """Bytes throughout. ``cgroup``: 1 or 2, the version that limits this process, None without a memory controller;
    ``lock_bytes``: None without a limit; ``swaps``: each with ``kind`` (partition, file or zram)."""
    box = Box(root)
    limit = box.memory_limit()
    version = next((group.version for group in groups(Path(root), "memory")), None)
    return {
        "ram_bytes": box.ram_bytes(),
        "limit_bytes": limit.bytes,
        "limit_source": limit.source,
        "cgroup": version,
        "available_bytes": box.available_memory(),
        "swap_bytes": box.swap_bytes(),
        "swaps": box.swaps(),
        "zswap": box.zswap(),
        "lock_bytes": box.memlock_limit_bytes(),
        "huge_pages": box.huge_pages(),
        "max_map_count": box.max_map_count(),
    }


def copy_rates(threads: tuple[int, ...], seconds: float) -> dict[str, Any]:
    """Bytes copied a second within memory, by threads, as ``spread`` has it; in rounds, each taking turns."""
    rates: dict[int, list[float]] = {count: [] for count in threads}
    room = min(_COPIED, max(8 << 20, Box().available_memory() // 8))
    for number in range(_ROUNDS):
        for count in threads[:: -1 if number % 2 else 1]:
            timing = _core.probe_copies(count, room, seconds)
            rates[count].append(timing["bytes"] / timing["seconds"])
    return {str(count): spread(values) for count, values in rates.items()}
