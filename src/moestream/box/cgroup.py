"""Where this process is in the cgroup tree, and what the memory and CPU controllers there say.

Version 1 and 2 are read alike; every path starts at a root, so that a directory can stand for a machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: Version 1 writes "no limit" as the largest multiple of a page a signed 64-bit number holds.
_UNLIMITED_V1 = 1 << 62
#: Of version 2's memory.stat: kernel memory that is not given up.
_KERNEL_HELD = ("slab_unreclaimable", "kernel_stack", "pagetables", "sec_pagetables", "percpu", "sock")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. ``root``: the directory of the file system that is mounted here."""

    device: str
    root: str
    point: str
    kind: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class CpuQuota:
    """So many CPUs' worth of time a period, and the file that says so."""

    cpus: float
    path: Path


@dataclass(frozen=True)
class Group:
    """One cgroup directory of one controller. ``version`` is 1 or 2."""

    version: int
    path: Path

    def number(self, name: str) -> int | None:
        """A file's number; None when it is absent, not a number, or says there is no limit."""
        try:
            text = (self.path / name).read_text().split()
        except OSError:
            return None
        if not text or not text[0].lstrip("-").isdigit():
            return None
        value = int(text[0])
        return value if 0 <= value < _UNLIMITED_V1 else None

    def table(self, name: str) -> dict[str, int]:
        """A file of ``key number`` lines; {} when it is absent."""
        try:
            lines = (self.path / name).read_text().splitlines()
        except OSError:
            return {}
        pairs = (line.split() for line in lines)
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}

    def memory_limits(self) -> dict[str, int]:
        """The limits set here, by the name of their file."""
        if self.version == 2:
            names = ("memory.max", "memory.high")
            found = {name: self.number(name) for name in names}
        else:
            found = {"memory.limit_in_bytes": self.number("memory.limit_in_bytes")}
            whole = self.table("memory.stat").get("hierarchical_memory_limit")
            if whole is not None and whole < _UNLIMITED_V1:
                found["hierarchical_memory_limit"] = whole
        return {name: value for name, value in found.items() if value is not None}

    def memory_held(self) -> int:
        """Bytes charged here that the kernel cannot drop: anonymous, shared and locked memory, and kernel memory that
        is no cache. File cache is not counted. Version 1 does not tell its kernel memory from caches of it, which is
        therefore left out."""
        stat = self.table("memory.stat")
        total = "total_" if self.version == 1 else ""
        # By the kernel's lists, each page is on one; by kinds, what is locked is counted twice.
        names: tuple[str, ...] = ("inactive_anon", "active_anon", "unevictable")
        if not any(total + name in stat for name in names[:2]):
            names = ("rss" if self.version == 1 else "anon", "shmem", "unevictable")
        held = sum(stat.get(total + name, 0) for name in names)
        return held if self.version == 1 else held + sum(stat.get(name, 0) for name in _KERNEL_HELD)

    def forbids_swap(self) -> bool:
        """May nothing that is charged here be swapped?"""
        if self.version == 2:
            return self.number("memory.swap.max") == 0
        both, memory = self.number("memory.memsw.limit_in_bytes"), self.number("memory.limit_in_bytes")
        return self.number("memory.swappiness") == 0 or (both is not None and both == memory)

    def cpu_quota(self) -> CpuQuota | None:
        """CPUs' worth of time a period, None without a limit."""
        if self.version == 2:
            try:
                words = (self.path / "cpu.max").read_text().split()
            except OSError:
                return None
            wanted, length = (int(word) if word.isdecimal() else 0 for word in (*words, "", "")[:2])
            name = "cpu.max"
        else:
            name = "cpu.cfs_quota_us"
            wanted, length = self.number(name) or 0, self.number("cpu.cfs_period_us") or 0
        return CpuQuota(wanted / length, self.path / name) if wanted and length else None


def read_mounts(root: Path) -> list[Mount]:
    """The mounts this process sees, in the order they were made; [] without /proc."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if not separator or len(fields) < 6 or len(rest) < 2:
            continue
        options = (*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else ()))
        mounts.append(
            Mount(fields[2], _plain(fields[3]), _plain(fields[4]), rest[0], _plain(rest[1]), options)
        )
    return mounts


def _plain(field: str) -> str:
    """A path without mountinfo's octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def groups(root: Path, controller: str) -> list[Group]:
    """This process's cgroup and its ancestors, as far as they are visible, own first; version 1 before 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mounts = read_mounts(root)
    found: list[Group] = []
    for line in lines:
        number, names, own = (*line.split(":", 2), "", "")[:3]
        if controller in names.split(","):
            mount = next((m for m in mounts if m.kind == "cgroup" and controller in m.options), None)
            found[:0] = _chain(root, mount, own, 1)
        elif number == "0":
            mount = next((m for m in mounts if m.kind == "cgroup2"), None)
            found += _chain(root, mount, own, 2)
    return found


def _chain(root: Path, mount: Mount | None, own: str, version: int) -> list[Group]:
    if mount is None:
        return []
    top = root / mount.point.lstrip("/")
    # In a container the own path is the host's, and the mount may show only the part below some directory.
    base = mount.root.rstrip("/")
    inside = own[len(base) :] if own == base or own.startswith(base + "/") else ""
    parts = [part for part in inside.split("/") if part not in ("", "..")]
    chain = [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [Group(version, path) for path in chain if path.is_dir()]


def cpu_quota(root: Path) -> CpuQuota | None:
    """The smallest quota of this process's cgroups."""
    quotas = [quota for group in groups(root, "cpu") if (quota := group.cpu_quota()) is not None]
    return min(quotas, key=lambda quota: quota.cpus, default=None)
