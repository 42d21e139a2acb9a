"""The page cache of a model's files: dropped, filled, and looked at, so that a run begins in a known state."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moestream.core import _core

_BLOCK = 8 << 20


def drop(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget the files. Pages some process has mapped stay: see ``cached_bytes``."""
    for path in paths:
        with _opened(path) as descriptor:
            _write_back(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_back(descriptor: int) -> None:
    """Dirty pages, as a file just written has, are not dropped. What cannot be written to (squashfs, erofs) has none,
    and no fsync."""
    try:
        os.fsync(descriptor)
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
    with _opened(path) as descriptor, contextlib.suppress(OSError):
        return _core.cached_bytes(descriptor)
    return None


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

    Raises OSError. The kernel tells only who could write to the file or owns it; of others' files it says that all
    is there.
    """
    with _opened(path) as descriptor:
        return _core.resident_bytes(descriptor, list(ranges))


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
