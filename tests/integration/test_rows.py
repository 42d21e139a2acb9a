"""Rows of logits: as many as were asked for at the load, all where llama.cpp computes all, and never an abort."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import moestream
from answers import last_logits, prompt_tokens
from conftest import load, plain
from moestream.binding import low
from typed import typed

#: Of the pinned llama.cpp: diffusion models and an encoder.
WITHOUT_MEMORY = ("llada-moe", "rnd1", "nomic-bert-moe")


def all_rows(llama: object, tokens: list[int]) -> np.ndarray:
    """What a caller of llama.cpp's own functions gets who wants each row of a batch."""
    context = llama._ctx.ctx  # type: ignore[attr-defined]
    batch = low.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, True
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        assert low.llama_decode(context, batch) == 0
        return np.stack([row(llama, place) for place in range(len(tokens))])
    finally:
        low.llama_batch_free(batch)


def row(llama: object, place: int) -> np.ndarray:
    found = low.llama_get_logits_ith(llama._ctx.ctx, place)  # type: ignore[attr-defined]
    return np.array(found[: llama.n_vocab()], np.float32)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("arch", "asked"), [("llada-moe", False), ("rnd1", False), ("olmoe", True)])
def test_all_rows_are_stocks(arch: str, asked: bool, tiny: Callable[..., Path]) -> None:
    with load(tiny(arch), "arena+uring:24+lru", experts=32 << 20, logits_all=asked) as llama:
        assert llama.plan is not None
        assert llama.plan.has_memory == asked
        tokens = prompt_tokens(12, llama.n_vocab())
        ours = all_rows(llama, tokens)
    other = plain(tiny(arch), logits_all=asked)
    assert np.array_equal(ours, all_rows(other, tokens))
    other.close()


@pytest.mark.parametrize("arch", WITHOUT_MEMORY)
def test_text_of_a_model_without_a_memory_is_refused(arch: str, tiny: Callable[..., Path]) -> None:
    with load(tiny(arch), "arena+sync") as llama:
        for _ in range(2):
            with pytest.raises(moestream.ModelError, match="has no memory"):
                llama.create_completion([1, 2, 3], max_tokens=2)


def test_a_run_of_it_says_so_in_one_line(tiny: Callable[..., Path]) -> None:
    done = typed("run", tiny("llada-moe"), "-p", "a", "-n", 2, "--ctx", 64)
    assert (done.returncode, done.stdout) == (3, "")
    assert "has no memory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_more_rows_than_the_context_was_made_for_are_refused(tiny: Callable[..., Path]) -> None:
    with load(tiny("olmoe"), "arena+sync") as llama:
        tokens = prompt_tokens(8, llama.n_vocab())
        llama._batch.set_batch(tokens, n_past=0, logits_all=True)
        with pytest.raises(
            moestream.UsageError, match=r"8 rows of logits .* made for 1: load with logits_all=True"
        ):
            llama._ctx.decode(llama._batch)
        llama.eval(tokens)
        assert last_logits(llama).size == llama.n_vocab()
