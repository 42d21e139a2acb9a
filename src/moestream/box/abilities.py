"""What mechanisms need of a system, and whether this box has it: each is tried, harmlessly, not looked up.

A test returns '' when the box has it and otherwise one line that says why not and what would help.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

from moestream.box.cage import Cage
from moestream.box.disk import direct_io_alignment
from moestream.box.facts import Box

_libc = ctypes.CDLL(None, use_errno=True)
_IO_URING_SETUP, _CACHESTAT = 425, 451  # the same on every architecture
_MADV_POPULATE_WRITE = 23
_REMAP = 1 | 4  # MAYMOVE, DONTUNMAP
_PAGE = mmap.PAGESIZE
_RING_PARAMETERS = 120  # bytes of struct io_uring_params


def _reason(code: int) -> str:
    return os.strerror(code).lower()


def _syscall(number: int, *arguments: object) -> int:
    """The call's result, or minus the errno."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    return -ctypes.get_errno() if result < 0 else result


def io_uring() -> str:
    """io_uring, which containers often forbid."""
    parameters = ctypes.create_string_buffer(_RING_PARAMETERS)
    ring = _syscall(_IO_URING_SETUP, ctypes.c_uint(1), parameters)
    if ring < 0:
        return (
            f"io_uring is refused ({_reason(-ring)}): allow it in the container's seccomp profile or "
            "kernel.io_uring_disabled"
        )
    os.close(ring)
    return ""


def cachestat() -> str:
    """cachestat(2), Linux 6.5 and newer."""
    with Path("/proc/self/exe").open("rb") as file:
        area = (ctypes.c_uint64 * 2)(0, _PAGE)
        result = (ctypes.c_uint64 * 5)()
        code = _syscall(_CACHESTAT, ctypes.c_uint(file.fileno()), area, result, ctypes.c_uint(0))
    return "" if code == 0 else f"cachestat is refused ({_reason(-code)}): Linux 6.5 or newer has it"


def _anonymous(pages: int) -> tuple[mmap.mmap, int]:
    area = mmap.mmap(-1, pages * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return area, ctypes.addressof(ctypes.c_char.from_buffer(area))


def mremap() -> str:
    """mremap with MREMAP_DONTUNMAP, Linux 5.7 and newer; without it a hole is mapped again after each move."""
    area, address = _anonymous(1)
    area[0] = 1
    call = _libc.mremap
    call.restype = ctypes.c_void_p
    size = ctypes.c_size_t(_PAGE)
    moved = call(ctypes.c_void_p(address), size, size, ctypes.c_int(_REMAP), ctypes.c_void_p(None))
    if moved in (None, ctypes.c_void_p(-1).value):
        return f"mremap(DONTUNMAP) is refused ({_reason(ctypes.get_errno())}): Linux 5.7 or newer has it"
    _libc.munmap(ctypes.c_void_p(moved), size)
    return ""


def populate() -> str:
    """MADV_POPULATE_WRITE, Linux 5.14 and newer."""
    _, address = _anonymous(1)
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), _MADV_POPULATE_WRITE) != 0:
        return f"MADV_POPULATE_WRITE is refused ({_reason(ctypes.get_errno())}): Linux 5.14 or newer has it"
    return ""


def huge() -> str:
    """Transparent huge pages."""
    setting = Box().huge_pages()
    if setting in ("always", "madvise"):
        return ""
    return f"huge pages are {setting}: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"


def mlock() -> str:
    """Leave to lock more than a handful of pages."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY or soft >= 1 << 30:
        return ""
    return f"only {soft >> 10} KiB may be locked: raise `ulimit -l`"


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
            file.write(bytes(4 * _PAGE))
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
    return {
        "io_uring": io_uring,
        "cachestat": cachestat,
        "mremap": mremap,
        "populate": populate,
        "huge": huge,
        "mlock": mlock,
        "cap": cap,
        "o_direct": lambda: o_direct(directory),
    }
