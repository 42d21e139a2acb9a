"""A step that failed leaves nothing that the next call would take for its own."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import moestream
from answers import prompt_tokens
from conftest import load


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
