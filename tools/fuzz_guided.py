"""Looks for wrong headers that lead where no header led before: ``fuzz_header.py`` guided by coverage.

``python tools/fuzz_guided.py [--seconds 300]``. Needs atheris (``pip install atheris``), which watches every branch of
``moestream.model`` and changes those headers further that took a new one. An input is a header; the file it is tried as
has room for any tensors behind it and the other shards of a split model beside it. Whatever is neither a model that
makes sense nor a ModelError of one line, takes a second of CPU or 256 MiB, is kept in ``build/fuzz-guided/finds`` with
what was wrong; the headers worth going on from stay in ``build/fuzz-guided/corpus``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moestream.model import Model

#: What is watched: all that reads headers.
WATCHED = ("moestream.model", "moestream.unchanged")
HOME = Path("build/fuzz-guided")
#: Bytes behind a header, holes: more than any of the seeds' tensors need, not many more that a header can be walked in.
ROOM = 400_000
#: The longest input: three times the longest seed.
MOST_BYTES = 64 << 10
_SEEDED = re.compile(r"INITED cov: (\d+) ft: (\d+)")
_COVERED = re.compile(r"cov: (\d+) ft: (\d+)")
_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def complaint(header: bytes, path: Path) -> str:
    """What is wrong with how reading ``header``, tried as the file ``path``, ended; '' when nothing is."""
    from fuzz_header import SECONDS

    from moestream.errors import ModelError
    from moestream.model import read_model

    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + ROOM)
    started = time.process_time()
    try:
        senseless = _senseless(read_model(path))
    except ModelError as error:
        senseless = "an error of several lines" if "\n" in str(error) else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    took = time.process_time() - started
    return senseless or (f"took {took:.2f} s" if took > SECONDS else "")


def _senseless(model: Model) -> str:
    """What cannot be true of a model; '' when all can."""
    for tensor in model.tensors:
        if not 0 < tensor.offset <= tensor.offset + tensor.nbytes <= model.shards[tensor.shard].bytes:
            return f"tensor {tensor.name!r} lies outside its file"
    for slab in (slab for bank in model.banks for slab in bank.tensors):
        whole = next(tensor for tensor in model.tensors if tensor.name == slab.name)
        if slab.slab_bytes * slab.count != whole.nbytes:
            return f"the slabs of {slab.name} are not the whole of it"
    if not all(1 <= bank.used <= bank.count for bank in model.banks):
        return "a bank uses more experts than it has"
    return "" if 0 <= model.expert_bytes <= model.bytes else "more expert bytes than bytes"


def seeds(directory: Path) -> tuple[list[bytes], Path]:
    """The headers to begin with, and the name to try them under: the first shard's of a split model whose other shards
    are in ``directory``."""
    from fuzz_header import bases

    headers = [base.data[: base.header] for base in bases(directory)]
    return headers, next(directory.glob("split-00001-of-*.gguf"))


def words(headers: list[bytes]) -> set[str]:
    """What llama.cpp calls things, found in headers: keys and tensors."""
    found = {word.decode() for header in headers for word in re.findall(rb"[a-z_]+(?:\.[a-z_0-9]+)+", header)}
    return found | {"blk.0.ffn_up_gate_exps.weight", "blk.0.ffn_gate.0.weight", "blk.0.ffn_up_chexps.weight"}


def watched() -> list[FunctionType]:
    """The functions of the modules that are watched; they are imported."""
    return [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, FunctionType) and str(thing.__module__).startswith(WATCHED)
    ]


def watch(directory: Path, options: list[str]) -> None:
    """The process that is watched; ends with libFuzzer's own exit."""
    import atheris
    import fuzz_header

    headers, path = seeds(directory)
    (directory / "words").write_text("".join(f'"{word}"\n' for word in sorted(words(headers))))
    for header in headers:
        (HOME / "corpus" / hashlib.sha256(header).hexdigest()[:16]).write_bytes(header)
    seen: set[str] = set()
    complaint(headers[0], path)  # what is loaded once is not a header's
    for function in watched():
        atheris.instrument_func(function)

    def one(header: bytes) -> None:
        said = complaint(header, path)
        kind = re.sub(r"[\d'\"].*", "", said)
        if said and kind not in seen:
            seen.add(kind)
            keep(header, said)

    atheris.Setup([sys.argv[0], str(HOME / "corpus"), f"-dict={directory / 'words'}", *options], one)
    fuzz_header._limit()
    atheris.Fuzz()


def keep(header: bytes, said: str) -> None:
    """A find on disk, and a line of it."""
    path = HOME / "finds" / hashlib.sha256(header).hexdigest()[:16]
    path.with_suffix(".gguf").write_bytes(header)
    path.with_suffix(".txt").write_text(said + "\n")
    print(f"FIND {path}: {said}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--watched", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print(f"guided fuzzing needs atheris: {sys.executable} -m pip install atheris", file=sys.stderr)
        return 1
    if options.watched:
        # Slow units: by the clock of a box that may be busy; ours is the CPU's.
        limits = [f"-max_total_time={options.seconds}", "-timeout=60", "-report_slow_units=60"]
        limits += ["-rss_limit_mb=0", "-detect_leaks=0"]
        prefix = f"-artifact_prefix={HOME / 'finds'}/"
        watch(options.watched, [*limits, f"-max_len={MOST_BYTES}", "-print_final_stats=1", prefix])
        return 0
    return _report(options.seconds)


def _report(seconds: int) -> int:
    """Runs the watched process, and says what it did in a few lines."""
    for name in ("corpus", "finds"):
        (HOME / name).mkdir(parents=True, exist_ok=True)
    before = set((HOME / "finds").iterdir())
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        command = [sys.executable, __file__, "--seconds", str(seconds), "--watched", directory]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    seeded, covered = _SEEDED.search(done.stderr), _COVERED.findall(done.stderr)
    runs = _RUNS.search(done.stderr)
    found = sorted(set((HOME / "finds").iterdir()) - before)
    for path in found:
        with contextlib.suppress(UnicodeDecodeError):
            print(f"{path}: {path.read_text().strip()}" if path.suffix == ".txt" else path)
    if runs is None or seeded is None:
        print(done.stderr[-4000:], file=sys.stderr)
        print(f"the watched process ended with {done.returncode}", file=sys.stderr)
        return 1
    print(
        f"{runs[1]} headers in {seconds} s: branches {seeded[1]} -> {covered[-1][0]}, features {seeded[2]} -> "
        f"{covered[-1][1]}, {sum(1 for _ in (HOME / 'corpus').iterdir())} headers kept, {len(found)} finds"
    )
    return 1 if found or done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
