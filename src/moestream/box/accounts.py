"""The kernel's accounts of bytes read from a device: of this process, of its cgroup, and of the device for everybody;
and of what was swapped.

Containers often show zeros, or the sums of everybody: which account follows what is read, others find out.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moestream.box.cgroup import groups
from moestream.box.facts import Box
from moestream.box.process import process_io

#: Of a block device's statistics, the third figure counts sectors of 512 bytes that were read.
_SECTORS_READ, _SECTOR = 2, 512
_PAGE = mmap.PAGESIZE


def process_counter(root: str | Path = "/") -> int | None:
    """``read_bytes`` of /proc/self/io."""
    return process_io(root=root).get("read_bytes")


def cgroup_counter(device: str | None, root: str | Path = "/") -> int | None:
    """Bytes this process's own cgroup has read from a device (None: from all), by the version 2 or version 1
    controller."""
    for group in groups(Path(root), "blkio"):
        if group.version == 2:
            text = _text(group.path / "io.stat")
            rows = [line.split() for line in text.splitlines()]
            found = [_number(row, "rbytes=") for row in rows if row and device in (None, row[0])]
        else:
            text = _text(group.path / "blkio.throttle.io_service_bytes")
            rows = [line.split() for line in text.splitlines()]
            found = [
                int(row[2]) for row in rows if len(row) == 3 and row[1] == "Read" and device in (None, row[0])
            ]
        if text:
            return sum(found)
    return None


def device_counter(device: str, root: str | Path = "/") -> int | None:
    """Bytes a device (``254:0``) has read since boot, by its own statistics; a partition's are its own."""
    words = _text(Path(root) / "sys/dev/block" / device / "stat").split() if device else []
    return int(words[_SECTORS_READ]) * _SECTOR if len(words) > _SECTORS_READ else None


@dataclass(frozen=True)
class Swapped:
    """Bytes of anonymous memory that went to swap and came back since boot, of the whole machine."""

    in_bytes: int
    out_bytes: int

    def since(self, before: Swapped) -> Swapped:
        return Swapped(self.in_bytes - before.in_bytes, self.out_bytes - before.out_bytes)


def swapped(root: str | Path = "/") -> Swapped:
    """By /proc/vmstat; zeros where it does not say, as on a kernel without swap."""
    rows = (line.split() for line in _text(Path(root) / "proc/vmstat").splitlines())
    pages = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
    return Swapped(pages.get("pswpin", 0) * _PAGE, pages.get("pswpout", 0) * _PAGE)


class ReadAccounts:
    """All that this box keeps of reads of the device a file lies on."""

    def __init__(self, path: str | Path, root: str | Path = "/") -> None:
        mount = Box(root).filesystem(path)
        self._device, self._root = mount.device if mount is not None else "", root

    def now(self) -> dict[str, int]:
        """Bytes by ``process``, ``cgroup`` and ``device``; what this box does not keep is left out."""
        found = {
            "process": process_counter(self._root),
            "cgroup": cgroup_counter(self._device or None, self._root),
            "device": device_counter(self._device, self._root),
        }
        return {name: count for name, count in found.items() if count is not None}


def _number(row: Sequence[str], prefix: str) -> int:
    return next((int(word[len(prefix) :]) for word in row if word.startswith(prefix)), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
