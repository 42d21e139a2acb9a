"""Traces that nobody recorded: whatever stands in a file, what reads it ends well or says in one line what is wrong."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moestream import seeds
from moestream.analyze.choices import from_trace
from moestream.analyze.fit import fit
from moestream.analyze.report import analyze
from moestream.cli.replay import _check
from moestream.cli.trace import _facts, describe
from moestream.errors import MoestreamError, RefusedError
from moestream.replay import Options, curves, parse_budgets, parse_policies, prepare
from moestream.trace.export import expert_rows, step_rows
from moestream.trace.read import partial_of, read_trace
from moestream.trace.schema import COLUMNS, META_KEY
from moestream.trace.write import TraceWriter
from replay_traces import events, meta
from trace_steps import a_step, with_slabs

MECHANISM = "arena+uring:8+lru+gate:2+anon"
ABOUT = {
    **meta([4, 6], 2, [([0], 1 << 20), ([1], 2 << 20)], [3, 4], MECHANISM),
    "box": {"cpus": 2, "ram_bytes": 1 << 34, "kernel": "6.18"},
    "fallbacks": ["none of it"],
    "budget": {"cap_bytes": 1 << 30, "kv_bytes": 1 << 20},
    "n_batch": 8,
}
ABOUT["model"] |= {"roles": [["gate"], ["gate"]], "slab_bytes": [[4096], [8192]], "bytes": 1 << 20}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt of four tokens and twenty more, with wishes and slabs."""
    path = tmp_path_factory.mktemp("traces") / "whole.parquet"
    pick, token = np.random.default_rng(0), 0
    with TraceWriter(path, meta=ABOUT) as writer:
        for number in range(21):
            tokens = 1 if number else 4
            rows = [[pick.permutation(count)[:2].tolist() for _ in range(tokens)] for count in (4, 6)]
            recorded = events([(0, rows[0], [4, 9]), (1, rows[1], [])], token)
            slabs = [(2 * number + 1, int(pick.integers(10)), 0, number % 4, 4096, 10, 20, 30, 5)]
            phase = "decode" if number else "prefill"
            writer.step(number, phase, a_step(number, tokens), with_slabs(recorded, slabs))
            token += tokens
    return path


def use(path: Path) -> None:
    """Everything that is done with a trace."""
    trace = read_trace(path, lambda text: None)
    description = describe(trace)
    json.dumps(description, allow_nan=False)
    _facts(description)
    assert len(list(step_rows(trace))) == description["steps"]
    list(expert_rows(trace))
    seeds.load_priorities(path, trace.identity)
    seeds.load_oracle(path, trace.identity)
    recording = prepare(trace, str(path))
    _check(trace, recording, lambda file: seeds.load_priorities(file, trace.identity))
    policies = parse_policies("lru,lfu-adapt,pinned,belady", lambda file: np.zeros(0))
    budgets = parse_budgets("recorded,60%" if recording.capacities else "60%", [recording])
    for half in ("first", None):
        list(curves([recording], policies, budgets, Options(half=half)))
    analyze(trace, recording, budgets)
    fit([from_trace(trace)], trace.identity, "", trace.experts, 2)


def test_the_trace_that_is_changed_below_is_one(whole: Path) -> None:
    use(whole)


def rewrite(
    whole: Path,
    path: Path,
    about: Callable[[Any], Any] | None = None,
    table: Callable[[Any], Any] | None = None,
    partial: bool = False,
) -> None:
    """Write the trace with other metadata or another table; ``partial``: as a run that was cut short leaves it."""
    new = pyarrow.parquet.read_table(whole)
    found = json.loads(new.schema.metadata[META_KEY])
    if about is not None:
        changed = about(found)
        found = found if changed is None else changed
    if table is not None:
        new = table(new)
    new = new.replace_schema_metadata({META_KEY: found if isinstance(found, bytes) else json.dumps(found)})
    path.unlink(missing_ok=True)
    partial_of(path).unlink(missing_ok=True)
    if not partial:
        pyarrow.parquet.write_table(new, path)
        return
    with partial_of(path).open("wb") as file, pyarrow.ipc.new_stream(file, new.schema) as stream:
        stream.write_table(new)


def in_model(name: str, value: Any) -> Callable[[Any], None]:
    return lambda found: found["model"].update({name: value})


def at_top(name: str, value: Any) -> Callable[[Any], None]:
    return lambda found: found.update({name: value})


def without(*names: str) -> Callable[[Any], None]:
    def remove(found: Any) -> None:
        for name in names[:-1]:
            found = found[name]
        del found[names[-1]]

    return remove


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: [], "it is \\[\\], not an object"),
        (lambda found: b"\xff", "in its metadata"),
        (lambda found: b"[" * 100_000, "nested too deeply"),
        (lambda found: b'{"schema": {"name": "moestream-trace", "version": 1e400}}', "1e400 is no number"),
        (lambda found: b'{"schema": NaN}', "NaN is no number"),
        (at_top("schema", None), "schema is null, not an object"),
        (at_top("schema", {"name": "moestream-trace", "version": True}), "schema.version is true"),
        (at_top("schema", {"name": "moestream-trace", "version": 0}), "schema.version is 0"),
        (at_top("schema", {"name": "other", "version": 1}), "schema.name is not moestream-trace"),
        (at_top("schema", {"name": "x", "version": 2}), "has trace schema 2, and moestream"),
        (lambda found: {"schema": {"version": 2}, "versions": None}, "moestream a newer version wrote it"),
        (without("mechanism"), "mechanism is missing"),
        (at_top("mechanism", None), "mechanism is null, not a text"),
        (at_top("mechanism", ""), "mechanism is no mechanism's text"),
        (at_top("mechanism", "arena+pinned:a\0b"), "mechanism is no mechanism's text"),
        (at_top("mechanism", "arena+pinned:\ud800"), "mechanism is no mechanism's text"),
        (at_top("mechanism", "abacus"), "a mechanism this version does not know: .*abacus"),
        (at_top("versions", None), "versions is null, not an object"),
        (at_top("versions", {"moestream": 1}), "versions.moestream is 1, not a text"),
        (at_top("box", None), "box is null"),
        (at_top("box", {"ram_bytes": "much"}), 'box.ram_bytes is "much", not a number'),
        (at_top("fallbacks", None), "fallbacks is null, not a list"),
        (at_top("fallbacks", [1]), "fallbacks\\[0\\] is 1, not a text"),
        (at_top("command", None), "command is null, not a list"),
        (at_top("command", ["run", None]), "command\\[1\\] is null"),
        (at_top("budget", [1]), "budget is \\[1\\], not an object"),
        (at_top("budget", {"cap_bytes": "x"}), 'budget.cap_bytes is "x"'),
        (at_top("created", 5), "created is 5"),
        (at_top("n_batch", -1), "n_batch is -1"),
        (without("model"), "model is missing"),
        (without("model", "identity"), "model.identity is missing"),
        (in_model("identity", ""), "model.identity is empty"),
        (in_model("name", None), "model.name is null"),
        (in_model("layers", [0]), "are not as many as its banks"),
        (in_model("layers", "01"), 'model.layers is "01", not a list'),
        (in_model("layers", [0, -1]), "model.layers\\[1\\] is -1"),
        (in_model("experts", [4, 10**12]), "model.experts\\[1\\] is 1000000000000, not a whole number from"),
        (in_model("experts", [4, 6.0]), "model.experts\\[1\\] is 6.0"),
        (in_model("used", [2, 7]), "model.used\\[1\\] is 7, not a whole number from 1 to 6"),
        (in_model("used", [2, 0]), "model.used\\[1\\] is 0"),
        (in_model("roles", [["gate"]]), "model.roles is not a list for each bank"),
        (in_model("slab_bytes", [[1], [None]]), "model.slab_bytes\\[1\\]\\[0\\] is null"),
        (without("model", "parts"), "model.parts is missing"),
        (in_model("parts", "x"), 'model.parts is "x", not a list'),
        (in_model("parts", ["x"]), 'model.parts\\[0\\] is "x", not an object'),
        (in_model("parts", []), "model.capacities has 2 entries for 0 parts"),
        (in_model("parts", [{"banks": [99], "frame_bytes": 4096}]), "model.parts\\[0\\].banks\\[0\\] is 99"),
        (in_model("parts", [{"banks": [], "frame_bytes": 4096}]), "banks is empty"),
        (in_model("parts", [{"banks": [0, 0], "frame_bytes": 4096}]), "names a bank twice"),
        (in_model("parts", [{"banks": [0], "frame_bytes": 0}]), "frame_bytes is 0"),
        (in_model("parts", [{"banks": [0], "frame_bytes": -4096}]), "frame_bytes is -4096"),
        (in_model("parts", [{"banks": [0], "frame_bytes": 5000}]), "frame_bytes is no multiple of 4096"),
        (without("model", "capacities"), "model.capacities is missing"),
        (in_model("capacities", "x"), 'model.capacities is "x", not a list'),
        (in_model("capacities", [3]), "has 1 entries for 2 parts"),
        (in_model("capacities", [3, 7]), "model.capacities\\[1\\] is 7, not a whole number from 1 to 6"),
    ],
)
def test_metadata_no_trace_has(whole: Path, tmp_path: Path, change: Callable[[Any], Any], why: str) -> None:
    path = tmp_path / "t.parquet"
    rewrite(whole, path, change)
    with pytest.raises(RefusedError, match=why) as refused:
        use(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def cast(name: str, kind: Any) -> Callable[[Any], Any]:
    """The column as another type, its values lost where they cannot be."""

    def change(table: Any) -> Any:
        try:
            column = table[name].cast(kind)
        except pyarrow.ArrowException:
            column = pyarrow.nulls(len(table), kind)
        return table.set_column(table.schema.get_field_index(name), name, column)

    return change


def put(name: str, event: str, value: Any) -> Callable[[Any], Any]:
    """The first row of the kind with another value in the column."""

    def change(table: Any) -> Any:
        values = table[name].to_pylist()
        values[table["event"].to_pylist().index(event)] = value
        return table.set_column(
            table.schema.get_field_index(name), name, pyarrow.array(values, table.schema.field(name).type)
        )

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cast("step", pyarrow.string()), "its column step is of string, not int64"),
        (cast("tokens", pyarrow.string()), "its column tokens is of string"),
        (cast("seconds", pyarrow.int64()), "its column seconds is of int64, not double"),
        (cast("ids", pyarrow.list_(pyarrow.float64())), "its column ids is of list"),
        (cast("event", pyarrow.large_string()), "its column event is of large_string"),
        (lambda table: table.append_column("bank", table["bank"]), "more than one column bank"),
        (put("event", "route", None), "a row whose event is none of route, slab, step"),
        (put("event", "route", "rout"), "a row whose event is none of"),
        (put("step", "route", None), "a route without its step"),
        (put("step", "route", 3), "a route whose rows differ in step"),
        (put("tokens", "route", 1 << 40), "a route whose tokens is 1099511627776"),
        (put("token", "route", 2), "a route whose rows differ in token"),
        (put("bank", "route", -1), "a route whose bank is -1"),
        (put("layer", "route", 1), "a route whose layer is not that of its bank"),
        (put("position", "route", 1), "a route without all its rows"),
        (put("ids", "route", None), "a route without its ids"),
        (put("ids", "route", [1]), "a route whose rows differ in length"),
        (put("ids", "route", [1, None]), "a route with a null among its ids"),
        (put("ids", "route", [1, 4]), "a route of an expert its bank does not have"),
        (put("ids", "route", [1, -1]), "a route of an expert its bank does not have"),
        (put("wish", "route", [1]), "a wish that is not in its last row"),
        (put("route", "slab", 99), "a slab of a route it does not have"),
        (put("expert", "slab", -3), "a slab whose expert is -3"),
        (put("expert", "slab", 6), "a slab of an expert its bank does not have"),
        (put("bytes", "slab", None), "a slab without its bytes"),
        (put("kind", "slab", None), "a slab whose kind is none of"),
        (put("issued_ns", "slab", -5), "a slab whose issued_ns is -5"),
        (put("phase", "step", "rest"), "a step whose phase is none of"),
        (put("seconds", "step", math.nan), "a step whose seconds is nan"),
        (put("stall_s", "step", math.inf), "a step whose stall_s is inf"),
        (put("step", "step", 5), "its steps are not in order"),
        (put("hits", "step", -1), "a step whose hits is -1"),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_rows_no_trace_has(
    whole: Path, tmp_path: Path, change: Callable[[Any], Any], why: str, partial: bool
) -> None:
    path = tmp_path / "t.parquet"
    rewrite(whole, path, table=change, partial=partial)
    with pytest.raises(RefusedError, match=why) as refused:
        use(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


JUNK = st.one_of(
    st.sampled_from(
        [None, True, "", "x", "\ud800", "a\0b", -1, 0, 1, 3, 99, 10**12, 1 << 70, 0.5, math.inf, [], {}]
    ),
    st.lists(st.integers(-1, 7), max_size=3),
    st.sampled_from(
        [MECHANISM, "resident", "mapped", "arena+pinned:x", "arena+none", "arena+lfu-decay:9999999"]
    ),
)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(place for key, one in inner for place in places(one, (*way, key)))]


@st.composite
def changed_meta(draw: st.DrawFn, found: Any) -> Any:
    found = copy.deepcopy(found)
    for _ in range(draw(st.integers(0, 2))):
        way = draw(st.sampled_from([place for place in places(found) if place]))
        holder = found
        for key in way[:-1]:
            holder = holder[key]
        action = draw(st.sampled_from(["put", "put", "remove", "double"]))
        if action == "put":
            holder[way[-1]] = draw(JUNK)
        elif action == "remove" or not isinstance(holder, list):
            del holder[way[-1]]
        else:
            holder.append(holder[way[-1]])
        if not isinstance(found, dict) or not found:
            break
    return found


def _junk_for(kind: Any) -> st.SearchStrategy[Any]:
    numbers = st.sampled_from([None, -1, 0, 1, 2, 5, 99, (1 << 31) - 1])
    if kind == pyarrow.string():
        return st.sampled_from([None, "", "route", "slab", "step", "decode", "demand"])
    if pyarrow.types.is_list(kind):
        return st.one_of(st.none(), st.lists(numbers, max_size=4))
    if kind == pyarrow.float64():
        return st.one_of(st.none(), st.floats())
    return numbers if kind == pyarrow.int32() else st.one_of(numbers, st.integers(-(1 << 63), (1 << 63) - 1))


@st.composite
def changed_table(draw: st.DrawFn, table: Any) -> Any:
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(set(COLUMNS) & set(table.column_names))))
        at = table.schema.get_field_index(name)
        action = draw(st.sampled_from(["put"] * 6 + ["rows", "remove", "type"]))
        if action == "put":
            values = table[name].to_pylist()
            kind = table.schema.field(name).type
            first = draw(st.integers(0, len(values) - 1))
            for row in range(first, min(len(values), first + draw(st.sampled_from([1, 1, 4, 200])))):
                values[row] = draw(_junk_for(kind)) if row == first else values[first]
            table = table.set_column(at, name, pyarrow.array(values, kind))
        elif action == "rows":
            cut = draw(st.integers(1, len(table) - 1))
            parts = [table.slice(cut), table.slice(0, cut)]
            table = pyarrow.concat_tables(parts if draw(st.booleans()) else parts[1:])
            if len(table) < 2:
                break
        elif action == "remove":
            table = table.remove_column(at)
        else:
            kinds = [pyarrow.string(), pyarrow.float64(), pyarrow.int64(), pyarrow.list_(pyarrow.int32())]
            table = cast(name, draw(st.sampled_from(kinds)))(table)
    return table


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_file_holds_it_is_read_or_refused_in_one_line(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "t.parquet"
    rewrite(
        whole,
        path,
        about=lambda found: data.draw(changed_meta(found)),
        table=lambda table: data.draw(changed_table(table)),
        partial=data.draw(st.booleans()),
    )
    try:
        use(path)
    except MoestreamError as error:
        assert "\n" not in str(error)
