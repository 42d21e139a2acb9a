"""A step that failed leaves nothing that the next call would take for its own."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import moestream
from answers import prompt_tokens
from conftest import load, same_answer
from moestream.binding import low
from moestream.geometry import slab_geometry


@pytest.mark.parametrize("logits_all", [True, False])
@pytest.mark.parametrize("mechanism", ["arena", "mapped+willneed"])
def test_the_same_prompt_again_after_a_cancelled_step(tiny, mechanism: str, logits_all: bool) -> None:
    """The binding samples at once where it has a prompt already; the rows of logits are those of the step that ended
    early by then."""
    with load(tiny("olmoe"), mechanism, experts=64 << 20, logits_all=logits_all) as llama:
        prompt, longer = (prompt_tokens(length, llama.n_vocab(), length) for length in (8, 64))

        def text() -> list[int]:
            return list(islice(llama.generate(prompt, temp=0.0), 5))

        expected = text()
        llama.reset()
        llama.eval(prompt)
        decode = llama._ctx.decode

        def cancelled(batch: Any) -> Any:
            llama.cancel()
            return decode(batch)

        llama._ctx.decode = cancelled
        with pytest.raises(moestream.Cancelled):
            llama.eval(longer)
        llama._ctx.decode = decode
        assert llama.n_tokens == len(prompt)
        assert text() == expected


@pytest.mark.parametrize("mechanism", ["arena", "arena/fresh+threads:2"])
def test_llama_cpps_own_decode_says_that_it_failed(tiny, stock, mechanism: str) -> None:
    """Who calls it has its code alone to go by: a success would be taken with the logits of half a graph."""
    with load(tiny("olmoe"), mechanism, experts=16 << 20) as llama:
        llama._engine.resize(slab_geometry(llama.model_info).smallest(1))
        llama._batch.set_batch(prompt_tokens(64, llama.n_vocab()), n_past=0, logits_all=False)
        for _ in range(2):
            assert low.llama_decode(llama.ctx, llama._batch.batch) not in (0, 1)
            assert "experts at once and the budget holds" in llama._engine.failure[1]
        llama._engine.clear_failure()
        llama.reset()
        llama.n_batch = 1
        same_answer(llama, stock, 5)
