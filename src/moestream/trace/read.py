"""Trace files into memory: whole ones, and what a run that was cut short has left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError, UsageError
from moestream.files import exists, open_file
from moestream.trace.meta import parse_meta
from moestream.trace.parse import check_columns, from_batches
from moestream.trace.schema import META_KEY, PARTIAL_SUFFIX, damaged, load_arrow
from moestream.trace.trace import Trace

_PARQUET_MAGIC = b"PAR1"
#: An Arrow IPC stream begins with this and the length of its schema.
STREAM_MAGIC = b"\xff\xff\xff\xff"
_READ_ROWS = 65_536


def partial_of(path: Path) -> Path:
    """What a trace is called while it is being written."""
    if not path.name:
        raise UsageError(f"{str(path)!r} is no name of a trace: name a file")
    return path.with_name(path.name + PARTIAL_SUFFIX)


def say_to_stderr(text: str) -> None:
    print(f"moestream: {text}", file=sys.stderr, flush=True)


def read_trace(path: str | Path, say: Callable[[str], None] = say_to_stderr) -> Trace:
    """A trace file as a value. ``say`` is told in one line when the file is not a finished one.

    Where only ``path.partial`` is there, or is named itself, it is read up to its last whole batch. Raises
    RefusedError when there is neither, for what is no trace, a damaged or truncated one and a newer schema.
    """
    asked = Path(path)
    partial = partial_of(asked)
    found = partial if not exists(asked) and exists(partial) else asked
    with open_file(found, f"record one with `moestream run --trace {asked}`") as file:
        magic = file.read(len(_PARQUET_MAGIC))
    if magic == STREAM_MAGIC:
        trace = _read_partial(found)
        say(_of_partial(found, len(trace.steps["step"])))
        return trace
    if magic == _PARQUET_MAGIC:
        if exists(partial):
            say(f"{partial} is of a later run that has not ended or was cut short; read {found}")
        return _read_parquet(found)
    raise _no_trace(found, magic)


def _of_partial(partial: Path, steps: int) -> str:
    """What is to be known of a partial file of which so many steps were read."""
    about = f"{partial} is of a run that has not ended or was cut short: "
    if not steps:
        return about + "it holds no steps, for a run's first ones are written together"
    whole = partial.with_name(partial.name.removesuffix(PARTIAL_SUFFIX))
    return f"{about}read its first {steps} steps (`moestream trace recover {whole}` finishes it)"


def _no_trace(path: Path, magic: bytes) -> RefusedError:
    why = "is not a trace" if magic else "is empty: nothing was recorded in it"
    return RefusedError(f"{path} {why}; record one with `moestream run --trace FILE`")


def is_trace(path: Path) -> bool:
    """Is the file a whole trace, of whatever version?"""
    if not path.is_file():
        return False
    pa = load_arrow()
    with open_file(path, "name another file") as file:
        if file.read(len(_PARQUET_MAGIC)) != _PARQUET_MAGIC:
            return False
        try:
            return META_KEY in (pa.parquet.read_metadata(file).metadata or {})
        except (pa.ArrowException, OSError):
            return False


@contextmanager
def partial_stream(partial: Path) -> Iterator[Any]:
    """The Arrow stream of a partial file. RefusedError when not even its schema is there."""
    pa = load_arrow()
    with open_file(partial, "name a trace") as file:
        if not file.peek(1):
            raise _no_trace(partial, b"")
        try:
            options = pa.ipc.IpcReadOptions(use_threads=False)
            stream = pa.ipc.open_stream(file, options=options)
        except (pa.ArrowException, OSError) as error:
            raise damaged(partial, _first_line(error)) from None
        with stream:
            yield stream


def whole_batches(stream: Any) -> Iterator[Any]:
    """The batches with rows of a stream that may end anywhere, up to the last whole one."""
    pa = load_arrow()
    while True:
        try:
            batch = stream.read_next_batch()
            batch.validate(full=True)
        except (StopIteration, pa.ArrowException, OSError):
            return
        if batch.num_rows:
            yield batch


def _read_partial(path: Path) -> Trace:
    with partial_stream(path) as stream:
        meta = parse_meta(path, stream.schema.metadata)
        check_columns(path, stream.schema)
        return from_batches(path, meta, whole_batches(stream))


def _read_parquet(path: Path) -> Trace:
    pa = load_arrow()
    try:
        # Opened here: pyarrow opens only names that are UTF-8.
        with open_file(path, "name a trace") as file, pa.parquet.ParquetFile(file) as parquet:
            meta = parse_meta(path, parquet.metadata.metadata)
            check_columns(path, parquet.schema_arrow)
            return from_batches(path, meta, parquet.iter_batches(_READ_ROWS, use_threads=False))
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, _first_line(error)) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
