"""A probe's tables as text, for ``probe --tables``: what the ten lines leave out. Text only; it decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moestream.units import format_bytes

_UNKNOWN = "-"


def tables(document: dict[str, Any]) -> Iterator[str]:
    """The lines of every table that holds a figure, each under its title and an empty line."""
    measured = document["disk"]
    yield from _table(
        "One layer's routed experts", ("how", "state", "rate", "a route"), _expert_read(measured)
    )
    yield from _sizes(measured.get("sizes", {}))
    for state, title in (("cold", "Slabs from the disk"), ("warm", "Slabs from the page cache")):
        yield from _grid(f"{title}, by threads and pieces of a slab", measured["grid"][state])
    yield from _rates("A cold mapping, by advice", measured.get("advice", {}), "advice")
    for state in ("cold", "warm"):
        title = f"{state.capitalize()} reads, by where they land"
        yield from _rates(title, measured.get(f"alignment_{state}", {}), "destination")


def _expert_read(measured: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["how"],
            row["state"],
            _rate(row["bytes_per_s"]),
            _UNKNOWN if row["s_per_route"] is None else f"{row['s_per_route'] * 1e3:.2f} ms",
        )
        for row in measured["expert_read"]
    ]


def _sizes(sizes: dict[str, dict[str, Any]]) -> Iterator[str]:
    readers = list(dict.fromkeys(reader for found in sizes.values() for reader in found))
    rows = [
        (
            format_bytes(int(size)),
            *(
                _rate(found[reader]["bytes_per_s"]["median"]) if reader in found else _UNKNOWN
                for reader in readers
            ),
        )
        for size, found in sizes.items()
    ]
    yield from _table("Slabs from the disk, by their size", ("slab", *readers), rows)


def _grid(title: str, grid: dict[str, dict[str, float]]) -> Iterator[str]:
    pieces = sorted({split for row in grid.values() for split in row}, key=int)
    rows = [
        (threads, *(_rate(row[split]) if split in row else _UNKNOWN for split in pieces))
        for threads, row in grid.items()
    ]
    columns = ("threads", *(f"{split} piece{'' if split == '1' else 's'}" for split in pieces))
    yield from _table(title, columns, rows)


def _rates(title: str, group: dict[str, Any], what: str) -> Iterator[str]:
    rows = [
        (name, _rate(found["bytes_per_s"]["median"]), f"{found['bytes_per_s']['spread']:.0%}")
        for name, found in group.items()
    ]
    yield from _table(title, (what, "rate", "spread"), rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A title and its rows in columns as wide as they need; nothing without rows."""
    if not rows:
        return
    wide = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    yield from ("", title)
    for cells in (columns, *rows):
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, wide, strict=True)).rstrip()


def _rate(value: float) -> str:
    return f"{format_bytes(value)}/s"
