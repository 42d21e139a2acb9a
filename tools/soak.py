"""Runs for as long as it is told, with all that changes while a model is in use, and wants stock's logits throughout.

``python tools/soak.py [--minutes 120] [--model FILE] [--seed 0]`` (``make soak MINUTES=10``). One model of stock
llama.cpp stays open; beside it one of ours is loaded after the other, by a mechanism and a budget drawn by lot, and
asked random prompts of random lengths. Half the budgets are what a cap leaves, and move while tokens are made, by a
governor that decides by lot; the others move between requests. Some requests are cancelled in the middle, by several
threads, and some models closed there. Every answer that is not cut short must have stock's logits, bit for bit. After
all loads the process must hold what it held after the first: descriptors, threads, mappings, and memory up to what an
allocator keeps.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import moestream
from answers import CONTEXT, answer, prompt_tokens
from holdings import Holdings, holdings
from moestream.binding import llama_cpp, wrapped_defaults
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
ROOM = Holdings(descriptors=0, mappings=64, threads=0, anon_bytes=48 << 20)
#: Threads that stop one request.
CANCELLERS = 3
#: A request is stopped, or its model closed, within this time of its begin.
STOP_WITHIN_S = 0.2
#: Loads after which the process is held against itself.
SETTLED = 12


@dataclass
class Account:
    """What was done, and what went wrong, one line each."""

    loads: int = 0
    refused: int = 0
    answers: int = 0
    cancelled: int = 0
    closed: int = 0
    resized: int = 0
    governed: int = 0
    wrong: list[str] = field(default_factory=list)


class Soak:
    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path, self.chance, self.account = path, chance, Account()
        self.geometry = slab_geometry(read_model(path))

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
        try:
            llama = self.load(mechanism)
        except moestream.BudgetError:  # a cap by lot may turn out too small once the model is there
            self.account.refused += 1
            return
        with llama:
            self.account.loads += 1
            for _ in range(self.chance.randint(1, 8)):
                if self.chance.random() < 0.2:
                    self.cancel_one(llama)
                if llama.plan.capacities and llama.governor is None and self.chance.random() < 0.5:
                    self.resize(llama)
                self.one_answer(llama, mechanism)
            if self.chance.random() < 0.2:
                self.close_under_one(llama)
            if llama.governor is not None:
                self.account.governed += len(llama.governor.changes)

    def load(self, mechanism: str) -> Any:
        """Ours, with so many bytes of experts, or what a cap leaves for them; the governor then decides by lot."""
        extra = self.chance.randint(0, self.geometry.frame_bytes_total)
        arguments: dict[str, Any] = {
            "mechanism": mechanism,
            "n_ctx": CONTEXT,
            "n_batch": BATCH,
            "n_threads": THREADS,
            "n_threads_batch": THREADS,
        }
        by_cap = self.chance.random() < 0.5
        if by_cap:
            arguments["ram"] = self.smallest_cap(arguments) + extra
        else:
            arguments["ram"] = "4GiB"
            if moestream.Mechanism.parse(mechanism).cached:
                arguments["_expert_bytes"] = max(extra, self.least(BATCH))
        llama = moestream.Llama(self.path, **arguments)
        if llama.governor is not None:
            least, most = self.least(llama.n_batch), llama.plan.expert_bytes
            chance = random.Random(self.chance.random())
            llama.governor.decide = lambda *_: chance.randint(least, most)
        return llama

    def smallest_cap(self, arguments: dict[str, Any]) -> int:
        try:
            moestream.Llama(self.path, ram=1, **arguments)
        except moestream.BudgetError as error:
            return error.smallest_bytes or 0
        raise AssertionError("a cap of one byte was taken")

    def least(self, n_batch: int) -> int:
        return self.geometry.bytes_of(self.geometry.smallest(n_batch))

    def resize(self, llama: Any) -> None:
        wanted = self.chance.randint(self.least(llama.n_batch), llama.plan.expert_bytes)
        llama._engine.resize(split_budget(self.geometry, wanted, llama.n_batch))
        self.account.resized += 1

    def one_answer(self, llama: Any, mechanism: str) -> None:
        length, steps, seed = (
            self.chance.randint(1, 200),
            self.chance.randint(0, 40),
            self.chance.randrange(10**6),
        )
        tokens = prompt_tokens(length, llama.n_vocab(), seed)
        self.stock.n_batch = llama.n_batch  # a small cap cuts the steps, and sums depend on them
        if answer(llama, tokens, steps).digests != answer(self.stock, tokens, steps).digests:
            self.account.wrong.append(
                f"{mechanism}: prompt {seed} of {length} tokens, {steps} steps: other logits"
            )
        self.account.answers += 1

    def cancel_one(self, llama: Any) -> None:
        """Start a request and stop it from other threads, at any moments of it."""
        if self.cut_short(llama, [llama.cancel] * self.chance.randint(1, CANCELLERS)):
            self.account.cancelled += 1

    def close_under_one(self, llama: Any) -> None:
        """Start a request and close the model from another thread, while one more stops it."""
        if self.cut_short(llama, [llama.close, llama.cancel]):
            self.account.closed += 1

    def cut_short(self, llama: Any, how: list[Callable[[], None]]) -> bool:
        timers = [threading.Timer(self.chance.random() * STOP_WITHIN_S, stop) for stop in how]
        for timer in timers:
            timer.start()
        try:
            for _ in range(2):
                llama.create_completion(prompt_tokens(200, llama.n_vocab(), 0), max_tokens=100)
        except (moestream.Cancelled, moestream.UsageError):
            return True
        finally:
            for timer in timers:
                timer.join()
        return False

    def run(self, seconds: float) -> Account:
        ended = time.monotonic() + seconds
        before: Holdings | None = None
        while time.monotonic() < ended and not self.account.wrong:
            self.one_load()
            if self.account.loads == SETTLED and before is None:
                before = holdings()
            if self.account.loads % 50 == 0:
                print(self.summary(), flush=True)
        if before is not None:
            self.account.wrong += holdings().grown_from(before, ROOM)
        return self.account

    def summary(self) -> str:
        did = self.account
        return (
            f"{did.loads} loads, {did.refused} refused, {did.answers} answers equal to stock's, "
            f"{did.cancelled} cancelled, {did.closed} closed under a request, "
            f"{did.resized} budgets changed and {did.governed} by the governor"
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
