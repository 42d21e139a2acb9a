"""The block device under a file: its account of reads, and how the file lies on it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box import Box

_SECTOR = 512  # of the statistics, whatever the device's own is
_FIEMAP = 0xC020660B
_FIEMAP_HEAD = struct.Struct("=QQLLLL")
_EXTENT = struct.Struct("=QQQQQLLLL")
_EXTENTS = 256
_LAST = 1
#: Extents without a place of their own on the device: not yet allocated, inside the inode, or packed with others.
_PLACELESS = 0x2 | 0x4 | 0x200 | 0x400


@dataclass(frozen=True)
class DeviceReads:
    """Reads completed by a device since it was attached, and their bytes."""

    reads: int
    bytes: int


@dataclass(frozen=True)
class Device:
    """A block device by number (``253:0``); ``directory`` is its place in /sys."""

    number: str
    directory: Path

    def reads(self) -> DeviceReads | None:
        """None when the kernel keeps no statistics of it."""
        try:
            fields = (self.directory / "stat").read_text().split()
            return DeviceReads(int(fields[0]), int(fields[2]) * _SECTOR)
        except (OSError, ValueError, IndexError):
            return None

    def describe(self) -> dict[str, Any]:
        """``rotational`` and request limits, from the device's queue or that of the disk it is a part of."""
        found: dict[str, Any] = {
            "number": self.number,
            "name": os.path.realpath(self.directory).rsplit("/", 1)[-1],
        }
        for name in ("rotational", "max_sectors_kb", "max_segments", "nr_requests", "scheduler"):
            for queue in (self.directory / "queue", self.directory.resolve().parent / "queue"):
                with contextlib.suppress(OSError):
                    text = (queue / name).read_text().strip()
                    found[name] = int(text) if text.isdigit() else text
                    break
        return found


def find_device(path: str | Path, root: str | Path = "/", number: str | None = None) -> Device | None:
    """The device of a file (or the one of that ``number``); None where the file system names none: a network,
    memory, or several disks at once."""
    numbers = [number] if number is not None else []
    if number is None:
        status = Path(path).stat()
        numbers.append(f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}")
        mount = Box(root).filesystem(path)
        # btrfs and overlays number their files by a device of their own, but may name the real one.
        if mount is not None and mount.source.startswith("/dev/"):
            with contextlib.suppress(OSError):
                real = Path(mount.source).stat().st_rdev
                numbers.append(f"{os.major(real)}:{os.minor(real)}")
    for name in numbers:
        directory = Path(root) / "sys/dev/block" / name
        if (directory / "stat").exists():
            return Device(name, directory)
    return None


def layout(path: str | Path) -> dict[str, Any] | None:
    """How a file lies on its device: ``extents``, and ``runs`` of them that follow each other there without a gap,
    with the mean ``run_bytes``. None where the file system does not tell."""
    try:
        return summarise_extents(_extents(path))
    except OSError:
        return None


def summarise_extents(extents: Sequence[tuple[int, int, int]]) -> dict[str, Any] | None:
    """``layout`` of (logical, physical, bytes) extents in the file's order; None of none."""
    if not extents:
        return None
    runs = 1
    for before, after in itertools.pairwise(extents):
        follows = before[0] + before[2] == after[0] and before[1] + before[2] == after[1]
        runs += not follows
    return {
        "extents": len(extents),
        "runs": runs,
        "run_bytes": sum(extent[2] for extent in extents) / runs,
    }


def _extents(path: str | Path) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        start = 0
        while True:
            asked = bytearray(_FIEMAP_HEAD.size + _EXTENTS * _EXTENT.size)
            _FIEMAP_HEAD.pack_into(asked, 0, start, 2**64 - 1 - start, 0, 0, _EXTENTS, 0)
            fcntl.ioctl(handle, _FIEMAP, asked)
            count = _FIEMAP_HEAD.unpack_from(asked)[3]
            flags = _LAST
            for number in range(count):
                row = _EXTENT.unpack_from(asked, _FIEMAP_HEAD.size + number * _EXTENT.size)
                flags, start = row[5], row[0] + row[2]
                if not flags & _PLACELESS:
                    found.append((row[0], row[1], row[2]))
            if flags & _LAST:
                return found
    finally:
        os.close(handle)
