"""Trace files into memory: whole ones, and what a run that was cut short has left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError, UsageError
from moestream.trace.rows import from_batches
from moestream.trace.schema import META_KEY, PARTIAL_SUFFIX, damaged, load_arrow, parse_meta
from moestream.trace.trace import Trace

_PARQUET_MAGIC = b"PAR1"
#: An Arrow IPC stream begins with this and the length of its schema.
STREAM_MAGIC = b"\xff\xff\xff\xff"
_READ_ROWS = 65_536


def partial_of(path: Path) -> Path:
    """What a trace is called while it is being written."""
    if not path.name:
        raise UsageError("an empty name is no trace: name a file")
    return path.with_name(path.name + PARTIAL_SUFFIX)


def say_to_stderr(text: str) -> None:
    print(f"moestream: {text}", file=sys.stderr, flush=True)


def read_trace(path: str | Path, say: Callable[[str], None] = say_to_stderr) -> Trace:
    """A trace file as a value. ``say`` is told in one line when the file is not a finished one.

    Where only ``path.partial`` is there, or is named itself, it is read up to its last whole batch. Raises UsageError
    when there is neither, RefusedError for what is no trace, a damaged or truncated one and a newer schema.
    """
    asked = Path(path)
    found, partial = asked, partial_of(asked)
    if not asked.exists() and partial.exists():
        found = partial
    try:
        magic = _magic(found)
        if magic == STREAM_MAGIC:
            trace = _read_partial(found)
            whole = found.with_name(found.name.removesuffix(PARTIAL_SUFFIX))
            say(
                f"{found} is of a run that has not ended or was cut short: read its first "
                f"{len(trace.steps['step'])} steps (`moestream trace recover {whole}` finishes it)"
            )
            return trace
        if magic == _PARQUET_MAGIC:
            if partial.exists():
                say(f"{partial} is of a later run that has not ended or was cut short; read {found}")
            return _read_parquet(found)
    except OSError as error:
        raise RefusedError(f"{found} cannot be read: {error.strerror or error}") from None
    if found.stat().st_size == 0:
        raise RefusedError(f"{found} is empty: the run that was to write it ended before its first step")
    raise RefusedError(f"{found} is not a trace: record one with `moestream run --trace FILE`")


def _magic(path: Path) -> bytes:
    if not path.exists():
        raise UsageError(f"there is no file {path}: record one with `moestream run --trace {path}`")
    if not path.is_file():
        raise RefusedError(f"{path} is not a file: name a trace")
    with path.open("rb") as file:
        return file.read(4)


def is_trace(path: Path) -> bool:
    """Is the file a whole trace, of whatever version?"""
    if not path.is_file() or _magic(path) != _PARQUET_MAGIC:
        return False
    pa = load_arrow()
    try:
        return META_KEY in (pa.parquet.read_metadata(path).metadata or {})
    except (pa.ArrowInvalid, OSError):
        return False


@contextmanager
def partial_stream(partial: Path) -> Iterator[Any]:
    """The Arrow stream of a partial file. RefusedError when not even its schema is there."""
    pa = load_arrow()
    with partial.open("rb") as file:
        try:
            options = pa.ipc.IpcReadOptions(use_threads=False)
            stream = pa.ipc.open_stream(file, options=options)
        except (pa.ArrowException, OSError) as error:
            raise damaged(partial, _first_line(error)) from None
        with stream:
            yield stream


def whole_batches(stream: Any) -> Iterator[Any]:
    """The batches of a stream that may end anywhere, up to the last whole one."""
    pa = load_arrow()
    while True:
        try:
            batch = stream.read_next_batch()
            batch.validate()
        except (StopIteration, pa.ArrowException, OSError):
            return
        yield batch


def _read_partial(path: Path) -> Trace:
    with partial_stream(path) as stream:
        meta = parse_meta(path, stream.schema.metadata)
        return from_batches(path, meta, whole_batches(stream))


def _read_parquet(path: Path) -> Trace:
    pa = load_arrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            meta = parse_meta(path, file.metadata.metadata)
            return from_batches(path, meta, file.iter_batches(_READ_ROWS, use_threads=False))
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, _first_line(error)) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
