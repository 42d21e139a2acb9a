"""Opens and closes models, whole and half-way, and holds what the process has at the end against what it had before.

``python tools/opens.py [--cycles 10000] [--stock]`` (``make opens CYCLES=10000``). Each cycle is the next of the ways
below of opening a small model: every store, with a governor, with a trace, and loads that end half-way. After
``--settled`` cycles the process is measured, and again at the end: descriptors, mappings, threads, bytes on the C
library's heap, Python's blocks, anonymous bytes. ``--stock`` opens and closes llama.cpp's own model instead: the
control that tells its growth from ours.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import moestream
from answers import prompt_tokens
from holdings import Holdings, holdings
from moestream.binding import llama_cpp
from moestream.make import make_model

SETTINGS: dict[str, Any] = {"n_ctx": 64, "n_batch": 8, "n_threads": 1, "n_threads_batch": 1}
MECHANISMS = (
    "arena",
    "arena+threads:2+lru+gate:1",
    "arena/fresh+sync+s3fifo",
    "mapped+willneed",
    "mapped+pread+background:1+anon",
    "resident",
    "shared+sync+lru",
)
#: Descriptors and threads are exact; mappings and anonymous bytes are what an allocator likes.
ROOM = Holdings(descriptors=0, mappings=32, threads=0, anon_bytes=16 << 20)
#: What a cycle may leave: numpy and jinja2 keep a block and about 100 bytes of each of the binding's own loads (see
#: ``--stock``), and the least that one of ours could lose, a plan or a context, is some kilobytes.
HEAP_PER_CYCLE, BLOCKS_PER_CYCLE = 512, 4


#: More than what a process holds can shrink by while it loads a model.
BALLAST = 128 << 20


class HeapInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                 "keepcost")]  # fmt: skip


def heap_bytes() -> int:
    """Bytes in use on the heaps of the C library; 0 where it does not tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = HeapInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


@dataclass(frozen=True)
class Measured:
    cycle: int
    held: Holdings
    heap_bytes: int
    blocks: int

    @staticmethod
    def now(cycle: int) -> Measured:
        held = holdings()  # collects what is no longer referred to
        return Measured(cycle, held, heap_bytes(), sys.getallocatedblocks())

    def grown_from(self, before: Measured) -> list[str]:
        cycles = self.cycle - before.cycle
        wrong = self.held.grown_from(before.held, ROOM)
        for name, room in (("heap_bytes", HEAP_PER_CYCLE * cycles), ("blocks", BLOCKS_PER_CYCLE * cycles)):
            was, now = getattr(before, name), getattr(self, name)
            if now > was + room:
                wrong.append(f"{name}: {now}, before {was}")
        return wrong

    def __str__(self) -> str:
        held = self.held
        return (
            f"after {self.cycle} cycles: {held.descriptors} descriptors, {held.mappings} mappings, "
            f"{held.threads} threads, {held.anon_bytes} bytes anonymous, {self.heap_bytes} on the heap, "
            f"{self.blocks} Python blocks"
        )


class HalfWay(Exception):
    """What a caller's callback raises here."""


class Opens:
    """The ways of opening a model, each a method that leaves nothing behind."""

    def __init__(self, directory: Path) -> None:
        self.path = make_model("olmoe", "tiny,layers=2,experts=8", "Q4_K", directory / "m.gguf")
        self.whole = self.path.read_bytes()
        self.trace = directory / "t.parquet"
        self.ways: list[Callable[[], None]] = [
            *(lambda text=text: self.answer(text) for text in MECHANISMS),
            self.record,
            *(lambda text=text: self.stop_half_way(text) for text in ("arena", "resident")),
            self.ask_too_little,
            self.have_too_little,
            self.ask_what_does_not_engage,
            *(
                lambda text=text: self.lose_the_file_in_the_load(text)
                for text in ("arena", "arena+threads:2")
            ),
            *(lambda text=text: self.lose_the_file(text) for text in ("arena", "arena+sync+none")),
            self.forget_to_close,
        ]

    def load(self, mechanism: str, **arguments: Any) -> Any:
        return moestream.Llama(self.path, mechanism=mechanism, **{"ram": "1GiB", **SETTINGS, **arguments})

    def refused(self, kind: type[Exception], mechanism: str, **arguments: Any) -> None:
        try:
            self.load(mechanism, **arguments).close()
        except kind:
            return
        raise AssertionError(f"{mechanism} {arguments}: loaded")

    def answer(self, mechanism: str) -> None:
        with self.load(mechanism) as llama:
            llama.create_completion(prompt_tokens(9, llama.n_vocab()), max_tokens=3, temperature=0)

    def record(self) -> None:
        with self.load("arena", trace=self.trace) as llama:
            llama.eval(prompt_tokens(9, llama.n_vocab()))

    def stop_half_way(self, mechanism: str) -> None:
        def stop(done: int, total: int) -> None:
            raise HalfWay

        self.refused(HalfWay, mechanism, on_progress=stop, trace=self.trace)

    def ask_too_little(self) -> None:
        self.refused(moestream.BudgetError, "arena", ram=1)

    def have_too_little(self) -> None:
        """What the plan allows, and then the process turns out to hold more."""
        ballast: list[bytearray] = []

        def grow(done: int, total: int) -> None:
            if not ballast:
                ballast.append(bytearray(b"x") * BALLAST)

        try:
            self.load("arena", ram=1)
        except moestream.BudgetError as error:
            assert error.smallest_bytes is not None
            self.refused(moestream.BudgetError, "arena", ram=error.smallest_bytes, on_progress=grow)

    def ask_what_does_not_engage(self) -> None:
        self.refused(moestream.EngagementError, "arena", ram=1 << 50, strict=True)

    def lose_the_file_in_the_load(self, mechanism: str) -> None:
        try:
            self.refused(moestream.MoestreamError, mechanism, on_progress=lambda done, total: self.cut())
        finally:
            self.path.write_bytes(self.whole)

    def lose_the_file(self, mechanism: str) -> None:
        """Reads that fail in the middle of a text, or of the next one's prompt."""
        try:
            with self.load(mechanism) as llama:
                tokens = llama.generate(prompt_tokens(30, llama.n_vocab()), temp=0.0)
                next(tokens)
                self.cut()
                for _ in range(20):
                    next(tokens)
        except moestream.ReadError:
            return
        finally:
            self.path.write_bytes(self.whole)
        raise AssertionError(f"{mechanism}: nothing was read of a file that was cut")

    def forget_to_close(self) -> None:
        llama = self.load("arena")
        llama.eval([1, 2, 3])
        llama.itself = llama  # only the collector of cycles finds it

    def cut(self) -> None:
        os.truncate(self.path, len(self.whole) // 3)

    def stock(self) -> None:
        """The control."""
        llama = llama_cpp.Llama(str(self.path), verbose=False, **SETTINGS)
        llama.create_completion(prompt_tokens(9, llama.n_vocab()), max_tokens=3, temperature=0)
        llama.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--settled", type=int, default=100, help="cycles before the first measurement")
    parser.add_argument("--stock", action="store_true", help="the control: llama.cpp's own, nothing of ours")
    options = parser.parse_args()
    if options.cycles <= options.settled:
        parser.error(f"--cycles must be more than the {options.settled} of --settled")
    with tempfile.TemporaryDirectory() as directory:
        opens = Opens(Path(directory))
        ways = [opens.stock] if options.stock else opens.ways
        begun, before = time.monotonic(), None
        for cycle in range(1, options.cycles + 1):
            ways[cycle % len(ways)]()
            if cycle == options.settled:
                before = Measured.now(cycle)
                print(before, flush=True)
            elif cycle % max(1, options.cycles // 10) == 0 and cycle < options.cycles:
                print(Measured.now(cycle), flush=True)
        after = Measured.now(options.cycles)
    assert before is not None
    wrong = after.grown_from(before)
    print(after)
    print(f"{time.monotonic() - begun:.0f} s, {len(wrong)} grew", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
