"""A benchmark's directory: what was asked, in ``setup.json``, and every run that has ended, a line of ``runs.jsonl``.

The two are all that ``--resume`` needs. A line is whole or it is dropped: a benchmark that is killed loses the run in
flight and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError, UsageError
from moestream.files import exists, read_bytes, read_json
from moestream.lab.record_kinds import MOST_BYTES, NOT_JSON, parse_record
from moestream.lab.runs import RUNS
from moestream.lab.validity import Record, check_one_box
from moestream.report import write_json

SETUP = "setup.json"
REPORT = "report.md"
SUMMARY = "summary.json"
#: May be another in a benchmark that goes on: more rounds of the same, from elsewhere, and what is only told.
_MAY_DIFFER = ("repeats", "command", "out", "date", "left_out")
_LONGEST_SHOWN = 60
#: Directories this process measures into, by device and inode, with the descriptor that holds each until it ends.
_claimed: dict[tuple[int, int], int] = {}


def read_runs(path: Path) -> list[Record]:
    """The whole records of a ``runs.jsonl``, in the order they were made; [] without a file.

    What follows the last line end, or a last line that is no JSON, was cut short by a kill or a full disk and is left
    out. Raises RefusedError for a file that is damaged before that, or made by a newer version."""
    return _parsed(path)[0]


def drop_torn_line(path: Path) -> list[Record]:
    """``read_runs``, and the file is cut to what was read, so that lines can be added to it."""
    records, whole = _parsed(path)
    if path.exists() and path.stat().st_size != whole:
        with path.open("r+b") as file:
            file.truncate(whole)
    return records


def open_journal(out: Path, asked: Mapping[str, Any], *, resume: bool, force: bool) -> list[Record]:
    """Make ``out`` ready for a benchmark and return the records it already holds.

    ``asked``: everything that decides what is measured; written to ``setup.json``. Raises UsageError when ``out`` holds
    a benchmark and neither is said, RefusedError when ``resume`` finds another setup, another box or no
    benchmark in a directory that is not empty."""
    if resume and force:
        raise UsageError("--resume goes on and --force begins anew: say one of the two")
    try:
        return _opened(out, asked, resume=resume, force=force)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror or error}: name another directory") from None


def _opened(out: Path, asked: Mapping[str, Any], *, resume: bool, force: bool) -> list[Record]:
    setup_path, runs_path = out / SETUP, out / RUNS
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: that is a file, name a directory")
    ours = setup_path.exists() or runs_path.exists()
    if out.exists() and not ours and any(out.iterdir()):
        raise RefusedError(
            f"--out {out}: holds files that are no benchmark's: name a new or an empty directory"
        )
    if ours:
        _claim(out)
    records: list[Record] = []
    if ours and force:
        _clear(out)
    elif ours and not resume:
        raise UsageError(
            f"--out {out}: a benchmark is there already: --resume goes on with it, --force begins anew"
        )
    elif ours:
        _check_same(setup_path, asked)
        records = drop_torn_line(runs_path)
        _drop_unfinished(out)
        check_one_box([*records, {"asked": "", "box": asked.get("box")}])
    out.mkdir(parents=True, exist_ok=True)
    _claim(out)
    write_json(setup_path, dict(asked))
    return records


def _claim(out: Path) -> None:
    """Keep other processes from measuring into the directory. Raises UsageError where one does."""
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    status = os.fstat(descriptor)
    which = status.st_dev, status.st_ino
    if which in _claimed:
        os.close(descriptor)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EWOULDBLOCK:
            raise UsageError(f"--out {out}: another run is writing there: name another directory") from None
        return  # this file system has no locks
    _claimed[which] = descriptor


def _parsed(path: Path) -> tuple[list[Record], int]:
    """The records and how many bytes of the file they take."""
    if not exists(path):
        return [], 0
    content = read_bytes(path, "begin anew with --force", MOST_BYTES)
    records: list[Record] = []
    end = 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            records.append(parse_record(line))
        except ValueError as error:
            if number == len(lines) - 1 and str(error) == NOT_JSON:
                break
            raise RefusedError(
                f"{path}: line {number} {error}: restore it or begin anew with --force"
            ) from None
        end += len(line) + 1
    return records, end


def _check_same(path: Path, asked: Mapping[str, Any]) -> None:
    """Raises RefusedError that names what differs from the setup a benchmark was begun with."""
    try:
        begun = read_json(path, "begin anew with --force")
        different = [
            f"{name}{_change(begun.get(name), asked.get(name))}"
            for name in dict.fromkeys([*begun, *asked])
            if name not in _MAY_DIFFER
            and name != "box"  # compared by what makes a box, not by how much memory is free
            and _plain(begun.get(name)) != _plain(asked.get(name))
        ]
    except (ValueError, TypeError, AttributeError):
        raise RefusedError(
            f"{path}: cannot be read, so nobody knows what was measured: begin anew with --force"
        ) from None
    if different:
        raise RefusedError(
            f"{path.parent} was begun with another setup: {'; '.join(different)}: "
            "say the same again, or name another --out"
        )


def _plain(value: Any) -> Any:
    """As it is after a round trip through JSON."""
    return json.loads(json.dumps(value))


def _change(before: Any, now: Any) -> str:
    texts = [json.dumps(value) for value in (before, now)]
    if max(len(text) for text in texts) > _LONGEST_SHOWN:
        return ""
    return f" was {texts[0]}, is {texts[1]}"


def _clear(out: Path) -> None:
    """Remove what a benchmark wrote, and only that."""
    traces = {Path(record["trace"]).name for record in _written(out / RUNS) if record.get("trace")}
    traces = {name for name in traces if name.endswith(".parquet")}
    for name in (RUNS, SETUP, REPORT, SUMMARY, *sorted(traces)):
        (out / name).unlink(missing_ok=True)
    _drop_unfinished(out)


def _drop_unfinished(out: Path) -> None:
    """Remove the trace of a run that was killed: no record is of it, and the run will be made again."""
    for trace in out.glob("*.parquet.partial"):
        trace.unlink()


def _written(path: Path) -> list[Record]:
    try:
        return read_runs(path)
    except RefusedError:
        # A damaged file goes too; the traces it named stay.
        return []
