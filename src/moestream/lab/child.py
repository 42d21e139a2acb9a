"""One run in a fresh process: the model out of the page cache first, held in a cage, its memory watched.

Knows nothing of what is compared; it starts a command that writes a document and says how that went.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box import Cage

#: How often a running process's memory is looked at. Its ``status`` costs microseconds; the rollup of its mappings
#: would stop it for milliseconds.
WATCH_S = 0.2
#: How much of what a failed process said is kept.
_SAID_BYTES = 2000


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``document`` is None when it failed; ``peak_anon_bytes`` and ``peak_locked_bytes`` are the most
    that was seen of them; ``cage_peak_bytes`` (page cache included) and ``oom_kills`` are the kernel's, None without a
    cage."""

    document: dict[str, Any] | None
    returncode: int
    seconds: float
    said: str
    peak_anon_bytes: int
    peak_locked_bytes: int
    cage_peak_bytes: int | None
    oom_kills: int | None


def run_child(arguments: Sequence[str], cap_bytes: int | None = None, **options: Any) -> Outcome:
    """Start ``python -m ARGUMENTS --json FILE`` and wait for it, in a cage of ``cap_bytes`` unless None.

    ``options`` go to Popen; by default what it says is kept from the terminal. Raises RefusedError where no cage can
    be had.
    """
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as said:
        out = Path(scratch) / "run.json"
        argv = [sys.executable, "-m", *arguments, "--json", str(out)]
        options = {"stdout": subprocess.DEVNULL, "stderr": said, **options}
        cage = Cage(cap_bytes) if cap_bytes is not None else None
        start = time.monotonic()
        with cage or nullcontext():
            process = cage.popen(argv, **options) if cage else subprocess.Popen(argv, **options)
            try:
                peaks = _watch(process)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            kernel = (cage.peak_bytes(), cage.oom_kills()) if cage else (None, None)
        seconds = time.monotonic() - start
        said.seek(0)
        text = said.read()[-_SAID_BYTES:].decode("utf-8", "replace")
        document = json.loads(out.read_text()) if out.exists() else None
    return Outcome(document, process.returncode, seconds, text, *peaks, *kernel)


def _watch(process: subprocess.Popen[Any]) -> tuple[int, int]:
    """Wait for the process; the most anonymous and the most locked memory it was seen with."""
    anon = locked = 0
    while True:
        try:
            process.wait(WATCH_S)
            return anon, locked
        except subprocess.TimeoutExpired:
            now = _memory(process.pid)
            anon, locked = max(anon, now.get("RssAnon", 0)), max(locked, now.get("VmLck", 0))


def _memory(pid: int) -> dict[str, int]:
    """Sizes from a process's ``status``, in bytes; {} when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[2] == "kB"}


def drop_from_cache(path: Path) -> int:
    """Have the kernel drop a file's clean pages; the bytes of it that are still in memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        return _cached_bytes(handle, os.fstat(handle).st_size)
    finally:
        os.close(handle)


def _cached_bytes(handle: int, size: int) -> int:
    """Bytes of a file in the page cache, asked by ``mincore`` on a mapping that is never touched."""
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if libc.mincore(address, size, pages):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        libc.munmap(address, size)
    # Of each page's byte only the lowest bit says something.
    present = sum(pages.raw.count(bytes([value])) for value in range(1, 256, 2))
    return present * mmap.PAGESIZE
