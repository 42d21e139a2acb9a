"""What a probe reads: a model's slabs in random order, or blocks of a file it has made; made cold or warm, checked."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moestream.box import Box, direct_io_alignment, mapping_refusal, place_of
from moestream.box.page_cache import drop, resident_bytes
from moestream.core import _core
from moestream.errors import RefusedError
from moestream.model import Model
from moestream.units import format_bytes

#: file number, offset, bytes: whole pages.
Range = tuple[int, int, int]

PAGE = 4096
BLOCK = 1 << 20
SEQUENTIAL_BLOCK = 4 << 20
#: The file made where there is no model.
FILE_BYTES = 1 << 30
#: Of the page cache: what warm cases read again and again.
WARM_BYTES = 96 << 20
#: A range counts as cold with at most this share of it in the page cache.
COLD_SHARE = 0.01


@dataclass
class Sample:
    """Files and the ranges of them to read. ``what``: slabs or blocks; ``ranges`` are in random order and are taken
    one after another, so that no device cache has seen them lately. ``checkable``: the kernel says what of the
    files is in the page cache. ``refusals``: why the files are not read past it (``direct``) or not mapped
    (``mapping``)."""

    files: list[Path]
    what: str
    ranges: list[Range]
    direct: bool
    checkable: bool
    #: Of one route, where the sample is a model's: its experts' slabs together.
    route_bytes: int | None = None
    route_slabs: int = 8
    refusals: dict[str, str] = field(default_factory=dict)
    #: The ranges by the bytes of their slab, in random order; {} where all slabs are of one size.
    by_size: dict[int, list[Range]] = field(default_factory=dict, repr=False)
    _next: dict[int | None, int] = field(default_factory=dict, repr=False)

    @property
    def range_bytes(self) -> int:
        """The most common size; the larger of two."""
        sizes = [length for _, _, length in self.ranges]
        return max(set(sizes), key=lambda size: (sizes.count(size), size))

    @property
    def names(self) -> list[str]:
        return [str(path) for path in self.files]

    def take(self, length: int, at_least: int = 1, size: int | None = None) -> list[Range]:
        """The next ranges, together at least ``length`` bytes and at least ``at_least``; no range twice. ``size``: only
        of slabs of so many bytes."""
        ranges = self.ranges if size is None else self.by_size[size]
        taken: list[Range] = []
        total, at = 0, self._next.get(size, 0)
        while (total < length or len(taken) < at_least) and len(taken) < len(ranges):
            taken.append(ranges[(at + len(taken)) % len(ranges)])
            total += taken[-1][2]
        self._next[size] = at + len(taken)
        return taken

    def sequential(self, share: float, length: int) -> list[Range]:
        """Blocks in file order that begin at a share of the largest file."""
        sizes = [path.stat().st_size for path in self.files]
        number = sizes.index(max(sizes))
        whole = sizes[number] // PAGE * PAGE
        block = min(SEQUENTIAL_BLOCK, whole, max(PAGE, length // PAGE * PAGE))
        count = max(1, min(length, whole) // block)
        first = int(share * (whole - count * block)) // PAGE * PAGE
        return [(number, first + i * block, block) for i in range(count)]

    def warm_set(self, length: int) -> list[Range]:
        """The same ranges each time, in file order."""
        chosen: list[Range] = []
        total = 0
        for row in self.ranges:
            if total and total + row[2] > length:
                break
            chosen.append(row)
            total += row[2]
        return sorted(chosen)

    def make_cold(self, ranges: Sequence[Range]) -> str:
        """Drop the files from the page cache; '' when the ranges are gone from it, else what is in the way."""
        drop(self.files)
        if not self.checkable:
            return ""
        left = self.cached(ranges)
        if left > COLD_SHARE * sum(length for _, _, length in ranges):
            return (
                f"{format_bytes(left)} stay in the page cache: some process has the file mapped or in use, or its file "
                "system is memory"
            )
        return ""

    def make_warm(self, ranges: Sequence[Range]) -> str:
        """Read the ranges into the page cache; '' when they are there."""
        wanted = sum(length for _, _, length in ranges)
        if self.checkable and self.cached(ranges) == wanted:
            return ""
        _core.probe_reads(
            self.names,
            ranges,
            reader="threads:2",
            in_flight=2,
            direct=False,
            buffer_bytes=BLOCK,
            seconds=60.0,
        )
        if self.checkable and self.cached(ranges) < (1 - COLD_SHARE) * wanted:
            return "the page cache does not keep the ranges: there is too little memory"
        return ""

    def cached(self, ranges: Sequence[Range]) -> int:
        """Bytes of the ranges' pages in the page cache."""
        return sum(
            resident_bytes(path, [(row[1], row[2]) for row in ranges if row[0] == number])
            for number, path in enumerate(self.files)
        )


def model_sample(model: Model, seed: int = 0) -> Sample:
    """The slabs of a model as the arena reads them, whole pages; blocks where it has no experts. Raises RefusedError
    for a file too small to hold one."""
    sizes = [shard.bytes // PAGE * PAGE for shard in model.shards]
    ranges: list[Range] = []
    by_size: dict[int, list[Range]] = {}
    for bank in model.banks:
        for tensor in bank.tensors:
            for number in range(tensor.count):
                begin = tensor.offset + number * tensor.slab_bytes
                first = begin // PAGE * PAGE
                last = min(sizes[tensor.shard], -(-(begin + tensor.slab_bytes) // PAGE) * PAGE)
                if last > first:
                    ranges.append((tensor.shard, first, last - first))
                    by_size.setdefault(tensor.slab_bytes, []).append(ranges[-1])
    what, route_bytes, route_slabs = "slabs", None, 8
    if ranges:
        bank = max(model.banks, key=lambda bank: bank.used * bank.expert_bytes)
        route_bytes, route_slabs = bank.used * bank.expert_bytes, bank.used * len(bank.tensors)
    else:
        what = "blocks"
        ranges = [(n, at, BLOCK) for n, size in enumerate(sizes) for at in range(0, size - BLOCK + 1, BLOCK)]
    if not ranges:
        raise RefusedError(
            f"{model.paths[0]} is too small to measure a disk with: name a larger model, or --dir"
        )
    sample = _sample(list(model.paths), what, ranges, seed, route_bytes, route_slabs)
    if len(by_size) > 1:
        for size, mine in by_size.items():
            random.Random(seed).shuffle(mine)
            sample.by_size[size] = mine
    return sample


@contextlib.contextmanager
def directory_sample(
    directory: Path,
    length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> Iterator[Sample]:
    """A file of ``length`` bytes (``FILE_BYTES`` when None) in a directory, without a name: it is gone with the
    block, however that ends. Raises RefusedError where there is no room, or no disk under the directory."""
    length = FILE_BYTES if length is None else length
    if not directory.is_dir():
        raise RefusedError(f"--dir {directory}: there is no such directory")
    memory = place_of([directory], Box()).in_memory
    if memory:
        raise RefusedError(
            f"--dir {directory}: that is {memory}, which is memory: there is no disk to measure; name another"
        )
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < length + length // 16:
        raise RefusedError(
            f"--dir {directory}: a file of {format_bytes(length)} is needed and {format_bytes(free)} are free: "
            "free some space or name another directory"
        )
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0))
            _fill(file.fileno(), length, progress)
        except OSError as error:
            raise RefusedError(
                f"--dir {directory}: a file of {format_bytes(length)} could not be made there: "
                f"{error.strerror or error}; name another directory"
            ) from error
        ranges = [(0, at, BLOCK) for at in range(0, length, BLOCK)]
        yield _sample([Path(f"/proc/self/fd/{file.fileno()}")], "blocks", ranges, seed, None, 8)


def _fill(handle: int, length: int, progress: Callable[[int, int], None] | None) -> None:
    """Bytes that no file system can leave out or pack."""
    source = random.Random(os.getpid())
    written = 0
    while written < length:
        block = memoryview(source.randbytes(min(8 * BLOCK, length - written)))
        while block:
            block = block[os.write(handle, block) :]
        written += min(8 * BLOCK, length - written)
        if progress is not None:
            progress(written, length)
    os.fsync(handle)


def _sample(
    files: list[Path], what: str, ranges: list[Range], seed: int, route_bytes: int | None, route_slabs: int
) -> Sample:
    random.Random(seed).shuffle(ranges)
    refused = [found.reason for path in files if (found := direct_io_alignment(path)).alignment is None]
    unmapped = [reason for path in files if (reason := mapping_refusal(path))]
    refusals = {"direct": refused, "mapping": unmapped}
    return Sample(
        files,
        what,
        ranges,
        not refused,
        all(_checkable(path) for path in files),
        route_bytes,
        route_slabs,
        {name: reasons[0] for name, reasons in refusals.items() if reasons},
    )


def _checkable(path: Path) -> bool:
    # Of a file that is another user's and only readable the kernel claims that all of it is cached.
    if not os.access(path, os.W_OK) and path.stat().st_uid != os.geteuid():
        return False
    try:
        resident_bytes(path, [(0, PAGE)])
    except OSError:
        return False
    return True
