"""docs/models.md is what a fresh run of every row says, and no row says that anything differs."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from children import run_child
from conftest import told_otherwise
from moestream.lab import models
from moestream.lab.models import ARMS, EQUAL, Row, measure, page, wanted
from moestream.make import ARCHITECTURES, census, make_model
from moestream.make.shapes import llama_name
from moestream.model import Model, read_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: What llama.cpp itself makes no model of, and its own check.
NO_MODEL_BY_LLAMA_CPP = {
    "clip": "CLIP cannot be used as main model",
    "gptj": "unsupported model architecture",
    "gemma4-assistant": "GGML_ASSERT(buft != nullptr)",
}
#: Rows in which llama.cpp itself does not run what its loader loads, and where it stops.
NOT_RUN_BY_LLAMA_CPP = {"refact": "routed 0 times"}


def committed() -> list[Row]:
    rows = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `") and " | " in line and "`arena`" not in line:
            name, quant, experts, beside, *outcomes = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.append(Row(name.strip("`"), quant, experts, beside, tuple(outcomes)))
    return rows


def committed_others() -> dict[str, str]:
    return dict(re.findall(r"^- `(.+?)`: (.+)$", PAGE.read_text(), re.MULTILINE))


def test_the_page_has_a_row_for_everything_and_nothing_else() -> None:
    assert [(row.name, row.quant) for row in committed()] == wanted()
    assert PAGE.read_text() == page(committed(), committed_others())


def test_every_architecture_that_llama_cpp_names_has_a_row_or_a_reason() -> None:
    assert list(committed_others()) == census.without_entry()
    assert {llama_name(arch) for arch in ARCHITECTURES} <= set(census.named_by_llama())
    reasons = {arch: found for arch, found in committed_others().items() if found != census.NO_EXPERTS}
    assert set(reasons) == set(NO_MODEL_BY_LLAMA_CPP)
    for arch, check in NO_MODEL_BY_LLAMA_CPP.items():
        assert check in reasons[arch]


@pytest.mark.parametrize("arch", ["qwen2moe", "lfm2moe", "nomic-bert-moe", "refact", "gpt-oss"])
def test_experts_are_seen_where_there_are_some(arch: str) -> None:
    """By the same look that finds none in those without a row."""
    assert "ffn_down_exps.weight" in census.look(arch).split()


def test_a_fresh_census_is_the_committed_one() -> None:
    names = list(committed_others())
    asked = names if os.environ.get("MOESTREAM_ALL_ROWS") else random.sample(names, 3)
    assert models.others(asked) == {name: committed_others()[name] for name in asked}


def test_every_row_is_equal_or_says_where_llama_cpp_stops() -> None:
    for row in committed():
        if row.name in NOT_RUN_BY_LLAMA_CPP:
            assert all(NOT_RUN_BY_LLAMA_CPP[row.name] in outcome for outcome in row.outcomes)
        else:
            assert row.outcomes == (EQUAL,) * len(ARMS), row.name


def test_the_layouts_are_all_there() -> None:
    text = PAGE.read_text()
    for layout in (
        "| gate up down |", "| gate_up down |", "| up down |", "chunk_gate chunk_up chunk_down", "shared experts",
        "expert biases", "expert scales", "latent experts", "leading layers without experts",
        "layers without experts between", "routed before attention", "token table", "grouped top-k",
        "next-token prediction", "recurrent layers",
    ):  # fmt: skip
        assert layout in text


def test_a_mixture_differs_across_layers_and_roles(tmp_path: Path) -> None:
    model = read_model(make_model(models.PLAIN, models.SHAPE, "Q4_K_M", tmp_path / "model.gguf"))
    types = {
        role: [tensor.type_name for bank in model.banks for tensor in bank.tensors if tensor.role == role]
        for role in ("gate", "up", "down")
    }
    assert set(types["gate"]) == set(types["up"]) == {"q4_K"}
    assert set(types["down"]) == {"q4_K", "q6_K"}


def made_again() -> list[Row]:
    """Every row where some minutes do not matter (``MOESTREAM_ALL_ROWS=1``, as continuous integration has it); else one
    of every combination of an expert's tensors and what is beside them."""
    rows = committed()
    if os.environ.get("MOESTREAM_ALL_ROWS"):
        return rows
    return list({(row.experts, row.beside): row for row in rows}.values())


@pytest.fixture(scope="module")
def under_way(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[Row]]]:
    """All rows that are asked for, on every processor: a row is computed by one thread."""
    rows = [item.callspec.params.get("row") for item in request.session.items if hasattr(item, "callspec")]
    with models.measuring([(row.name, row.quant) for row in rows if isinstance(row, Row)]) as under_way:
        yield under_way


@pytest.mark.parametrize("row", made_again(), ids=lambda row: f"{row.name}-{row.quant}")
def test_a_fresh_row_is_the_committed_one(row: Row, under_way: dict[tuple[str, str], Future[Row]]) -> None:
    assert under_way[row.name, row.quant].result().line == row.line


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Model]:
    path = make_model("olmoe", models.SHAPE, "Q4_K", tmp_path / "model.gguf")
    return path, read_model(path)


def test_a_mechanism_that_reads_nothing_is_told_from_stock(small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: slabs that were never read give other logits, again and again."""
    told_otherwise(monkeypatch, lambda arguments: arguments.update(reader="null"))
    other = (
        r"from row 0 of 7, \d+ of 320 values, the first at \d+, (by at most [\d.e+-]+|\d+ of them no numbers)"
    )
    assert re.fullmatch(
        rf"\*\*differs\*\* {other}; again: differs {other}; loaded anew: differs {other}; llama\.cpp again: equal",
        models._outcome(*small, "arena+sync+lru"),
    )


#: Which answer (after one of stock's in larger steps) is another one than it should be, and what is then told of each
#: that is asked for once more.
CHANGED = {
    "stock's": (1, ("differs", "differs", "differs")),
    "ours of a moment": (2, ("equal", "equal", "equal")),
}


@pytest.mark.parametrize("which", CHANGED)
def test_a_row_that_differs_once_explains_itself(small, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, told = CHANGED[which]
    asked = iter(range(9))
    real = models.answer

    def answer(llama: Any) -> Any:
        rows = real(llama)
        if next(asked) == number:
            rows[3][[5, 80]] += np.float32(0.5)
        return rows

    monkeypatch.setattr(models, "answer", answer)
    where = r" from row 3 of 7, 2 of 320 values, the first at 5, by at most 0\.5"
    again, anew, stock = (f"differs{where}" if one == "differs" else one for one in told)
    assert re.fullmatch(
        rf"\*\*differs\*\*{where}; again: {again}; loaded anew: {anew}; llama\.cpp again: {stock}",
        models._outcome(*small, "arena"),
    )


def test_a_row_whose_process_was_killed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    run = subprocess.run
    monkeypatch.setattr(models.subprocess, "run", lambda _command, **how: run(killed, **how))
    told = measure("olmoe", "Q4_K").outcomes
    assert told == ("llama.cpp, ended by SIGKILL: it ended without a word",) * len(ARMS)


def test_a_budget_is_named_for_chunk_experts_which_are_read_whole(tiny) -> None:
    """In a process of its own the smallest cap leaves no room beside what it was counted from."""
    path = tiny("grovemoe", "tiny,experts=256,ff=512,layers=2")
    cap = run_child(path, 1, "arena")["smallest_bytes"]
    result = run_child(path, cap, "arena", length=40)
    assert "error" not in result, result["text"]
    assert result["counters"]["misses"] > sum(result["capacities"])
    assert result["digests"] == run_child(path, "1GiB", "mapped+willneed", length=40)["digests"]
