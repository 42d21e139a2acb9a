"""Between a step's flat arrays and rows of the table, both ways. Nothing here touches a file.

What writes makes Arrow arrays from buffers: ``pyarrow.array`` would import pandas where there is one, and with it 35 MB
that a cap does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestream.stats import Step
from moestream.trace.schema import COLUMNS, ROUTE, SLAB, STEP, arrow_type, columns_of, damaged, load_arrow
from moestream.trace.trace import PHASES, SLAB_KINDS, Int, Routes, Slabs, Trace, starts

_STEP_FIELDS = tuple(field.name for field in fields(Step))
_STEP_TYPES = {"int64": np.int64, "float64": np.float64}


@dataclass(frozen=True)
class Recorded:
    """One step as it was handed over: its number, its phase, its figures, the arrays of ``trace.EVENTS``. ``step`` is
    None for slabs that came when no step followed."""

    index: int
    phase: str
    step: Step | None
    events: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """Rows of the table it becomes."""
        routes = self.events["rows"]
        return int(np.sum(routes)) + len(self.events["slab_expert"]) + (self.step is not None)


def route_count(recorded: Sequence[Recorded]) -> int:
    return sum(len(one.events["bank"]) for one in recorded)


def to_batch(recorded: Sequence[Recorded], meta: Mapping[str, Any], schema: Any, first_route: int) -> Any:
    """A record batch: all routes of these steps, then their slabs, then the steps themselves, each in the order they
    happened. ``first_route``: routes of the file before them."""
    pa = load_arrow()
    layers = np.asarray(meta["model"]["layers"], np.int64)
    experts = np.asarray(meta["model"]["experts"], np.int64)
    routes = _route_rows(recorded, first_route, layers)
    known = first_route + route_count(recorded)
    parts = [
        (ROUTE, routes),
        (SLAB, _slab_rows(recorded, known, layers, experts)),
        (STEP, _step_rows(recorded)),
    ]
    lengths = [len(columns["step"]) for _, columns in parts]
    events = [event for (event, _), length in zip(parts, lengths, strict=True) for _ in range(length)]
    arrays = {"event": _array(events, pa.string())}
    for name in list(COLUMNS)[1:]:
        kind = arrow_type(name)
        chunks = [
            pa.nulls(length, kind) if columns.get(name) is None else _array(columns[name], kind)
            for (_, columns), length in zip(parts, lengths, strict=True)
        ]
        arrays[name] = pa.concat_arrays(chunks)
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


@dataclass(frozen=True)
class _Masked:
    """A column that is null where ``absent``."""

    values: Int
    absent: NDArray[np.bool_]


def _array(values: Any, kind: Any) -> Any:
    """A column's values as an Arrow array of this type."""
    pa = load_arrow()
    if isinstance(values, pa.Array):
        return values
    if kind == pa.string():
        text = [word.encode() for word in values]
        offsets = starts(np.array([len(word) for word in text], np.int64)).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(text))]
        return pa.Array.from_buffers(kind, len(text), buffers)
    validity = None
    if isinstance(values, _Masked):
        validity, values = _validity(values.absent), values.values
    typed = np.ascontiguousarray(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(typed), [validity, pa.py_buffer(typed)])


def _validity(absent: NDArray[np.bool_]) -> Any:
    """A bit for each value that is there."""
    return load_arrow().py_buffer(np.packbits(~absent, bitorder="little"))


def _route_rows(recorded: Sequence[Recorded], first_route: int, layers: Int) -> dict[str, Any]:
    def column(name: str) -> Int:
        return np.concatenate([one.events[name] for one in recorded]).astype(np.int64)

    rows, k, wishes, bank = column("rows"), column("k"), column("wishes"), column("bank")
    step = np.concatenate([np.full(len(one.events["bank"]), one.index) for one in recorded]).astype(np.int64)
    ends = np.cumsum(rows)
    # A wish list stands in the last row of its route; other rows have none, not an empty one.
    wish_lengths = np.zeros(int(ends[-1]) if len(ends) else 0, np.int64)
    wish_lengths[ends - 1] = wishes
    absent = np.ones(len(wish_lengths), bool)
    absent[ends[wishes > 0] - 1] = False
    return {
        "step": np.repeat(step, rows),
        "tokens": np.repeat(column("tokens"), rows),
        "route": np.repeat(first_route + np.arange(len(rows)), rows),
        "bank": np.repeat(bank, rows),
        "layer": np.repeat(layers[bank], rows),
        "token": np.repeat(column("token"), rows),
        # Rows are dropped from the front: what is asked for of a prompt is its last token.
        "position": np.arange(len(wish_lengths)) + np.repeat(column("tokens") - ends, rows),
        "ids": _lists(np.repeat(k, rows), column("ids")),
        "wish": _lists(wish_lengths, column("wish_ids"), absent),
    }


def _lists(lengths: Int, values: Int, absent: NDArray[np.bool_] | None = None) -> Any:
    """Lists of these lengths; null where ``absent``."""
    pa = load_arrow()
    offsets = pa.py_buffer(starts(lengths).astype(np.int32))
    buffers = [None if absent is None else _validity(absent), offsets]
    children = [_array(values, pa.int32())]
    return pa.Array.from_buffers(pa.list_(pa.int32()), len(lengths), buffers, children=children)


def _slab_rows(recorded: Sequence[Recorded], known: int, layers: Int, experts: Int) -> dict[str, Any]:
    def column(name: str) -> Int:
        return np.concatenate([one.events[f"slab_{name}"] for one in recorded]).astype(np.int64)

    def happened(name: str) -> Any:
        values = column(name)
        return _Masked(values, values == 0)

    first = starts(experts)
    expert = column("expert")
    bank = np.searchsorted(first, expert, side="right") - 1
    # The core counts the routes before the read: the last of them caused it, and none did where it counted 0. One
    # beyond the last is of a step that never ended.
    caused = column("route")
    return {
        "step": np.concatenate([np.full(len(one.events["slab_expert"]), one.index) for one in recorded]),
        "route": _Masked(caused - 1, (caused == 0) | (caused > known)),
        "bank": bank,
        "layer": layers[bank],
        "expert": expert - first[bank],
        "slot": column("slot"),
        "kind": [SLAB_KINDS[kind] for kind in column("kind").tolist()],
        "bytes": column("bytes"),
        "issued_ns": happened("issued_ns"),
        "ready_ns": happened("ready_ns"),
        "needed_ns": happened("needed_ns"),
        "waited_ns": column("waited_ns"),
    }


def _step_rows(recorded: Sequence[Recorded]) -> dict[str, Any]:
    steps = [one for one in recorded if one.step is not None]
    columns: dict[str, Any] = {name: [getattr(one.step, name) for one in steps] for name in _STEP_FIELDS}
    return {**columns, "step": [one.index for one in steps], "phase": [one.phase for one in steps]}


def from_batches(path: Path, meta: dict[str, Any], batches: Iterable[Any]) -> Trace:
    """The trace whose rows these are. Raises RefusedError, naming ``path``, for rows that make none."""
    pa = load_arrow()
    import pyarrow.compute as pc

    kept: dict[str, list[Any]] = {ROUTE: [], SLAB: [], STEP: []}
    for batch in batches:
        missing = set(COLUMNS) - set(batch.schema.names)
        if missing:
            raise damaged(path, f"it has no column {min(missing)}")
        for event, rows in kept.items():
            rows.append(batch.select(list(columns_of(event))).filter(pc.equal(batch["event"], event)))
    tables = {
        event: _Table(
            path,
            event,
            pa.Table.from_batches(
                rows, None if rows else pa.schema([(name, arrow_type(name)) for name in columns_of(event)])
            ),
        )
        for event, rows in kept.items()
    }
    routes = _routes(tables[ROUTE], meta)
    return Trace(meta, routes, _slabs(tables[SLAB], meta, len(routes)), _steps(tables[STEP]))


class _Table:
    """The rows of one kind, as numpy arrays. What no row may lack and one lacks is damage."""

    def __init__(self, path: Path, event: str, table: Any) -> None:
        self.path, self._table, self._whole = path, table, columns_of(event)
        self._event = event

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def column(self, name: str, dtype: Any = np.int64, absent: int = 0) -> NDArray[Any]:
        values = self._table[name]
        if values.null_count:
            if self._whole[name]:
                raise damaged(self.path, f"a {self._event} without its {name}")
            values = values.fill_null(absent)
        return np.asarray(values.to_numpy()).astype(dtype)

    def lists(self, name: str) -> tuple[Int, NDArray[np.int32]]:
        """Lengths (0 of a null) and all values."""
        import pyarrow.compute as pc

        values = self._table[name]
        lengths = pc.list_value_length(values).fill_null(0).to_numpy().astype(np.int64)
        return lengths, pc.list_flatten(values).to_numpy().astype(np.int32)

    def numbers(self, name: str, words: tuple[str, ...]) -> Int:
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = pc.index_in(self._table[name], value_set=pa.array(words))
        if numbers.null_count:
            raise damaged(self.path, f"a {self._event} whose {name} is none of {', '.join(words)}")
        return numbers.to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    def banks(self, meta: dict[str, Any]) -> Int:
        bank = self.column("bank")
        if len(bank) and not 0 <= bank.min() <= bank.max() < len(meta["model"]["experts"]):
            raise damaged(self.path, "a bank its model does not have")
        return bank


def _routes(table: _Table, meta: dict[str, Any]) -> Routes:
    number = table.column("route")
    # The first row of each route; its other rows follow it.
    heads = np.flatnonzero(np.diff(number, prepend=-1))
    if not np.array_equal(number[heads], np.arange(len(heads))):
        raise damaged(table.path, "its routes are not in order")
    rows = np.diff(np.append(heads, len(number)))
    tokens = table.column("tokens")[heads]
    if not np.array_equal(
        table.column("position"), np.arange(len(number)) + np.repeat(tokens - heads - rows, rows)
    ):
        raise damaged(table.path, "a route without all its rows")
    lengths, ids = table.lists("ids")
    wishes, wish_ids = table.lists("wish")
    k = lengths[heads]
    if not np.array_equal(np.repeat(k, rows), lengths):
        raise damaged(table.path, "a route whose rows differ in length")
    last = heads + rows - 1
    if wishes.sum() != wishes[last].sum():
        raise damaged(table.path, "a wish that is not in the last row of its route")
    return Routes(
        step=table.column("step")[heads],
        bank=table.banks(meta)[heads],
        token=table.column("token")[heads],
        tokens=tokens,
        rows=rows.astype(np.int64),
        k=k,
        id_start=starts(rows * k),
        ids=ids,
        wish_start=starts(wishes[last]),
        wish_ids=wish_ids,
    )


def _slabs(table: _Table, meta: dict[str, Any], routes: int) -> Slabs:
    first = starts(np.asarray(meta["model"]["experts"], np.int64))
    route = table.column("route", absent=-1)
    if len(route) and route.max() >= routes:
        raise damaged(table.path, "a slab of a route it does not have")
    same = ("step", "slot", "bytes", "issued_ns", "ready_ns", "needed_ns", "waited_ns")
    return Slabs(
        route=route,
        expert=first[table.banks(meta)] + table.column("expert"),
        kind=table.numbers("kind", SLAB_KINDS),
        **{name: table.column(name) for name in same},
    )


def _steps(table: _Table) -> dict[str, NDArray[Any]]:
    steps = {name: table.column(name, _STEP_TYPES[COLUMNS[name][0]]) for name in _STEP_FIELDS}
    return {**steps, "step": table.column("step"), "phase": table.numbers("phase", PHASES)}
