"""The file a run writes while it lasts: what is left of it when the run or the disk ends, and whose it is."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moestream.errors import RefusedError, UsageError
from moestream.trace.read import partial_of, read_trace
from moestream.trace.write import FLUSH_STEPS, TraceWriter, recover
from replay_traces import events
from trace_steps import (
    META,
    a_step,
    cut_short,
    names_in,
    record,
    silent,
    three_steps,
)


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """While inside, no file of this process grows beyond ``size`` bytes: a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_run_that_died_leaves_its_whole_batches(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    cut_short(path)
    assert names_in(tmp_path) == ["t.parquet.partial"]
    said: list[str] = []
    for name in (path, partial_of(path)):
        assert read_trace(name, said.append).steps["step"].tolist() == list(range(FLUSH_STEPS))
    assert len(said) == 2 and all(f"first {FLUSH_STEPS} steps" in text for text in said)
    with pytest.raises(UsageError, match="recover"):
        TraceWriter(path)
    assert recover(path) == FLUSH_STEPS
    assert names_in(tmp_path) == ["t.parquet"]
    assert read_trace(path, silent).steps["step"].tolist() == list(range(FLUSH_STEPS))
    with pytest.raises(RefusedError, match="whole"):
        recover(path)


@pytest.mark.parametrize("left", [0.3, 0.6, 0.9, 0.99])
def test_a_partial_file_may_end_anywhere(tmp_path: Path, left: float) -> None:
    path = tmp_path / "t.parquet"
    cut_short(path, 5 * FLUSH_STEPS)
    size = partial_of(path).stat().st_size
    os.truncate(partial_of(path), int(size * left))
    said: list[str] = []
    steps = read_trace(path, said.append).steps["step"]
    assert len(steps) % FLUSH_STEPS == 0 and len(steps) < 5 * FLUSH_STEPS
    assert recover(partial_of(path)) == len(steps)


def test_a_crash_before_the_first_batch_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    cut_short(path, FLUSH_STEPS - 1)
    said: list[str] = []
    found = read_trace(path, said.append)
    assert len(said) == 1 and "cut short: it holds no steps" in said[0]
    assert len(found.steps["step"]) == len(found.routes) == len(found.slabs) == 0
    assert found.meta["model"] == META["model"]
    assert recover(path) == 0
    assert names_in(tmp_path) == ["t.parquet"]
    assert len(read_trace(path, silent).steps["step"]) == 0


def test_a_crash_before_the_first_batch_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    cut_short(path, 1)
    record(path, three_steps())
    assert len(read_trace(path, silent).steps["step"]) == 3


def test_a_partial_file_that_is_none_stays(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    partial_of(path).write_bytes(b"GGUF" + bytes(64))
    for start in (TraceWriter, recover):
        with pytest.raises((UsageError, RefusedError), match=r"is not a trace|damaged"):
            start(path)
        assert partial_of(path).read_bytes() == b"GGUF" + bytes(64)
    partial_of(path).write_bytes(b"\xff\xff\xff\xff\0\4")  # cut short within its schema
    with pytest.raises(RefusedError, match="damaged"):
        recover(path)
    record(path, three_steps())
    assert names_in(tmp_path) == ["t.parquet"]


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.parquet", meta=META) as writer:
        for number in range(FLUSH_STEPS):
            writer.step(number, "decode", a_step(number), events([], number))
        for start in (TraceWriter, recover):
            with pytest.raises(UsageError, match="another run"):
                start(tmp_path / "t.parquet")
    assert len(read_trace(tmp_path / "t.parquet", silent).steps["step"]) == FLUSH_STEPS


def test_there_is_no_file_until_the_run_begins(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    writer = TraceWriter(path)
    assert names_in(tmp_path) == []
    writer.begin(META)
    assert names_in(tmp_path) == ["t.parquet.partial"]
    with pytest.raises(UsageError, match="another run"):
        TraceWriter(path)
    writer.discard()
    # Nor does one stay that an older version left.
    partial_of(path).touch()
    TraceWriter(path)
    assert names_in(tmp_path) == []


def test_a_partial_file_on_a_full_disk_does_not_stay_without_steps(tmp_path: Path) -> None:
    with files_end_at(100), pytest.raises(RefusedError, match=r"raise `ulimit -f`$"):
        TraceWriter(tmp_path / "t.parquet", meta=META)
    assert names_in(tmp_path) == []
    writer = TraceWriter(tmp_path / "t.parquet", meta=META)
    size = partial_of(writer.path).stat().st_size
    with files_end_at(size + 100), pytest.raises(RefusedError, match=r"raise `ulimit -f`$"):
        for number in range(FLUSH_STEPS):
            writer.step(number, "decode", a_step(number), events([], number))
    assert names_in(tmp_path) == []


def test_a_name_that_another_run_took_meanwhile_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    late = TraceWriter(path)
    with TraceWriter(path, meta=META) as writer:
        with pytest.raises(UsageError, match="another run"):
            late.begin(META)
        late.discard()
        assert names_in(tmp_path) == ["t.parquet.partial"]
        writer.step(0, "decode", a_step(0), events([], 0))
    assert len(read_trace(path, silent).steps["step"]) == 1


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_partial_file_that_is_no_file_is_told(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    make(partial_of(path))
    for start in (TraceWriter, recover):
        with pytest.raises(UsageError, match=r"t\.parquet\.partial is not a regular file"):
            start(path)
    with pytest.raises(RefusedError, match=r"t\.parquet\.partial is not a regular file"):
        read_trace(path, silent)
    assert names_in(tmp_path) == ["t.parquet.partial"]


def test_nothing_came_of_it(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t.parquet").discard()
    TraceWriter(tmp_path / "t.parquet").close()
    TraceWriter(tmp_path / "t.parquet", meta=META).discard()
    assert names_in(tmp_path) == []


def test_a_full_disk_is_one_line_and_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    writer = TraceWriter(path, meta=META)
    for number in range(FLUSH_STEPS):
        writer.step(number, "decode", a_step(number), events([], number))
    with (
        files_end_at(partial_of(path).stat().st_size + 100),
        pytest.raises(RefusedError, match=r"could not be written, a file may not be that large.*recover"),
    ):
        for number in range(FLUSH_STEPS):
            writer.step(FLUSH_STEPS + number, "decode", a_step(number), events([], number))
    writer.step(99, "decode", a_step(0), events([], 99))
    writer.close()
    assert names_in(tmp_path) == ["t.parquet.partial"]
    assert recover(path) == FLUSH_STEPS


def test_a_disk_without_room_for_the_finished_file_keeps_the_partial_one(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    writer = TraceWriter(path, meta=META)
    for number in range(FLUSH_STEPS):
        writer.step(number, "decode", a_step(number), events([], number))
    cut_short(tmp_path / "other.parquet")
    with files_end_at(2000):
        for finish in (lambda: writer._finish(), lambda: recover(tmp_path / "other.parquet")):
            with pytest.raises(
                RefusedError, match=r"could not be written, a file may not be that large.*recover"
            ):
                finish()
    assert names_in(tmp_path) == ["other.parquet.partial", "t.parquet.partial"]
    assert recover(path) == FLUSH_STEPS
