"""What bounds this process beside its memory: address space, data, locks, files, mappings, what may be committed."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CAP_IPC_LOCK = 14
#: uid_map of a process that is in no user namespace of its own: its capabilities are the machine's.
_ALL_USERS = ("0", "0", str(2**32 - 1))
#: Lines of /proc/self/limits, and what the C library calls them.
_RLIMITS = {
    "Max address space": resource.RLIMIT_AS,
    "Max data size": resource.RLIMIT_DATA,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max open files": resource.RLIMIT_NOFILE,
}


@dataclass(frozen=True)
class Bound:
    """A limit and what counts against it now, in bytes, or in numbers of files."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class ProcessLimits:
    """None where nothing bounds it. ``data``: private writable memory, touched or not. ``commit``: the same of the
    whole machine, where the kernel promises no more than it has (vm.overcommit_memory 2). ``lock`` and ``files`` are
    hard limits, to which a process may raise its own. ``swap``: what anonymous pages can be swapped to, '' where
    they cannot."""

    address: Bound | None = None
    data: Bound | None = None
    commit: Bound | None = None
    lock: Bound | None = None
    files: Bound | None = None
    mappings: int = 65530
    threads: int = 1
    swap: str = ""
    numa_nodes: int = 1


class Rlimits:
    """This process's resource limits and what it uses of them, read once. ``text`` reads a file below the root."""

    def __init__(self, root: Path, text: Callable[[str], str], meminfo: dict[str, int]) -> None:
        self._root, self._text, self._meminfo = root, text, meminfo
        lines = (line.partition(":") for line in text("proc/self/status").splitlines())
        self._status = {name: value.split() for name, _, value in lines}
        self._limits = text("proc/self/limits").splitlines()

    def address(self) -> Bound | None:
        return self._bound("Max address space", self._kilobytes("VmSize"))

    def data(self) -> Bound | None:
        return self._bound("Max data size", self._kilobytes("VmData"))

    def files(self) -> Bound | None:
        return self._bound("Max open files", _opened(self._root), hard=True)

    def lock(self) -> Bound | None:
        """None also for who may lock whatever there is (CAP_IPC_LOCK, which counts outside of user namespaces only)."""
        held = int(self._status.get("CapEff", ["0"])[0], 16) >> _CAP_IPC_LOCK & 1
        users = tuple(self._text("proc/self/uid_map").split())
        if held and users in ((), _ALL_USERS):
            return None
        return self._bound("Max locked memory", self._kilobytes("VmLck"), hard=True)

    def commit(self) -> Bound | None:
        if self._text("proc/sys/vm/overcommit_memory") != "2" or "CommitLimit" not in self._meminfo:
            return None
        return Bound(self._meminfo["CommitLimit"], self._meminfo.get("Committed_AS", 0))

    def _kilobytes(self, name: str) -> int:
        return int(self._status.get(name, ["0"])[0]) * 1024

    def _bound(self, name: str, used: int, hard: bool = False) -> Bound | None:
        for line in self._limits:
            if line.startswith(name):
                word = line[len(name) :].split()[hard]
                return Bound(int(word), used) if word.isdecimal() else None
        if self._root != Path("/"):
            return None
        limit = resource.getrlimit(_RLIMITS[name])[hard]
        return None if limit == resource.RLIM_INFINITY else Bound(limit, used)


def allow_files(count: int) -> None:
    """Let this process open ``count`` files more, as far as its hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _opened(Path("/")) + count
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _opened(root: Path) -> int:
    """Files this process has open; 0 where nothing says so."""
    try:
        return len(list((root / "proc/self/fd").iterdir()))
    except OSError:
        return 0
