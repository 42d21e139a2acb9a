"""What this machine, or the container around this process, is and has."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box.cgroup import Mount, cpu_quota, groups, read_mounts
from moestream.box.limits import ProcessLimits, Rlimits
from moestream.units import format_bytes

#: Where a machine's id is kept, first come first read.
_MACHINE_IDS = ("etc/machine-id", "var/lib/dbus/machine-id")
#: Of /proc/cpuinfo: what processors call themselves, by architecture.
_CPU_NAMES = ("model name", "Model", "cpu model", "cpu", "Hardware", "uarch")


#: The source of a limit that is the machine's, not a cgroup's.
MACHINE = "MemAvailable"
#: As many ggml computes with.
MOST_THREADS = 512


@dataclass(frozen=True)
class Limit:
    """A bound on this process's memory and who sets it: a line of /proc/meminfo or a cgroup's file."""

    bytes: int
    source: str


@dataclass(frozen=True)
class Threads:
    """How many threads may run at once, and what allows no more; '' where each online CPU may be used."""

    count: int
    limited_by: str


class Box:
    """The facts of one machine, read when asked. ``root``: a directory that holds its ``proc`` and
    ``sys``."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)

    def ram_bytes(self) -> int:
        return self._meminfo().get("MemTotal", 0)

    def swap_bytes(self) -> int:
        return self._meminfo().get("SwapTotal", 0)

    def memory_limit(self) -> Limit:
        """The lowest bound: of the machine, and of this process's cgroup and all its ancestors."""
        limits = [Limit(self.ram_bytes(), "MemTotal")]
        for group in groups(self.root, "memory"):
            for name, value in group.memory_limits().items():
                limits.append(Limit(value, self._shown(group.path / name)))
        return min(
            (limit for limit in limits if limit.bytes > 0), key=lambda limit: limit.bytes, default=limits[0]
        )

    def room(self) -> Limit:
        """What this process can still take and who bounds it: the machine's available memory, or a cgroup's limit
        less what it holds. File cache is not held: the kernel gives it up."""
        rooms = [Limit(_available(self._meminfo()), MACHINE)]
        for group in groups(self.root, "memory"):
            limits = group.memory_limits()
            if limits:
                name = min(limits, key=lambda name: limits[name])
                left = max(0, limits[name] - group.memory_held())
                rooms.append(Limit(left, self._shown(group.path / name)))
        return min(rooms, key=lambda room: room.bytes)

    def available_memory(self) -> int:
        """Bytes this process can still take, whoever bounds it."""
        return self.room().bytes

    def stalled_percent(self) -> float:
        """The share of the last ten seconds in which some task waited for memory (PSI), in this process's cgroups or,
        unless one of them is what bounds it, on the machine: others' containers stall for their own limits. 0 where
        the kernel does not say."""
        texts = [self._text("proc/pressure/memory")] if self.room().source == MACHINE else []
        texts += [self._text(str((group.path / "memory.pressure").relative_to(self.root)))
                  for group in groups(self.root, "memory") if group.version == 2]  # fmt: skip
        return max(map(_some_avg10, texts), default=0.0)

    def cpus(self) -> int:
        """CPUs this process may use: its affinity, cut by a cgroup's quota."""
        return self.threads().count

    def compute_threads(self) -> int:
        """Threads to compute with where nobody names how many: one for each of ``cpus``, as far as ggml has them."""
        return min(self.cpus(), MOST_THREADS)

    def threads(self) -> Threads:
        """Threads that can run all the time: no more than this process's CPUs, nor than a cgroup's quota pays for.
        Threads wait for each other after each matmul: one that waits for its quota makes all of them wait."""
        affinity = self._affinity()
        # Where lxcfs tells of the CPUs, those of the container may be fewer than may be run on.
        online = _count(self._text("sys/devices/system/cpu/online") or f"0-{affinity - 1}")
        found = Threads(min(affinity, online), "")
        if affinity < online:
            found = Threads(affinity, f"affinity (taskset, a cpuset): {affinity} of {online} CPUs")
        quota = cpu_quota(self.root)
        if quota is not None and quota.cpus < found.count:
            count = max(1, int(quota.cpus))
            found = Threads(count, f"{self._shown(quota.path)}: {quota.cpus:.3g} CPUs' time")
        return found

    def numa_nodes(self) -> int:
        """Nodes that have memory of their own; 1 where the kernel tells of none."""
        nodes = self._text("sys/devices/system/node/has_memory")
        return _count(nodes) if nodes else 1

    def swaps(self) -> list[dict[str, Any]]:
        """Where this box swaps to: ``name``, ``kind`` (partition, file or zram), ``bytes`` and ``used_bytes`` each."""
        found = []
        for line in self._text("proc/swaps").splitlines()[1:]:
            fields = line.split()
            if len(fields) >= 4 and fields[2].isdecimal() and fields[3].isdecimal():
                name = fields[0].rsplit("/", 1)[-1]
                kind = "zram" if name.startswith("zram") else fields[1]
                size, used = int(fields[2]) * 1024, int(fields[3]) * 1024
                found.append({"name": name, "kind": kind, "bytes": size, "used_bytes": used})
        return found

    def zswap(self) -> bool:
        """Does the kernel pack pages in memory before it swaps them?"""
        return self._text("sys/module/zswap/parameters/enabled") in ("Y", "1")

    def may_swap(self) -> bool:
        """Can anonymous memory of this process be swapped? Not where nothing is swapped to, or a cgroup forbids it."""
        if not self.swaps():
            return False
        return not any(group.forbids_swap() for group in groups(self.root, "memory"))

    def cpu_model(self) -> str:
        """What the processors call themselves; of ARM's that do not, implementer and part; '' when nothing says."""
        lines = (line.partition(":") for line in self._text("proc/cpuinfo").splitlines())
        said: dict[str, str] = {}
        for name, _, value in lines:
            said.setdefault(name.strip(), value.strip())
        name = next((said[key] for key in _CPU_NAMES if said.get(key)), "")
        if name or "CPU part" not in said:
            return " ".join(name.split())
        return f"implementer {said.get('CPU implementer', 'unknown')} part {said['CPU part']}"

    def machine_id(self) -> str:
        """Tells this machine from others of its size, and nobody which it is: a hash of its id. '' without one."""
        own = next((text for name in _MACHINE_IDS if (text := self._text(name))), "")
        # Of moestream's own, so that no other program's hash of the id is the same.
        return hashlib.sha256(f"moestream {own}".encode()).hexdigest()[:12] if own else ""

    def kernel(self) -> str:
        return self._text("proc/sys/kernel/osrelease") or platform.release()

    def filesystem(self, path: str | Path) -> Mount | None:
        """The mount a file lies in: ``kind``, ``source`` and ``device`` (major:minor). None when not
        known."""
        real = Path(os.path.realpath(path))
        inside = [mount for mount in read_mounts(self.root) if real.is_relative_to(mount.point)]
        # Of mounts over the same place the last one is what a path reaches.
        return max(reversed(inside), key=lambda mount: len(mount.point), default=None)

    def read_ahead_kb(self, path: str | Path) -> int | None:
        """The read-ahead of the device a file lies on; None when the kernel does not say."""
        mount = self.filesystem(path)
        if mount is None:
            return None
        for name in (f"sys/class/bdi/{mount.device}", f"sys/dev/block/{mount.device}/queue"):
            text = self._text(f"{name}/read_ahead_kb")
            if text.isdigit():
                return int(text)
        return None

    def huge_pages(self) -> str:
        """``always``, ``madvise`` or ``never``; ``absent`` in a kernel without them."""
        words = self._text("sys/kernel/mm/transparent_hugepage/enabled").split()
        return next((word[1:-1] for word in words if word.startswith("[")), "absent")

    def memlock_limit_bytes(self) -> int | None:
        """What this process may lock, raising its own limit as far as it may; None without a limit."""
        lock = self._rlimits().lock()
        return None if lock is None else lock.limit

    def limits(self) -> ProcessLimits:
        """What bounds this process beside its memory, and what it uses of that now."""
        found = self._rlimits()
        return ProcessLimits(
            address=found.address(),
            data=found.data(),
            commit=found.commit(),
            lock=found.lock(),
            files=found.files(),
            mappings=self.max_map_count(),
            threads=self.cpus(),
            swap=self._swap_said() if self.may_swap() else "",
            numa_nodes=self.numa_nodes(),
        )

    def max_map_count(self) -> int:
        """Most mappings of one process (the kernel's own default when it does not say)."""
        text = self._text("proc/sys/vm/max_map_count")
        return int(text) if text.isdigit() else 65530

    def describe(self, path: str | Path) -> dict[str, Any]:
        """The facts a run is recorded with; ``path`` is the model's."""
        mount, limit = self.filesystem(path), self.memory_limit()
        return {
            "cpus": self.cpus(),
            "ram_bytes": self.ram_bytes(),
            "limit_bytes": limit.bytes,
            "limit_source": limit.source,
            "available_bytes": self.available_memory(),
            "swap_bytes": self.swap_bytes(),
            "numa_nodes": self.numa_nodes(),
            "kernel": self.kernel(),
            "machine": platform.machine(),
            "cpu_model": self.cpu_model(),
            "machine_id": self.machine_id(),
            "fs": mount.kind if mount else "",
            "device": mount.source if mount else "",
            "device_number": mount.device if mount else "",
            "read_ahead_kb": self.read_ahead_kb(path),
            "huge_pages": self.huge_pages(),
            "memlock_bytes": self.memlock_limit_bytes(),
            "max_map_count": self.max_map_count(),
        }

    def _rlimits(self) -> Rlimits:
        return Rlimits(self.root, self._text, self._meminfo())

    def _swap_said(self) -> str:
        said = [f"{format_bytes(swap['bytes'])} of {swap['kind']}" for swap in self.swaps()]
        return ", ".join(said) + (", packed by zswap" if self.zswap() else "")

    def _shown(self, path: Path) -> str:
        return f"/{path.relative_to(self.root)}"

    def _text(self, name: str) -> str:
        """A file below the root without its last newline; '' when it cannot be read."""
        try:
            return (self.root / name).read_text().strip()
        except OSError:
            return ""

    def _meminfo(self) -> dict[str, int]:
        fields = (line.split() for line in self._text("proc/meminfo").splitlines())
        found = {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[1].isdecimal()}
        if not found and self.root == Path("/"):  # no /proc: the C library asks the kernel by another way
            page = os.sysconf("SC_PAGE_SIZE")
            found = {
                name: max(0, os.sysconf(key)) * page
                for name, key in (("MemTotal", "SC_PHYS_PAGES"), ("MemFree", "SC_AVPHYS_PAGES"))
            }
        return found

    def _affinity(self) -> int:
        for line in self._text("proc/self/status").splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return _count(line.partition(":")[2])
        return len(os.sched_getaffinity(0))


def _count(ranges: str) -> int:
    """How many numbers a list such as ``0-3,8`` names, at least one."""
    parts = (part.partition("-") for part in ranges.strip().split(","))
    return max(1, sum(int(last or first) - int(first) + 1 for first, _, last in parts if first.isdecimal()))


def _available(meminfo: dict[str, int]) -> int:
    """MemAvailable; where it is missing (kernels before 3.14, some containers' own meminfo) what is free and what the
    page cache could give up."""
    if "MemAvailable" in meminfo:
        return meminfo["MemAvailable"]
    cache = meminfo.get("Cached", 0) - meminfo.get("Shmem", 0)
    return meminfo.get("MemFree", 0) + meminfo.get("Buffers", 0) + max(0, cache)


def _some_avg10(pressure: str) -> float:
    """Of a PSI file: percent of the last ten seconds on its line ``some``; 0 for a text that has none."""
    found = re.search(r"^some avg10=([0-9.]+)", pressure, re.MULTILINE)
    return float(found[1]) if found else 0.0
