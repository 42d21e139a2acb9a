"""What a file's disk allows: whether it can be read past the page cache, and how fast."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box.facts import Box
from moestream.box.filesystems import place_of
from moestream.core import _core

_BLOCK = 1 << 20
_THREADS = 8
#: A disk's rate drifts by the minute and changes with the machine; a day is what a plan needs.
MAX_AGE_S = 24 * 3600.0


@dataclass(frozen=True)
class DirectIo:
    """``alignment``: what offsets and lengths of an O_DIRECT read must be multiples of, as a read proved;
    None when such reads do not work, and ``reason`` says which one failed."""

    alignment: int | None
    reason: str


@dataclass(frozen=True)
class DiskRate:
    """Random 1 MiB reads by 8 threads. ``direct``: past the page cache; else through it, the range dropped
    before. ``measured_at``: seconds since the epoch."""

    bytes_per_s: float
    direct: bool
    measured_at: float

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.measured_at)


def direct_io_alignment(path: str | Path) -> DirectIo:
    """What the kernel says of the file (statx) and a few reads prove: see ``moestream/direct.h``."""
    alignment, refusal = _core.direct_reads(os.fsencode(path))
    if refusal:
        return DirectIo(None, f"O_DIRECT of {path}: {refusal}")
    return DirectIo(alignment, f"O_DIRECT reads at multiples of {alignment} bytes, the tail included")


def mapping_refusal(path: str | Path) -> str:
    """Why a file cannot be mapped as a model is (some FUSE, network and shared file systems); '' where it can."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ):
            return ""
    except OSError as error:
        return f"{path} cannot be mapped ({error.strerror})"


def device_name(path: str | Path) -> str:
    """What a file lies on, to remember figures by: ``major:minor``. File systems without one device of their own (a
    network's, btrfs, overlays, FUSE) get a number when they are mounted, which the next one may get: there a hash
    of what is mounted goes with it. Raises OSError."""
    number = Path(path).stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    mount = Box().filesystem(path)
    if os.major(number) or mount is None:
        return name
    return f"{name}-{hashlib.sha256(f'{mount.kind} {mount.source}'.encode()).hexdigest()[:12]}"


def disk_rate(path: str | Path, seconds: float = 0.5, *, max_age_s: float = MAX_AGE_S) -> DiskRate | None:
    """The rate of the device a file lies on: as measured at most ``max_age_s`` ago and remembered, or
    measured now in ``seconds`` (at most 1). None when the file is too small, not readable or in memory."""
    try:
        size, device = Path(path).stat().st_size, device_name(path)
    except OSError:
        return None
    if place_of([Path(path)], Box()).in_memory:
        return None
    store = cache_directory() / "disk.json"
    remembered = _remembered(store).get(device)
    if remembered is not None and remembered.age_s <= max_age_s:
        return remembered
    if size < 8 * _BLOCK:
        return None
    try:
        rate = _measure(path, size, min(seconds, 1.0))
    except OSError:
        return None
    _remember(store, device, rate)
    return rate


def _measure(path: str | Path, size: int, seconds: float) -> DiskRate:
    direct = direct_io_alignment(path).alignment is not None
    blocks = size // _BLOCK
    stop = threading.Event()
    with _opened(path, direct) as handle, concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        start = time.perf_counter()
        done = [
            pool.submit(_read_blocks, handle, direct, random.Random(start + number), blocks, stop.is_set)
            for number in range(_THREADS)
        ]
        stop.wait(seconds)  # nobody sets it: this is the measurement's length
        stop.set()
        total = sum(future.result() for future in done)
        elapsed = time.perf_counter() - start
    return DiskRate(total / elapsed, direct, time.time())


def _read_blocks(
    handle: int, direct: bool, numbers: random.Random, blocks: int, stopped: Callable[[], bool]
) -> int:
    """Read random blocks until told to stop; the bytes read."""
    total = 0
    with mmap.mmap(-1, _BLOCK) as buffer:
        while not stopped():
            offset = numbers.randrange(blocks) * _BLOCK
            if not direct:
                os.posix_fadvise(handle, offset, _BLOCK, os.POSIX_FADV_DONTNEED)
            total += os.preadv(handle, [buffer], offset)
    return total


@contextlib.contextmanager
def _opened(path: str | Path, direct: bool) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        yield handle
    finally:
        os.close(handle)


def cache_directory() -> Path:
    """Where this program keeps files of its own: ``moestream`` in the user's cache directory. A user without a home
    has none: nothing can be kept, which is no error until it is asked for."""
    # An empty or relative XDG_CACHE_HOME counts as unset, as its specification says.
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not named.is_absolute():
        try:
            named = Path.home() / ".cache"
        except RuntimeError:
            named = Path(os.devnull)
    return named / "moestream"


def _remembered(store: Path) -> dict[str, DiskRate]:
    """The rates by device number; {} when there is no readable file (a damaged one is measured anew)."""
    try:
        entries: dict[str, Any] = json.loads(store.read_text())
        return {
            device: DiskRate(float(e["bytes_per_s"]), bool(e["direct"]), float(e["measured_at"]))
            for device, e in entries.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _remember(store: Path, device: str, rate: DiskRate) -> None:
    rates = {**_remembered(store), device: rate}
    text = json.dumps({name: vars(value) for name, value in rates.items()}, indent=2)
    fresh = store.with_suffix(f".{os.getpid()}")
    # A home that cannot be written to costs half a second next time, no more.
    with contextlib.suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text)
        fresh.replace(store)
