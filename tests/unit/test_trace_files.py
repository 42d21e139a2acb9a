"""Traces as files: what goes in comes out, for every shape of a route and with every reader people have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestream.errors import RefusedError, UsageError
from moestream.stats import Step
from moestream.trace.read import partial_of, read_trace
from moestream.trace.schema import COLUMNS, META_KEY, SCHEMA_VERSION
from moestream.trace.write import FLUSH_ROWS, FLUSH_STEPS, TraceWriter, recover
from replay_traces import events
from trace_steps import (
    EXPERTS,
    META,
    a_step,
    names_in,
    record,
    same,
    silent,
    three_steps,
    with_slabs,
)


@st.composite
def recorded_steps(draw: st.DrawFn) -> list[tuple[str, Step, dict[str, Any]]]:
    steps, token, routes_before = [], 0, 0
    for number in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 3))
        routes = []
        for bank, count in enumerate(EXPERTS):
            if not draw(st.booleans()):
                continue
            # One expert, some, all of them (k = n), and the same one twice.
            k = draw(st.sampled_from([1, 2, count]))
            ids = st.lists(st.integers(0, count - 1), min_size=k, max_size=k)
            # Only the last rows where only their logits are wanted.
            rows = draw(st.lists(ids, min_size=1, max_size=tokens))
            routes.append((bank, rows, draw(st.lists(st.integers(0, sum(EXPERTS) - 1), max_size=3))))
        recorded = events(routes, token)
        recorded["tokens"] = np.full(len(routes), tokens)
        routes_before += len(routes)
        slab = st.tuples(
            st.integers(0, routes_before),
            st.integers(0, sum(EXPERTS) - 1),
            st.integers(0, 2),
            st.integers(0, 3),
            st.integers(0, 1 << 40),
            *[st.one_of(st.just(0), st.integers(1, 1 << 62))] * 3,
            st.integers(0, 1 << 40),
        )
        # No slabs at all where nothing missed.
        slabs = draw(st.lists(slab, max_size=4))
        phase = draw(st.sampled_from(["prefill", "decode"]))
        misses = len(slabs)
        steps.append((phase, a_step(number, tokens, misses=misses), with_slabs(recorded, slabs)))
        token += tokens
    return steps


@settings(max_examples=40, deadline=None)
@given(steps=recorded_steps(), last=st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], last: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    routes = sum(len(recorded["bank"]) for _, _, recorded in steps)
    unfinished = with_slabs(events([], 0), [(routes, 3, 0, 1, 77, 5, 6, 0, 0)]) if last else None
    same(record(path, steps, unfinished), read_trace(path, silent))
    assert names_in(path.parent) == ["t.parquet"]


def test_a_step_in_the_file_has_every_figure_of_a_step() -> None:
    assert {field.name for field in fields(Step)} <= set(COLUMNS)


def test_pandas_reads_it(tmp_path: Path) -> None:
    record(tmp_path / "t.parquet", three_steps())
    table = pandas.read_parquet(tmp_path / "t.parquet")
    assert table.event.value_counts().to_dict() == {"route": 8, "step": 3, "slab": 3}
    routes = table[table.event == "route"]
    assert [list(ids) for ids in routes.ids] == [[0, 1], [1, 2], [7, 0], [3, 3], *[[1, 0], [6, 7]] * 2]
    assert routes.position.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    wishes = [None if wish is None else list(wish) for wish in routes.wish]
    assert wishes == [None, [5], None, None, None, [4, 5], None, [4, 5]]
    assert table[table.event == "slab"].expert.tolist() == [1, 6, 6]
    assert table[table.event == "step"].phase.tolist() == ["prefill", "decode", "decode"]


def test_polars_reads_it(tmp_path: Path) -> None:
    record(tmp_path / "t.parquet", three_steps())
    table = polars.read_parquet(tmp_path / "t.parquet")
    uses = (
        table.filter(polars.col("event") == "route")
        .explode("ids")
        .group_by("layer", "ids")
        .len()
        .sort("layer", "ids")
    )
    assert uses.rows() == [(0, 0, 3), (0, 1, 4), (0, 2, 1), (2, 0, 1), (2, 3, 2), (2, 6, 2), (2, 7, 3)]


def test_duckdb_reads_it(tmp_path: Path) -> None:
    record(tmp_path / "t.parquet", three_steps())
    found = duckdb.sql(
        f"select kind, bank, layer, sum(bytes), count(ready_ns) from '{tmp_path / 't.parquet'}'"
        " where event = 'slab' group by all order by all"
    ).fetchall()
    assert found == [("demand", 0, 0, 64, 1), ("speculative", 2, 2, 64, 0)]
    unnested = f"select count(*) from (select unnest(ids) from '{tmp_path / 't.parquet'}')"
    assert duckdb.sql(unnested).fetchall() == [(16,)]


def test_the_metadata_is_json_in_the_footer(tmp_path: Path) -> None:
    record(tmp_path / "t.parquet", three_steps())
    found = json.loads(pyarrow.parquet.read_metadata(tmp_path / "t.parquet").metadata[META_KEY])
    assert found["schema"] == {"name": "moestream-trace", "version": SCHEMA_VERSION}
    assert {**found, **META} == found
    assert found["command"][1:] == sys.argv[1:]
    assert {"moestream", "llama-cpp-python", "pyarrow", "python"} <= set(found["versions"])


def test_memory_is_bounded_and_what_is_lost_too(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.parquet", meta=META)
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    for number in range(10 * FLUSH_STEPS):
        writer.step(number, "decode", a_step(number), events([(0, [[1, 0]], [])], number))
        assert len(writer._recorded) < FLUSH_STEPS
    assert pool.bytes_allocated() - before < 1 << 20
    wide = events([(0, [[1, 0]] * FLUSH_ROWS, [])], 10 * FLUSH_STEPS)
    writer.step(10 * FLUSH_STEPS, "prefill", a_step(0), wide)
    assert not writer._recorded
    writer.close()
    groups = pyarrow.parquet.ParquetFile(tmp_path / "t.parquet")
    assert groups.num_row_groups == 1
    assert len(read_trace(tmp_path / "t.parquet", silent).steps["step"]) == 10 * FLUSH_STEPS + 1


def test_an_earlier_trace_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    record(path, three_steps())
    earlier = path.read_bytes()
    writer = TraceWriter(path, meta=META)
    writer.step(0, "decode", a_step(0), events([], 0))
    assert path.read_bytes() == earlier
    said: list[str] = []
    assert len(read_trace(path, said.append).steps["step"]) == 3
    assert "later run" in said[0]
    writer.close()
    assert len(read_trace(path, silent).steps["step"]) == 1


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    model = tmp_path / "model.parquet"
    model.write_bytes(b"GGUF" + bytes(100))
    foreign = tmp_path / "table.parquet"
    pandas.DataFrame({"a": [1]}).to_parquet(foreign)
    link = tmp_path / "link.parquet"
    link.symlink_to(model)
    (tmp_path / "directory.parquet").mkdir()
    for path in (model, foreign, link, tmp_path / "directory.parquet"):
        before = None if path.is_dir() else path.read_bytes()
        with pytest.raises(UsageError, match="is not a trace"):
            TraceWriter(path)
        assert before is None or path.read_bytes() == before
        assert not partial_of(path).exists()
    record(tmp_path / "t.parquet", three_steps())
    with pytest.raises(UsageError, match="this is the model"):
        TraceWriter(tmp_path / "t.parquet", [tmp_path / "t.parquet"])
    for name, why in (("t.csv", "t.parquet"), ("no/t.parquet", "no directory")):
        with pytest.raises(UsageError, match=why):
            TraceWriter(tmp_path / name)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"cannot write /proc/t\.parquet"):
        TraceWriter("/proc/t.parquet")


def change_meta(path: Path, change: Any) -> None:
    table = pyarrow.parquet.read_table(path)
    found = json.loads(table.schema.metadata[META_KEY])
    change(found)
    pyarrow.parquet.write_table(table.replace_schema_metadata({META_KEY: json.dumps(found)}), path)


def newer(found: dict[str, Any]) -> None:
    found["schema"]["version"] = SCHEMA_VERSION + 1
    found["versions"]["moestream"] = "9.9.9"


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"

    def refused(why: str, kind: type[Exception] = RefusedError) -> None:
        with pytest.raises(kind, match=why) as error:
            read_trace(path, silent)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)

    refused("there is no file")
    record(path, three_steps())
    whole = path.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused("damaged or cut short")
    path.write_bytes(whole)
    change_meta(path, newer)
    refused(
        f"schema {SCHEMA_VERSION + 1}.* reads up to {SCHEMA_VERSION}: moestream 9.9.9 wrote it and reads it"
    )
    path.write_bytes(whole)
    change_meta(path, lambda found: found.pop("model"))
    refused("in its metadata model is missing")
    pandas.DataFrame({"a": [1]}).to_parquet(path)
    refused("is not a trace")
    for content, why in (
        (b"GGUF" + bytes(64), "is not a trace"),
        (b"", "is empty: nothing was recorded in it"),
        (b"\xff" * 64, "damaged"),
    ):
        path.write_bytes(content)
        refused(why)
    path.unlink()
    path.mkdir()
    refused("is not a regular file")
    path.rmdir()
    os.mkfifo(path)
    refused("is not a regular file")
    path.unlink()
    partial_of(path).touch()
    with pytest.raises(RefusedError, match=r"t\.parquet\.partial is empty"):
        read_trace(path, silent)
    with pytest.raises(RefusedError, match=r"t\.parquet\.partial is empty"):
        recover(path)
    for name in ("/", ".", "x" * 300, "/dev/null", "t.parquet.partial/below"):
        with pytest.raises((UsageError, RefusedError)) as error:
            read_trace(Path(name) if name.startswith("/") else tmp_path / name, silent)
        assert "\n" not in str(error.value)


def test_rows_that_make_no_trace_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    record(path, three_steps())
    whole = pyarrow.parquet.read_table(path)
    routes = pyarrow.compute.equal(whole["event"], "route")

    def refused(table: Any, why: str) -> None:
        pyarrow.parquet.write_table(table, path)
        with pytest.raises(RefusedError, match=why):
            read_trace(path, silent)

    def changed(name: str, value: Any, where: Any = routes) -> Any:
        column = whole[name]
        filled = pyarrow.scalar(value, column.type)
        new = pyarrow.compute.if_else(where, filled, column)
        return whole.set_column(whole.schema.get_field_index(name), name, new)

    refused(whole.drop_columns(["bank"]), "no column bank")
    refused(changed("bank", None), "without its bank")
    refused(changed("bank", 3), "a bank its model does not have")
    refused(changed("route", 1), "not in order")
    refused(changed("kind", "free", pyarrow.compute.equal(whole["event"], "slab")), "kind is none of")
    refused(pyarrow.concat_tables([whole.slice(0, 1), whole.slice(2)]), "a route without all its rows")
    refused(whole.slice(2), "not in order")


def test_without_pyarrow_it_says_how_to_get_it(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from moestream.trace.write import TraceWriter\n"
        "try: TraceWriter(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "t.parquet")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("RefusedError traces need pyarrow, which is not installed: pip install ")
    assert names_in(tmp_path) == []
