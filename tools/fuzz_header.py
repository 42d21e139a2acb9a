"""Reads models whose headers are wrong: no crash, no hang, no huge allocation, never another error than a ModelError.

``python tools/fuzz_header.py [--cases 100000] [--seed 0]``. Each case changes one field of a good header (a count, a
length, a type, an extent, an offset) to a number that hurts, or some bytes anywhere in it, or cuts, repeats or drops a
piece. A case is its number and the seed: ``--only N`` runs one of them, in this process, with its traceback.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from ggufs import moe_tensors, write_gguf
from moestream.errors import ModelError
from moestream.model import read_model

#: What a case may take: seconds, and bytes of address space beyond what the process has when it begins.
SECONDS, BYTES = 1.0, 256 << 20
#: Cases a process runs before it is replaced.
BATCH = 500
_HURTS = (0, 1, 2, 3, 7, 8, 31, 33, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40)
_HURTS_64 = (2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Field:
    """A number of the header: where it is and how many bytes it has."""

    at: int
    width: int


@dataclass(frozen=True)
class Base:
    """A good file, its header's length and the numbers in it."""

    data: bytes
    header: int
    fields: tuple[Field, ...]


class _Walk:
    """Finds every number of a good header; the file is known to be whole."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.fields: list[Field] = []

    def number(self, width: int) -> int:
        self.fields.append(Field(self.at, width))
        self.at += width
        return int.from_bytes(self.data[self.at - width : self.at], "little")

    def text(self) -> None:
        length = self.number(8)
        self.at += length

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.text()
        elif kind == _ARRAY:
            inner, count = self.number(4), self.number(8)
            for place in range(count):
                # Of a long list a few are enough to change.
                kept = len(self.fields)
                self.value(inner)
                if place > 4:
                    del self.fields[kept:]
        else:
            self.number(_VALUE_BYTES[kind])

    def header(self) -> Base:
        self.number(4)
        self.number(4)
        tensors, keys = self.number(8), self.number(8)
        for _ in range(keys):
            self.text()
            self.value(self.number(4))
        for _ in range(tensors):
            self.text()
            for _ in range(self.number(4)):
                self.number(8)
            self.number(4)
            self.number(8)
        return Base(self.data, self.at, tuple(self.fields))


def bases(directory: Path) -> list[Base]:
    """Files of a few kinds, made anew: whole, fused, a shard of a split one, another alignment."""
    fused = moe_tensors(roles=("gate_up", "down"))
    aligned = {"general.alignment": 64, "%s.expert_count": 8, "%s.expert_used_count": 2}
    made = [
        write_gguf(directory / "plain.gguf"),
        write_gguf(directory / "fused.gguf", fused, arch="qwen3moe"),
        write_gguf(directory / "split.gguf", split_max_tensors=4),
        write_gguf(directory / "aligned.gguf", keys=aligned, n_tokens=0),
    ]
    return [_Walk(path.read_bytes()).header() for path in made]


def mutate(base: Base, chance: random.Random) -> bytes:
    """The base with one thing wrong, or a few."""
    data = bytearray(base.data)
    kind = chance.choice(("field",) * 5 + ("bytes",) * 3 + ("cut", "drop", "repeat", "swap"))
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(base.header)
        length = chance.choice((1, 2, 4, 8, 24, 100))
        if kind == "field":
            field = chance.choice(base.fields)
            was = int.from_bytes(data[field.at : field.at + field.width], "little")
            many = _HURTS + _HURTS_64 if field.width == 8 else _HURTS
            value = chance.choice(
                (*many, was + 1, was - 1, was * 2, was ^ (1 << chance.randrange(8 * field.width)))
            )
            data[field.at : field.at + field.width] = (value % (1 << (8 * field.width))).to_bytes(
                field.width, "little"
            )
        elif kind == "bytes":
            data[at : at + length] = chance.randbytes(min(length, len(data) - at))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + length]
        elif kind == "repeat":
            data[at:at] = data[at : at + length]
        else:
            other = chance.randrange(base.header)
            data[at : at + length], data[other : other + length] = (
                data[other : other + length],
                data[at : at + length],
            )
    return bytes(data)


def run_case(number: int, seed: int, files: list[Base], path: Path) -> str:
    """What is wrong with how one case ended; '' when nothing is."""
    chance = random.Random(f"{seed}-{number}")
    path.write_bytes(mutate(chance.choice(files), chance))
    started = time.perf_counter()
    try:
        read_model(path)
    except ModelError as error:
        if "\n" in str(error):
            return f"an error of several lines: {error!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    took = time.perf_counter() - started
    return f"took {took:.2f} s" if took > SECONDS else ""


def _limit() -> None:
    """From now on this process may take 256 MiB more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES,) * 2)


def _batch(first: int, count: int, seed: int, out: Connection) -> None:
    """Cases one after the other, each announced before it runs and answered after."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # ggml says there what it thinks of a header
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        files = bases(Path(directory))
        read_model(Path(directory) / "plain.gguf")  # what is loaded once is not a case's
        _limit()
        for number in range(first, first + count):
            out.send(number)
            out.send(run_case(number, seed, files, Path(directory) / "case.gguf"))


def findings(first: int, count: int, seed: int) -> list[tuple[int, str]]:
    """Number and complaint of each bad case. One that ends its process, or does not end, costs no other."""
    found: list[tuple[int, str]] = []
    spawn = multiprocessing.get_context("spawn")
    last = first + count
    while first < last:
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_batch, args=(first, min(BATCH, last - first), seed, theirs))
        process.start()
        theirs.close()
        running = None
        try:
            while True:
                if not ours.poll(60):
                    process.kill()
                    found.append((running if running is not None else first, "did not end within a minute"))
                    break
                said = ours.recv()
                if isinstance(said, int):
                    running = said
                    continue
                if said:
                    found.append((running or 0, said))
                first, running = (running or 0) + 1, None
        except EOFError:
            process.join()
            if running is not None:
                found.append((running, f"ended the process ({process.exitcode})"))
        if running is not None:
            first = running + 1
        process.join()
        if running is None and process.exitcode != 0:
            raise RuntimeError(f"a process of cases ended with {process.exitcode} between two of them")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="one case, in this process")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "case.gguf"
            print(run_case(options.only, options.seed, bases(Path(directory)), path) or "nothing wrong")
        return 0
    workers = os.cpu_count() or 1
    share = -(-options.cases // workers)
    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        starts = range(0, options.cases, share)
        counts = [min(share, options.cases - start) for start in starts]
        found = sorted(
            bad for part in pool.map(findings, starts, counts, [options.seed] * len(counts)) for bad in part
        )
    for number, said in found:
        print(f"case {number}: {said}")
    print(
        f"{options.cases} headers, seed {options.seed}, {time.monotonic() - started:.0f} s: {len(found)} bad"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
