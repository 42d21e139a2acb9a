"""What a process uses: its memory, what it read, its faults."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from moestream.errors import RefusedError


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes. ``file_bytes``: resident pages of mapped files; ``huge_bytes``: the part of ``anon_bytes`` in
    huge pages; ``peak_bytes``: the most ``rss_bytes`` has been."""

    rss_bytes: int
    anon_bytes: int
    file_bytes: int
    shared_bytes: int
    locked_bytes: int
    huge_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Faults:
    """Page faults since the process began. ``major`` ones waited for the disk."""

    major: int
    minor: int


def process_memory(pid: int | None = None, root: str | Path = "/") -> ProcessMemory:
    """Memory of a process (None: this one). Anonymous and huge bytes come from ``smaps_rollup``, which counts
    pages; ``status`` keeps running sums that lag by some pages a thread, and is used where the rollup is not
    readable. Raises ProcessLookupError when there is no such process, RefusedError where not even this one is
    told of."""
    directory = _directory(pid, root)
    status = _kilobytes(directory / "status")
    if not status and pid is None:
        raise RefusedError(
            f"{directory}/status cannot be read, so what this process uses cannot be known: mount /proc"
        )
    if not status:
        raise ProcessLookupError(f"no process {pid}")
    exact = _kilobytes(directory / "smaps_rollup")
    return ProcessMemory(
        rss_bytes=exact.get("Rss", status.get("VmRSS", 0)),
        anon_bytes=exact.get("Anonymous", status.get("RssAnon", 0)),
        file_bytes=status.get("RssFile", 0),
        shared_bytes=status.get("RssShmem", 0),
        locked_bytes=status.get("VmLck", 0),
        huge_bytes=exact.get("AnonHugePages", 0),
        peak_bytes=status.get("VmHWM", 0),
    )


def process_io(pid: int | None = None, root: str | Path = "/") -> dict[str, int]:
    """The kernel's account of a process's input and output (``read_bytes``: from the device); {} where it
    keeps none."""
    try:
        lines = (_directory(pid, root) / "io").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines)
    return {key: int(value) for key, value in pairs}


def faults() -> Faults:
    """This process's faults, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Faults(usage.ru_majflt, usage.ru_minflt)


def peak_rss_bytes() -> int:
    """The most this process has had resident. Not ``ru_maxrss``: that one survives exec, so it can be a
    parent's."""
    return process_memory().peak_bytes


def _directory(pid: int | None, root: str | Path) -> Path:
    return Path(root) / "proc" / ("self" if pid is None else str(pid))


def _kilobytes(path: Path) -> dict[str, int]:
    """The ``Name: N kB`` lines of a file, in bytes; {} when it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[2] == "kB"}
