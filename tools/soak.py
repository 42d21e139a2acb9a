"""Runs for as long as it is told, with all that changes while a model is in use, and wants stock's logits throughout.

``python tools/soak.py [--minutes 120] [--model FILE] [--seed 0]`` (``make soak MINUTES=10``). One model of stock
llama.cpp stays open; beside it one of ours is loaded after the other, by a mechanism and a budget drawn by lot, and
asked random prompts of random lengths. Between requests its budget moves, and some requests are cancelled in the
middle. Every answer that is not cancelled must have stock's logits, bit for bit. After each load and close the process
must hold what it held before: descriptors, mappings, and memory up to what an allocator keeps.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import moestream
from answers import CONTEXT, answer, prompt_tokens
from moestream.binding import llama_cpp, wrapped_defaults
from moestream.box import process_memory
from moestream.geometry import slab_geometry, split_budget
from moestream.make import make_model
from moestream.model import read_model

MECHANISMS = (
    "arena",
    "arena+uring:8+lru+gate:2",
    "arena/buffered+threads:4x2+lfu-decay:16+previous",
    "arena/fresh+sync+s3fifo",
    "arena/populate+uring:4+sieve+random",
    "arena+threads:2+lru-layer+none+mlock",
    "mapped+willneed",
    "mapped+pread:2+background:1",
    "mapped+hybrid:mincore+dontneed:2",
    "resident",
    "shared+sync+lru",
)
BATCH, THREADS = 64, 2
#: What an allocator and the interpreter may keep between the first loads and the last.
GROWTH_BYTES = 48 << 20
#: Loads after which the process is held against itself.
SETTLED = 12


@dataclass
class Account:
    """What was done, and what went wrong, one line each."""

    loads: int = 0
    answers: int = 0
    cancelled: int = 0
    resized: int = 0
    wrong: list[str] = field(default_factory=list)


def held() -> tuple[int, int, int]:
    """Descriptors, mappings and anonymous bytes of this process."""
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return descriptors, mappings, process_memory().anon_bytes


class Soak:
    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path, self.chance, self.account = path, chance, Account()

        def change(params: Any) -> None:
            params.use_extra_bufts = False

        with wrapped_defaults(model=change):
            self.stock = llama_cpp.Llama(
                str(path),
                n_ctx=CONTEXT,
                n_batch=BATCH,
                n_ubatch=BATCH,
                n_threads=THREADS,
                n_threads_batch=THREADS,
                verbose=False,
            )

    def one_load(self) -> None:
        mechanism = self.chance.choice(MECHANISMS)
        geometry = slab_geometry(read_model(self.path))
        least = geometry.bytes_of(geometry.smallest(BATCH))
        experts = self.chance.randint(least, geometry.frame_bytes_total)
        limit = {"_expert_bytes": experts} if moestream.Mechanism.parse(mechanism).cached else {}
        with moestream.Llama(
            self.path,
            ram="4GiB",
            mechanism=mechanism,
            n_ctx=CONTEXT,
            n_batch=BATCH,
            n_threads=THREADS,
            n_threads_batch=THREADS,
            **limit,
        ) as llama:
            self.account.loads += 1
            for _ in range(self.chance.randint(1, 8)):
                if self.chance.random() < 0.2:
                    self.cancel_one(llama)
                if llama.plan.capacities and self.chance.random() < 0.5:
                    wanted = self.chance.randint(geometry.bytes_of(geometry.smallest(llama.n_batch)), experts)
                    llama._engine.resize(split_budget(geometry, wanted, llama.n_batch))
                    self.account.resized += 1
                self.one_answer(llama, mechanism)

    def one_answer(self, llama: Any, mechanism: str) -> None:
        length, steps, seed = (
            self.chance.randint(1, 200),
            self.chance.randint(0, 40),
            self.chance.randrange(10**6),
        )
        tokens = prompt_tokens(length, llama.n_vocab(), seed)
        if answer(llama, tokens, steps).digests != answer(self.stock, tokens, steps).digests:
            self.account.wrong.append(
                f"{mechanism}: prompt {seed} of {length} tokens, {steps} steps: other logits"
            )
        self.account.answers += 1

    def cancel_one(self, llama: Any) -> None:
        """Start a request and stop it from another thread, at any moment of it."""
        timer = threading.Timer(self.chance.random() * 0.2, llama.cancel)
        timer.start()
        try:
            answer(llama, prompt_tokens(200, llama.n_vocab(), 0), 100)
        except moestream.Cancelled:
            self.account.cancelled += 1
        finally:
            timer.join()

    def run(self, seconds: float) -> Account:
        ended = time.monotonic() + seconds
        before: tuple[int, int, int] | None = None
        while time.monotonic() < ended and not self.account.wrong:
            self.one_load()
            if self.account.loads == SETTLED:
                before = held()
            if self.account.loads % 50 == 0:
                print(self.summary(), flush=True)
        if before is not None:
            self.check_growth(before, held())
        return self.account

    def check_growth(self, before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
        names, rooms = ("descriptors", "mappings", "bytes of memory"), (0, 64, GROWTH_BYTES)
        for name, was, now, room in zip(names, before, after, rooms, strict=True):
            if now > was + room:
                self.account.wrong.append(f"{name} grew from {was} to {now} in {self.account.loads} loads")

    def summary(self) -> str:
        did = self.account
        return (
            f"{did.loads} loads, {did.answers} answers equal to stock's, {did.cancelled} cancelled, "
            f"{did.resized} budgets changed"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--model", type=Path, help="left out: a small one with random weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or make_model("olmoe", "tiny,experts=32", "Q4_K", Path(directory) / "m.gguf")
        soak = Soak(path, random.Random(options.seed))
        account = soak.run(60 * options.minutes)
        for line in account.wrong:
            print(line)
        print(
            f"{options.minutes:g} minutes, seed {options.seed}: {soak.summary()}, {len(account.wrong)} wrong"
        )
    return 1 if account.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
