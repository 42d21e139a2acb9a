"""A running engine's steps into a Parquet file, such that a crash loses at most the last few steps.

A Parquet file without its footer is lost, so while the engine runs the rows go to ``FILE.partial``, an Arrow IPC
stream, one record batch every few steps. Closing turns it into FILE, batch by batch. The writer holds a lock on the
partial file: one without a lock was left by a process that died, and ``recover`` finishes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from moestream.errors import RefusedError, UsageError
from moestream.files import check_directory, exists, lack_of_room, open_file
from moestream.nearest import nearest_file
from moestream.stats import Step
from moestream.trace.meta import complete_meta, parse_meta
from moestream.trace.read import STREAM_MAGIC, is_trace, partial_of, partial_stream, whole_batches
from moestream.trace.rows import Recorded, empty_batch, route_count, to_batch
from moestream.trace.schema import arrow_schema, load_arrow

#: Rows are written when so many steps, rows or seconds have gathered: this bounds memory and what a crash loses.
FLUSH_STEPS = 32
FLUSH_ROWS = 32_768
FLUSH_SECONDS = 5.0
#: Rows of a row group of the finished file, at least (the last has fewer). Writing one takes about 2 kB a row.
GROUP_ROWS = 8_192

_NO_EVENTS: dict[str, Any] = dict.fromkeys(
    ("bank", "token", "tokens", "rows", "k", "wishes", "ids", "wish_ids"), ()
)


class TraceWriter:
    """A TraceSink that writes ``path``, a ``.parquet`` file. Not thread-safe.

    ``begin`` once, then ``step`` after each step, then ``close`` (or ``discard``: nothing is left behind). The file
    appears whole when it is closed. ``model_paths`` are never written to. Raises UsageError for a path that is not to
    be replaced, RefusedError when the disk does not take it: steps written until then stay in ``path.partial``.
    """

    def __init__(
        self, path: str | Path, model_paths: Sequence[str | Path] = (), meta: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        check_target(self.path, model_paths)
        # Now, so that whoever measures this process's memory next counts what it takes.
        load_arrow()
        self._target = self.path.resolve()  # a link is followed, not replaced
        # Tried now and made in ``begin``: whatever ends the load of a model, a signal too, leaves nothing behind.
        _remove_partial(_lock_partial(self._target), self._target)
        self._file: IO[bytes] | None = None
        self._stream: Any = None
        self._meta: dict[str, Any] = {}
        self._schema: Any = None
        self._recorded: list[Recorded] = []
        self._rows = self._routes = 0
        self._holds_steps = False
        self._last_index: int | None = None
        self._flushed_at = time.monotonic()
        if meta is not None:
            self.begin(dict(meta))

    def begin(self, meta: dict[str, Any]) -> None:
        """``meta`` as ``Trace.meta`` says."""
        pa = load_arrow()
        self._meta = complete_meta(meta)
        self._schema = arrow_schema(self._meta)
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        self._file = _lock_partial(self._target)
        with self._writing():
            self._stream = pa.ipc.new_stream(self._file, self._schema, options=options)
            # The schema goes out with the first batch: whatever ends the run now leaves a file that can be read.
            self._stream.write_batch(empty_batch(self._schema))
            self._flush_file()

    def step(self, index: int, phase: str, step: Step, events: Mapping[str, Any]) -> None:
        """One step: its number since load, 'prefill' or 'decode', what it did, and the arrays of EVENTS."""
        if self._file is None:
            return  # not begun, or the error that closed it has been raised
        self._add(Recorded(index, phase, step, events))
        self._last_index = index
        if (
            len(self._recorded) >= FLUSH_STEPS
            or self._rows >= FLUSH_ROWS
            or time.monotonic() - self._flushed_at >= FLUSH_SECONDS
        ):
            self._flush()

    def close(self, events: Mapping[str, Any] | None = None) -> None:
        """Finish the file. ``events``: the slabs that no step has finished. Idempotent."""
        if self._file is None:
            return
        if events is not None and self._last_index is not None and len(events["slab_expert"]):
            self._add(Recorded(self._last_index, "", None, {**events, **_NO_EVENTS}))
        self._flush()
        self._finish()

    def _finish(self) -> None:
        with self._writing():
            self._stream.close()
            self._flush_file()
            finish(self._target)
        self._leave()

    def discard(self) -> None:
        """Nothing came of it: leave nothing behind."""
        if self._file is not None:
            _remove_partial(self._file, self._target)
            self._leave()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, recorded: Recorded) -> None:
        self._recorded.append(recorded)
        self._rows += recorded.rows

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if not self._recorded:
            return
        batch = to_batch(self._recorded, self._meta, self._schema, self._routes)
        self._routes += route_count(self._recorded)
        self._recorded, self._rows = [], 0
        with self._writing():
            self._stream.write_batch(batch)
            self._flush_file()
        self._holds_steps = True

    def _flush_file(self) -> None:
        assert self._file is not None
        self._file.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A file that could not be written is let go: the steps it holds so far can be recovered, and one without any
        is of no use."""
        try:
            yield
        except OSError as error:
            if self._holds_steps:
                self._leave()
            else:
                self.discard()
            raise write_error(self.path, error) from None

    def _leave(self) -> None:
        file, self._file = self._file, None
        self._stream = None
        self._recorded = []
        if file is not None:
            # What a full disk refused is refused again, and has been reported.
            with contextlib.suppress(OSError):
                file.close()


def check_target(path: Path, model_paths: Sequence[str | Path] = ()) -> None:
    """Raises UsageError unless ``path`` can become a trace: a ``.parquet`` file in a directory that is there, which is
    new or a trace that may be replaced, and no model."""
    if not path.name:
        raise UsageError("--trace: an empty name: name a .parquet file")
    if path.suffix != ".parquet":
        raise UsageError(f"--trace {path}: a trace is a Parquet file: name it {path.with_suffix('.parquet')}")
    check_directory(path, "--trace")
    if not exists(path):
        return
    if any(exists(Path(model)) and path.samefile(model) for model in model_paths):
        raise UsageError(f"--trace {path}: this is the model: name another file")
    if not is_trace(path):
        raise UsageError(f"--trace {path} exists and is not a trace: name another file")


def _lock_partial(target: Path) -> IO[bytes]:
    """The partial file beside ``target``, empty, locked and ours. Raises UsageError when it is another's or holds steps
    of a run that was cut short, RefusedError when it cannot be made."""
    partial = partial_of(target)
    while True:
        file = _open_partial(target)
        try:
            lock(file, target)
            if _holds_steps(partial):
                raise UsageError(
                    f"{partial} holds a trace that was cut short: finish it with "
                    f"`moestream trace recover {target}` or remove it"
                )
        except BaseException as error:
            # Where files cannot be locked, the one just made goes again.
            if isinstance(error, RefusedError) and file.tell() == 0:
                partial.unlink(missing_ok=True)
            file.close()
            raise
        # Whoever had the lock before may have removed the file we wait on.
        if partial.exists() and os.path.samestat(os.fstat(file.fileno()), partial.stat()):
            file.truncate(0)
            return file
        file.close()


def _open_partial(target: Path) -> IO[bytes]:
    """The partial file beside ``target`` for appending, made where there is none. Raises UsageError for something else
    of its name (a pipe would wait for its reader), RefusedError when it cannot be made."""
    partial = partial_of(target)
    if exists(partial) and not partial.is_file():
        raise UsageError(f"{partial} is not a regular file: remove it or name another trace")
    try:
        return partial.open("ab")
    except OSError as error:
        raise write_error(target, error) from None


def _remove_partial(file: IO[bytes], target: Path) -> None:
    """Remove the partial file that ``_lock_partial`` made, and let it go."""
    partial_of(target).unlink(missing_ok=True)
    # What a full disk refused is refused again, and has been reported.
    with contextlib.suppress(OSError):
        file.close()


def lock(file: IO[bytes], target: Path) -> None:
    """Hold the partial file until it is closed. Raises UsageError when another process does, RefusedError where files
    cannot be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{partial_of(target)} is being written by another run: name another file") from None
    except OSError as error:
        raise write_error(target, error) from None


def _holds_steps(partial: Path) -> bool:
    """Is there a whole batch with rows in it? Raises UsageError when it is not ours to empty."""
    with open_file(partial, "name another file") as file:
        if not STREAM_MAGIC.startswith(file.read(len(STREAM_MAGIC))):
            raise UsageError(f"{partial} exists and is not a trace: name another file")
    try:
        with partial_stream(partial) as stream:
            return next(whole_batches(stream), None) is not None
    except RefusedError:
        return False  # cut short within its schema


def finish(target: Path) -> int:
    """Turn ``target.partial`` into ``target``, holding one row group at a time, and remove it. The steps it holds.
    Raises OSError when the disk does not take it; then the partial file stays."""
    pa = load_arrow()
    partial = partial_of(target)
    fresh = target.with_name(f".{target.name}.new")
    steps = 0
    with partial_stream(partial) as stream:
        check_target(target)
        try:
            # The file is opened here: pyarrow opens only names that are UTF-8.
            with fresh.open("wb") as file:
                with pa.parquet.ParquetWriter(file, stream.schema, compression="zstd") as parquet:
                    for group in _groups(whole_batches(stream)):
                        table = pa.Table.from_batches(group)
                        steps += table.num_rows - table["phase"].null_count
                        parquet.write_table(table, row_group_size=table.num_rows)
                file.flush()
                os.fsync(file)
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    partial.unlink()
    return steps


def _groups(batches: Iterator[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if sum(one.num_rows for one in group) >= GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group


def recover(path: Path) -> int:
    """Finish the trace a process that died has left beside ``path``. The steps it holds. Raises UsageError
    while its process lives, RefusedError when there is none, nothing can be read of it or the disk does not take it."""
    target = path.resolve()
    if target.name.endswith(".partial"):
        target = target.with_name(target.name.removesuffix(".partial"))
    partial = partial_of(target)
    if not exists(partial):
        if exists(target) and is_trace(target):
            raise RefusedError(f"{path} is whole: there is nothing to recover")
        raise RefusedError(f"there is no file {partial}{nearest_file(partial)}: nothing to recover")
    check_target(target)
    try:
        with _open_partial(target) as file:
            lock(file, target)
            with partial_stream(partial) as stream:
                parse_meta(partial, stream.schema.metadata)
            return finish(target)
    except OSError as error:
        raise write_error(target, error) from None


def write_error(path: Path, error: OSError) -> RefusedError:
    """One line for a disk that does not take a trace."""
    partial = partial_of(path)
    kept = (
        f"; what was recorded is in {partial} (`moestream trace recover {path}`)" if partial.exists() else ""
    )
    if lack := lack_of_room(error):
        return RefusedError(f"{path} could not be written, {lack}{kept}")
    return RefusedError(f"cannot write {path}: {error.strerror or error}: name another place{kept}")
