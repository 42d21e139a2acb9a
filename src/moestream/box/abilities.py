"""What mechanisms need of a system, and whether this box has it: each is tried, harmlessly, not looked up.

A test returns '' when the box has it and otherwise one line that says why not and what would help.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moestream.box.cage import Cage
from moestream.box.disk import direct_io_alignment
from moestream.box.facts import Box
from moestream.core import _core

#: Of the file that O_DIRECT is tried on.
_TRIED_BYTES = 16 << 10


def _reason(code: int) -> str:
    return os.strerror(code).lower()


def in_core(name: str) -> str:
    """What the core finds when it tries: io_uring, cachestat, mincore, mremap or populate."""
    return _core.abilities()[name]


def io_uring() -> str:
    """io_uring, which containers often forbid."""
    return in_core("io_uring")


def huge() -> str:
    """Transparent huge pages."""
    setting = Box().huge_pages()
    if setting in ("always", "madvise"):
        return ""
    return f"huge pages are {setting}: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"


def mlock() -> str:
    """Leave to lock more than a handful of pages."""
    lock = Box().limits().lock
    if lock is None or lock.limit >= 1 << 30:
        return ""
    return f"only {lock.limit >> 10} KiB may be locked: raise `ulimit -l`"


def cap() -> str:
    """A memory cap that the kernel enforces, or the means to make one."""
    box = Box()
    if box.memory_limit().bytes < box.ram_bytes():
        return ""
    works, reason = Cage.available()
    return "" if works else reason


def o_direct(directory: Path) -> str:
    """O_DIRECT reads on the file system of a directory (of its nearest parent that exists)."""
    while not directory.is_dir():
        directory = directory.parent
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".moestream-") as file:
            file.write(os.urandom(_TRIED_BYTES))  # as a model is, and no file system packs it
            file.flush()
            os.fsync(file.fileno())
            found = direct_io_alignment(file.name)
    except OSError as error:
        return f"O_DIRECT could not be tried in {directory}: {_reason(error.errno or errno.EIO)}"
    if found.alignment is not None:
        return ""
    return f"{directory}: {found.reason}; keep the model on ext4, xfs or btrfs"


def tests(directory: Path) -> dict[str, Callable[[], str]]:
    """How to try what a member may need, by the name its ``needs`` holds; files are tried in ``directory``."""
    ours = {"huge": huge, "mlock": mlock, "cap": cap, "o_direct": lambda: o_direct(directory)}
    return {**{name: partial(in_core, name) for name in _core.abilities()}, "io_uring": io_uring, **ours}
