"""docs/models.md is what a fresh run of every row says, and no row says that anything differs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from moestream.lab.models import EQUAL, MECHANISMS, Row, measure, page, wanted
from moestream.make import make_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: Rows in which llama.cpp itself does not run what its loader loads, and where it stops.
NOT_RUN_BY_LLAMA_CPP = {"refact": "routed 0 times"}


def committed() -> list[Row]:
    rows = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `") and " | " in line and "`arena`" not in line:
            name, quant, experts, beside, *outcomes = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.append(Row(name.strip("`"), quant, experts, beside, tuple(outcomes)))
    return rows


def test_the_page_has_a_row_for_everything_and_nothing_else() -> None:
    assert [(row.name, row.quant) for row in committed()] == wanted()
    assert PAGE.read_text() == page(committed())


def test_every_row_is_equal_or_says_where_llama_cpp_stops() -> None:
    for row in committed():
        if row.name in NOT_RUN_BY_LLAMA_CPP:
            assert all(NOT_RUN_BY_LLAMA_CPP[row.name] in outcome for outcome in row.outcomes)
        else:
            assert row.outcomes == (EQUAL,) * len(MECHANISMS), row.name


def test_the_layouts_are_all_there() -> None:
    text = PAGE.read_text()
    for layout in (
        "| gate up down |", "| gate_up down |", "| up down |", "chunk_gate chunk_up chunk_down", "shared experts",
        "expert biases", "expert scales", "latent experts", "leading layers without experts",
        "layers without experts between", "routed before attention", "token table", "grouped top-k",
        "next-token prediction", "recurrent layers",
    ):  # fmt: skip
        assert layout in text


def made_again() -> list[Row]:
    """Every row where some minutes do not matter (``MOESTREAM_ALL_ROWS=1``, as continuous integration has it); else one
    of every combination of an expert's tensors and what is beside them."""
    rows = committed()
    if os.environ.get("MOESTREAM_ALL_ROWS"):
        return rows
    return list({(row.experts, row.beside): row for row in rows}.values())


@pytest.mark.parametrize("row", made_again(), ids=lambda row: f"{row.name}-{row.quant}")
def test_a_fresh_row_is_the_committed_one(row: Row) -> None:
    assert measure(row.name, row.quant).line == row.line


def test_a_mechanism_that_reads_nothing_is_told_from_stock(tmp_path: Path, monkeypatch) -> None:
    """The comparison itself: slabs that were never read give other logits."""
    from conftest import told_otherwise
    from moestream.lab import models
    from moestream.model import read_model

    path = make_model("olmoe", models.SHAPE, "Q4_K", tmp_path / "model.gguf")
    told_otherwise(monkeypatch, lambda arguments: arguments.update(reader="null"))
    assert re.fullmatch(
        r"\*\*differs\*\*|.*not numbers", models._outcome(path, read_model(path), "arena+sync+lru")
    )
