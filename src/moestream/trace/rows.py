"""From a step's flat arrays to rows of the table. Nothing here touches a file.

This makes Arrow arrays from buffers: ``pyarrow.array`` would import pandas where there is one, and with it 35 MB
that a cap does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestream.stats import Step
from moestream.trace.schema import COLUMNS, ROUTE, SLAB, STEP, arrow_type, load_arrow
from moestream.trace.trace import SLAB_KINDS, Int, starts

_STEP_FIELDS = tuple(field.name for field in fields(Step))


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


def empty_batch(schema: Any) -> Any:
    """A record batch without rows."""
    pa = load_arrow()
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


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
