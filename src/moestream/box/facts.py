"""What this machine, or the container around this process, is and has."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box.cgroup import Mount, cpu_quota, groups, read_mounts, whole_cpus

#: Where a machine's id is kept, first come first read.
_MACHINE_IDS = ("etc/machine-id", "var/lib/dbus/machine-id")
#: Of /proc/cpuinfo: what processors call themselves, by architecture.
_CPU_NAMES = ("model name", "Model", "cpu model", "cpu", "Hardware", "uarch")


@dataclass(frozen=True)
class Limit:
    """A bound on this process's memory and who sets it: ``MemTotal`` or a cgroup's file."""

    bytes: int
    source: str


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
                limits.append(Limit(value, f"/{(group.path / name).relative_to(self.root)}"))
        return min(
            (limit for limit in limits if limit.bytes > 0), key=lambda limit: limit.bytes, default=limits[0]
        )

    def available_memory(self) -> int:
        """Bytes this process can still take: of the machine's available memory and of each cgroup's limit
        less what it holds. File cache is not held: the kernel gives it up."""
        rooms = [self._meminfo().get("MemAvailable", 0)]
        for group in groups(self.root, "memory"):
            limits = group.memory_limits().values()
            if limits:
                rooms.append(max(0, min(limits) - group.memory_held()))
        return min(rooms)

    def stalled_percent(self) -> float:
        """The share of the last ten seconds in which some task waited for memory (PSI), of the machine or of this
        process's cgroups, whichever is more; 0 where the kernel does not say."""
        texts = [self._text("proc/pressure/memory")]
        texts += [self._text(str((group.path / "memory.pressure").relative_to(self.root)))
                  for group in groups(self.root, "memory") if group.version == 2]  # fmt: skip
        return max(map(_some_avg10, texts), default=0.0)

    def cpus(self) -> int:
        """CPUs this process may use: its affinity, cut by a cgroup's quota."""
        return whole_cpus(self._affinity(), cpu_quota(self.root))

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
        """What this process may lock; None without a limit."""
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        for line in self._text("proc/self/limits").splitlines():
            if line.startswith("Max locked memory"):
                word = line.split()[3]
                return int(word) if word.isdigit() else None
        return None if soft == resource.RLIM_INFINITY else soft

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

    def _text(self, name: str) -> str:
        """A file below the root without its last newline; '' when it cannot be read."""
        try:
            return (self.root / name).read_text().strip()
        except OSError:
            return ""

    def _meminfo(self) -> dict[str, int]:
        fields = (line.split() for line in self._text("proc/meminfo").splitlines())
        return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields if len(field) == 3}

    def _affinity(self) -> int:
        for line in self._text("proc/self/status").splitlines():
            if line.startswith("Cpus_allowed_list:"):
                ranges = (part.partition("-") for part in line.split()[1].split(","))
                return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
        return os.cpu_count() or 1


def _some_avg10(pressure: str) -> float:
    """Of a PSI file: percent of the last ten seconds on its line ``some``; 0 for a text that has none."""
    found = re.search(r"^some avg10=([0-9.]+)", pressure, re.MULTILINE)
    return float(found[1]) if found else 0.0
