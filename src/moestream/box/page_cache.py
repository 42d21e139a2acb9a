"""The page cache of a model's files: dropped, filled, and looked at, so that a run begins in a known state."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

#: The same on every architecture; Linux 6.5 and newer.
_CACHESTAT = 451
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BLOCK = 8 << 20


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


def drop(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget the files. Pages some process has mapped stay: see ``cached_bytes``."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _write_back(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _write_back(handle: int) -> None:
    """Dirty pages, as a file just written has, are not dropped. What cannot be written to (squashfs, erofs) has none,
    and no fsync."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def fill(paths: Sequence[Path]) -> None:
    """Read the files through the page cache."""
    buffer = bytearray(_BLOCK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_bytes(paths: Sequence[Path]) -> int | None:
    """Bytes of the files in the page cache, by cachestat or, before Linux 6.5, by mincore; None where neither tells."""
    counts = [_by_cachestat(path) for path in paths]
    if any(count is None for count in counts):
        counts = [_by_mincore(path) for path in paths]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _by_cachestat(path: Path) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, whole = _Cachestat(), _Range(0, 0)
        if libc.syscall(_CACHESTAT, handle, ctypes.byref(whole), ctypes.byref(found), 0) != 0:
            return None
        return int(found.cache) * _PAGE
    finally:
        os.close(handle)


def _by_mincore(path: Path) -> int | None:
    status = path.stat()
    # Of files that are neither ours nor writable it says that all is there: that is no answer.
    if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
        return None
    try:
        return resident_bytes(path, [(0, status.st_size)])
    except OSError:
        return None


def resident_bytes(path: str | Path, ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes of the pages of ``(offset, bytes)`` ranges of a file that are in the page cache, by mincore.

    The kernel tells only who could write to the file or owns it; of others' files it says that all is there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(handle).st_size
        total = 0
        # ACCESS_COPY is a private mapping that may be written to, which is what ctypes takes an address of.
        with mmap.mmap(handle, size, access=mmap.ACCESS_COPY) as mapped:
            view = (ctypes.c_char * size).from_buffer(mapped)
            base = ctypes.addressof(view)
            del view
            for offset, length in ranges:
                first, last = offset // _PAGE, -(-min(offset + length, size) // _PAGE)
                if last <= first:
                    continue
                found = (ctypes.c_ubyte * (last - first))()
                start, span = ctypes.c_void_p(base + first * _PAGE), ctypes.c_size_t((last - first) * _PAGE)
                if libc.mincore(start, span, found) != 0:
                    raise OSError(ctypes.get_errno(), f"mincore of {path}")
                total += sum(byte & 1 for byte in bytes(found)) * _PAGE
        return total
    finally:
        os.close(handle)
