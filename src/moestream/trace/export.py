"""A trace as two CSV tables, for spreadsheets and for what reads the older probes' files.

``steps``: one row a step; ``experts``: one row for each expert a token was routed to. docs/formats/trace.md says which
figure of a step stands in which column.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moestream.errors import RefusedError, UsageError
from moestream.files import check_directory
from moestream.trace.trace import Trace

#: Column of the steps' table: field of a step.
STEP_COLUMNS = {
    "step": "step",
    "tokens": "tokens",
    "seconds": "seconds",
    "bytes": "bytes_read",
    "major_faults": "majflt",
    "pread_s": "stall_s",
    "advice_s": "memory_work_s",
}
EXPERT_COLUMNS = ("token", "layer", "expert")


def experts_path(out: Path) -> Path:
    """Where the experts' table goes when the steps' goes to ``out``."""
    return out.with_suffix(".experts.csv")


def export_csv(trace: Trace, out: Path, experts: bool = True) -> list[Path]:
    """Write the tables, each whole or not at all; the files written. An earlier export is replaced, any other file is
    not. Raises UsageError for a bad ``out``, RefusedError for a trace without steps and for a full disk."""
    if out.suffix != ".csv":
        raise UsageError(f"--csv {out}: name a .csv file")
    if not len(trace.steps["step"]):
        raise RefusedError("the trace holds no steps: there is nothing to export")
    tables: list[tuple[Path, tuple[str, ...], Iterable[Any]]] = [
        (out, tuple(STEP_COLUMNS), step_rows(trace)),
    ]
    if experts:
        tables.append((experts_path(out), EXPERT_COLUMNS, expert_rows(trace)))
    for path, columns, _ in tables:
        _check(path, columns)
    for path, columns, rows in tables:
        _write(path, columns, rows)
    return [path for path, _, _ in tables]


def step_rows(trace: Trace) -> Iterator[tuple[Any, ...]]:
    return zip(*(trace.steps[name].tolist() for name in STEP_COLUMNS.values()), strict=True)


def expert_rows(trace: Trace) -> Iterator[tuple[int, int, int]]:
    """Token, layer and expert of each choice, in the router's order. A pass whose choice was not seen (its bank was
    read whole) has none."""
    routes, model = trace.routes, trace.meta["model"]
    seen = routes.k <= np.asarray(model["used"], int)[routes.bank]
    for route in np.flatnonzero(seen).tolist():
        ids = routes.of(route)
        # Rows are dropped from the front: what is asked for of a prompt is its last token.
        first = int(routes.token[route] + routes.tokens[route]) - len(ids)
        layer = int(model["layers"][routes.bank[route]])
        for token, row in enumerate(ids.tolist(), first):
            yield from ((token, layer, expert) for expert in row)


def _check(path: Path, columns: tuple[str, ...]) -> None:
    check_directory(path, "--csv")
    if not path.exists():
        return
    header = ",".join(columns).encode()
    if not path.is_file():
        raise UsageError(f"--csv {path} is not a file: name another one")
    try:
        with path.open("rb") as file:
            begins = file.read(len(header) + 1)
    except OSError as error:
        raise UsageError(f"--csv {path} cannot be read: {error.strerror}; name another file") from None
    if begins.rstrip(b"\r\n") != header:
        raise UsageError(f"--csv {path} exists and is not an exported trace: name another file")


def _write(path: Path, columns: tuple[str, ...], rows: Iterable[Any]) -> None:
    path = path.resolve()  # a link is followed, not replaced
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with fresh.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(rows)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise RefusedError(f"--csv {path}: cannot be written: {error.strerror or error}") from None
