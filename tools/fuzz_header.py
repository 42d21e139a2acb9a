"""Reads models whose headers are wrong: no crash, no hang, no huge allocation, never another error than a ModelError.

``python tools/fuzz_header.py [--cases 100000] [--seed 0]``. Each case changes one field of a good header (a count, a
length, a type, an extent, an offset) to a number that hurts, or some bytes anywhere in it, or cuts, repeats or drops a
piece. A case is its number and the seed: ``--only N`` runs one of them, in this process, with its traceback.

With ``--load`` the models are whole ones, and each case is planned, loaded by llama.cpp and asked for a token: only
what numbers mean is changed, for the rest would not come so far. Any error must be one of ours, in one line.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import moestream
from ggufs import moe_tensors, write_gguf
from moestream.errors import ModelError, MoestreamError
from moestream.make import make_model
from moestream.model import read_model

#: What a case may take: seconds, and bytes of address space beyond what the process has when it begins.
SECONDS, BYTES = 1.0, 256 << 20
#: The same where a model is loaded.
LOAD_SECONDS = 10.0
#: Cases a process runs before it is replaced.
BATCH = 500
#: Whole models of layouts that have little in common, whose headers ``--load`` changes.
LOADED = ("olmoe", "deepseek2", "gpt-oss", "qwen3next", "jamba", "grovemoe", "llama4", "gemma4")
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
    """A good file, its header's length and the numbers in it; ``values``: those that lay out no header."""

    data: bytes
    header: int
    fields: tuple[Field, ...]
    values: tuple[Field, ...]


class _Walk:
    """Finds every number of a good header; the file is known to be whole."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.fields: list[Field] = []
        self.values: list[Field] = []

    def meant(self, width: int) -> None:
        """A number that can be any other without the header falling apart."""
        self.number(width)
        self.values.append(self.fields[-1])

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
                kept = len(self.fields), len(self.values)
                self.value(inner)
                if place > 4:
                    del self.fields[kept[0] :], self.values[kept[1] :]
        else:
            self.meant(_VALUE_BYTES[kind])

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
                self.meant(8)
            self.meant(4)
            self.number(8)
        return Base(self.data, self.at, tuple(self.fields), tuple(self.values))


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


def loadable(directory: Path) -> list[Base]:
    """Models that llama.cpp runs, made where they are not there yet."""
    made = []
    for arch in LOADED:
        path = directory / f"{arch}.gguf"
        if not path.exists():
            make_model(arch, "tiny", "MXFP4" if arch == "gpt-oss" else "Q4_K", path)
        made.append(_Walk(path.read_bytes()).header())
    return made


def hurt(data: bytearray, field: Field, chance: random.Random) -> None:
    """Another number in the place of one."""
    was = int.from_bytes(data[field.at : field.at + field.width], "little")
    many = _HURTS + _HURTS_64 if field.width == 8 else _HURTS
    value = chance.choice(
        (*many, was + 1, was - 1, was * 2, was // 2, was ^ (1 << chance.randrange(8 * field.width)))
    )
    data[field.at : field.at + field.width] = (value % (1 << (8 * field.width))).to_bytes(
        field.width, "little"
    )


def mutate_values(base: Base, chance: random.Random) -> bytes:
    """The base with one number wrong, or a few, its layout untouched."""
    data = bytearray(base.data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        hurt(data, chance.choice(base.values), chance)
    return bytes(data)


def mutate(base: Base, chance: random.Random) -> bytes:
    """The base with one thing wrong, or a few."""
    data = bytearray(base.data)
    kind = chance.choice(("field",) * 5 + ("bytes",) * 3 + ("cut", "drop", "repeat", "swap"))
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(base.header)
        length = chance.choice((1, 2, 4, 8, 24, 100))
        if kind == "field":
            hurt(data, chance.choice(base.fields), chance)
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


def run_case(number: int, seed: int, files: list[Base], path: Path, load: bool = False) -> str:
    """What is wrong with how one case ended; '' when nothing is."""
    chance = random.Random(f"{seed}-{number}")
    path.write_bytes((mutate_values if load else mutate)(chance.choice(files), chance))
    ours, most = (MoestreamError, LOAD_SECONDS) if load else (ModelError, SECONDS)
    started = time.perf_counter()
    try:
        if load:
            _load(path)
        else:
            read_model(path)
    except ours as error:
        if "\n" in str(error):
            return f"an error of several lines: {error!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    took = time.perf_counter() - started
    return f"took {took:.2f} s" if took > most else ""


def _load(path: Path) -> None:
    with moestream.Llama(
        path, "1GiB", "arena+sync", n_ctx=32, n_batch=4, n_threads=1, n_threads_batch=1, governor=False
    ) as llama:
        llama.eval([1])


def _limit() -> None:
    """From now on this process may take 256 MiB more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES,) * 2)


def _batch(first: int, count: int, seed: int, models: Path | None, directory: Path, out: Connection) -> None:
    """Cases one after the other, each announced before it runs and answered after."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # ggml says there what it thinks of a header
    os.environ["GGML_NO_BACKTRACE"] = "1"  # else an assertion that ends the process starts a debugger
    files = loadable(models) if models else bases(directory)
    case = directory / "case.gguf"
    if not models:
        read_model(directory / "plain.gguf")  # what is loaded once is not a case's
        _limit()
    for number in range(first, first + count):
        out.send(number)
        out.send(run_case(number, seed, files, case, load=models is not None))


def findings(first: int, count: int, seed: int, models: Path | None = None) -> list[tuple[int, str]]:
    """Number and complaint of each bad case. One that ends its process, or does not end, costs no other. ``models``: a
    directory of whole models, which are loaded."""
    found: list[tuple[int, str]] = []
    last = first + count
    while first < last:
        # Not the process's own: one that dies would leave it.
        with _directory() as directory:
            first = _run_batch(first, min(BATCH, last - first), seed, models, directory, found)
    return found


@contextmanager
def _directory() -> Iterator[Path]:
    """In memory where that can be had."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        yield Path(directory)


def _run_batch(
    first: int,
    count: int,
    seed: int,
    models: Path | None,
    directory: Path,
    found: list[tuple[int, str]],
) -> int:
    """One process's cases; what is wrong goes to ``found``. Returns the number of the case to go on with."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_batch, args=(first, count, seed, models, directory, theirs))
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
    return first


def _all_findings(cases: int, seed: int, models: Path | None) -> list[tuple[int, str]]:
    workers = os.cpu_count() or 1
    starts = range(0, cases, -(-cases // workers))
    counts = [min(starts.step, cases - start) for start in starts]
    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(findings, starts, counts, repeat(seed), repeat(models))
        return sorted(bad for part in parts for bad in part)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--load", action="store_true", help="load whole models and ask each for a token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="one case, in this process")
    options = parser.parse_args()
    started = time.monotonic()
    with _directory() as directory:
        files = loadable(directory) if options.load else bases(directory)
        if options.only is not None:
            case = directory / "case.gguf"
            print(run_case(options.only, options.seed, files, case, options.load) or "nothing wrong")
            return 0
        del files
        found = _all_findings(options.cases, options.seed, directory if options.load else None)
    for number, said in found:
        print(f"case {number}: {said}")
    print(
        f"{options.cases} headers, seed {options.seed}, {time.monotonic() - started:.0f} s: {len(found)} bad"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
