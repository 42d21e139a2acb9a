"""The pages of formats name every column and every key, with its type."""

from __future__ import annotations

from pathlib import Path

from moestream.trace.schema import COLUMNS

DOCS = Path(__file__).parents[2] / "docs" / "formats"


def test_every_column_of_a_trace_is_on_its_page() -> None:
    page = (DOCS / "trace.md").read_text()
    for name, (kind, _) in COLUMNS.items():
        told = [line for line in page.splitlines() if f"`{name}`" in line]
        assert any(kind.replace("list<int32>", "list of int32") in line for line in told), (name, kind)


def test_every_key_of_a_fit_is_on_its_page() -> None:
    page = (DOCS / "fit.md").read_text()
    for name in ("format", "version", "model", "wishes", "before", "counts", "weights_", "bias_"):
        assert name in page, name
