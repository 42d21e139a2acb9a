"""The page cache of a model's files: dropped, filled, and looked at, so that a run begins in a known state."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
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
            # A file just written has dirty pages, which are not dropped.
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def fill(paths: Sequence[Path]) -> None:
    """Read the files through the page cache."""
    buffer = bytearray(_BLOCK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_bytes(paths: Sequence[Path]) -> int | None:
    """Bytes of the files in the page cache; None where the kernel does not tell (before 6.5)."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in paths:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = _Cachestat()
            whole = _Range(0, 0)
            if libc.syscall(_CACHESTAT, handle, ctypes.byref(whole), ctypes.byref(found), 0) != 0:
                return None
            total += found.cache * _PAGE
        finally:
            os.close(handle)
    return total
