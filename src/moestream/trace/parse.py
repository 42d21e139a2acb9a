"""From rows of the table to a trace in memory. Rows that pass here break nothing that reads traces: nobody checks them
again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestream.stats import Step
from moestream.trace.schema import COLUMNS, ROUTE, SLAB, STEP, arrow_type, columns_of, damaged, load_arrow
from moestream.trace.trace import PHASES, SLAB_KINDS, Int, Routes, Slabs, Trace, starts
from moestream.values import MOST

_STEP_FIELDS = tuple(field.name for field in fields(Step))
#: Largest value of a column, where it is not ``MOST``: tokens are counted in 32 bits by the core; the kernel's clock
#: and what was slept of it are 64 bits wide.
_MOST = {
    "tokens": (1 << 31) - 1,
    **dict.fromkeys(("issued_ns", "ready_ns", "needed_ns", "waited_ns"), (1 << 63) - 1),
}


def check_columns(path: Path, schema: Any) -> None:
    """RefusedError unless every column is there, once and of its type."""
    for name in COLUMNS:
        found = schema.get_all_field_indices(name)
        if len(found) != 1:
            raise damaged(path, f"it has {'no column' if not found else 'more than one column'} {name}")
        kind = schema.field(found[0]).type
        if kind != arrow_type(name):
            raise damaged(path, f"its column {name} is of {kind}, not {arrow_type(name)}")


def from_batches(path: Path, meta: dict[str, Any], batches: Iterable[Any]) -> Trace:
    """The trace whose rows these are, of columns that ``check_columns`` passed and of checked metadata. Raises
    RefusedError, naming ``path``, for rows that make none."""
    pa = load_arrow()
    import pyarrow.compute as pc

    kept: dict[str, list[Any]] = {ROUTE: [], SLAB: [], STEP: []}
    for batch in batches:
        rows = 0
        for event, of in kept.items():
            of.append(batch.select(list(columns_of(event))).filter(pc.equal(batch["event"], event)))
            rows += of[-1].num_rows
        if rows != batch.num_rows:
            raise damaged(path, f"a row whose event is none of {', '.join(kept)}")
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
    routes = _routes(tables[ROUTE], meta["model"])
    return Trace(meta, routes, _slabs(tables[SLAB], meta["model"], len(routes)), _steps(tables[STEP]))


class _Table:
    """The rows of one kind, as numpy arrays of numbers that can be."""

    def __init__(self, path: Path, event: str, table: Any) -> None:
        self.path, self.event, self._table, self._whole = path, event, table, columns_of(event)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def column(self, name: str, absent: int = 0) -> NDArray[Any]:
        """Whole numbers from 0 (``absent`` where null and may be), or finite ones."""
        column = self._present(name)
        values: NDArray[Any] = column.fill_null(0).to_numpy()
        if values.dtype.kind == "f":
            wrong = ~np.isfinite(values) | (values < 0)
        else:
            values = values.astype(np.int64)
            wrong = (values < 0) | (values > _MOST.get(name, MOST))
        if wrong.any():
            raise self.damaged(f"whose {name} is {values[wrong][0]}")
        if absent and column.null_count:
            values = np.where(column.is_null().to_numpy(), absent, values)
        return values

    def lists(self, name: str) -> tuple[Int, NDArray[np.int32]]:
        """Lengths (0 of a null) and all values."""
        import pyarrow.compute as pc

        column = self._present(name)
        values = pc.list_flatten(column)
        if values.null_count:
            raise self.damaged(f"with a null among its {name}")
        lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
        return lengths, values.to_numpy().astype(np.int32)

    def numbers(self, name: str, words: tuple[str, ...]) -> Int:
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = pc.index_in(self._table[name], value_set=pa.array(words))
        if numbers.null_count:
            raise self.damaged(f"whose {name} is none of {', '.join(words)}")
        return numbers.to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    def banks(self, model: dict[str, Any]) -> Int:
        """The bank of each row, its layer checked."""
        bank = self.column("bank")
        if bank.max(initial=0) >= len(model["layers"]):
            raise damaged(self.path, f"a {self.event} of a bank its model does not have")
        if not np.array_equal(self.column("layer"), np.asarray(model["layers"])[bank]):
            raise self.damaged("whose layer is not that of its bank")
        return bank

    def _present(self, name: str) -> Any:
        """A column; what no row may lack and one lacks is damage."""
        column = self._table[name]
        if column.null_count and self._whole[name]:
            raise self.damaged(f"without its {name}")
        return column

    def damaged(self, why: str) -> Exception:
        return damaged(self.path, f"a {self.event} {why}")


def _routes(table: _Table, model: dict[str, Any]) -> Routes:
    number = table.column("route")
    # The first row of each route; its other rows follow it.
    heads = np.flatnonzero(np.diff(number, prepend=-1))
    if not np.array_equal(number[heads], np.arange(len(heads))):
        raise damaged(table.path, "its routes are not in order")
    rows = np.diff(np.append(heads, len(number)))
    columns = {name: table.column(name) for name in ("step", "token", "tokens")}
    columns["bank"] = table.banks(model)
    for name, values in columns.items():
        columns[name] = values[heads]
        if not np.array_equal(np.repeat(columns[name], rows), values):
            raise table.damaged(f"whose rows differ in {name}")
    for name in ("step", "token"):
        if (np.diff(columns[name]) < 0).any():
            raise table.damaged(f"whose {name} is below that of the one before")
    place = np.arange(len(number)) + np.repeat(columns["tokens"] - heads - rows, rows)
    if not np.array_equal(table.column("position"), place):
        raise table.damaged("without all its rows")
    k, ids = _ids(table, np.asarray(model["experts"])[columns["bank"]], heads, rows)
    wishes, wish_ids = _wishes(table, heads + rows - 1, sum(model["experts"]))
    return Routes(
        **columns,
        rows=rows.astype(np.int64),
        k=k,
        id_start=starts(rows * k),
        ids=ids,
        wish_start=starts(wishes),
        wish_ids=wish_ids,
    )


def _ids(table: _Table, experts: Int, heads: Int, rows: Int) -> tuple[Int, NDArray[np.int32]]:
    """How many ids each route's rows have, and all ids; ``experts``: of each route's bank."""
    lengths, ids = table.lists("ids")
    k = lengths[heads]
    if not np.array_equal(np.repeat(k, rows), lengths):
        raise table.damaged("whose rows differ in length")
    if (k == 0).any():
        raise table.damaged("that chose nothing")
    if ((ids < 0) | (ids >= np.repeat(experts, rows * k))).any():
        raise table.damaged("of an expert its bank does not have")
    return k, ids


def _wishes(table: _Table, last: Int, experts: int) -> tuple[Int, NDArray[np.int32]]:
    """How many wishes each route has, in its ``last`` row, and all wishes."""
    wishes, wish_ids = table.lists("wish")
    if wishes.sum() != wishes[last].sum():
        raise table.damaged("with a wish that is not in its last row")
    if ((wish_ids < 0) | (wish_ids >= experts)).any():
        raise table.damaged("that wishes for an expert its model does not have")
    return wishes[last], wish_ids


def _slabs(table: _Table, model: dict[str, Any], routes: int) -> Slabs:
    experts = np.asarray(model["experts"], np.int64)
    route = table.column("route", absent=-1)
    if route.max(initial=-1) >= routes:
        raise table.damaged("of a route it does not have")
    bank, expert = table.banks(model), table.column("expert")
    if (expert >= experts[bank]).any():
        raise table.damaged("of an expert its bank does not have")
    same = ("step", "slot", "bytes", "issued_ns", "ready_ns", "needed_ns", "waited_ns")
    return Slabs(
        route=route,
        expert=starts(experts)[bank] + expert,
        kind=table.numbers("kind", SLAB_KINDS),
        **{name: table.column(name) for name in same},
    )


def _steps(table: _Table) -> dict[str, NDArray[Any]]:
    steps = {name: table.column(name) for name in (*_STEP_FIELDS, "step")}
    if (np.diff(steps["step"]) <= 0).any():
        raise damaged(table.path, "its steps are not in order")
    return {**steps, "phase": table.numbers("phase", PHASES)}
