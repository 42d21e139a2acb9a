"""Embeddings: stock's to the bit, of a whole text or of none."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import load, plain
from moestream.errors import BudgetError, UsageError


@pytest.mark.parametrize("mechanism", ["arena", "mapped+pread+anon"])
def test_embeddings(mechanism: str, tiny) -> None:
    texts = ["abc", "a longer text than that", "x"]
    with load(tiny("qwen3moe"), mechanism, experts=16 << 20, embedding=True) as ours:
        stock = plain(tiny("qwen3moe"), embedding=True, n_batch=ours.n_batch, n_ubatch=ours.n_batch)
        for normalize in (False, True):
            for mine, theirs in zip(
                ours.embed(texts, normalize=normalize), stock.embed(texts, normalize=normalize), strict=True
            ):
                assert np.array_equal(mine, theirs)
        assert ours.create_embedding(texts)["data"] == stock.create_embedding(texts)["data"]
        stock.close()


@pytest.mark.parametrize("pooling", [-1, 1, 3])
def test_a_text_is_embedded_whole_or_not_at_all(tiny, pooling: int) -> None:
    """A cap cuts the batch; the binding would cut the text to it."""
    arguments = {"embedding": True, "pooling_type": pooling}
    with load(tiny("olmoe"), "arena", **arguments) as ours:
        assert ours.n_batch < 64
        texts = ["a" * ours.n_batch, "b"]
        stock = plain(tiny("olmoe"), n_batch=64, **arguments)
        assert [len(ours.tokenize(text.encode())) for text in texts] == [ours.n_batch, 1]
        assert [ours.embed(text) for text in texts] == [stock.embed(text) for text in texts]
        stock.close()
        with pytest.raises(BudgetError, match=rf"{ours.n_batch + 1} tokens .* steps of {ours.n_batch}"):
            ours.create_embedding([texts[1], "a" * (ours.n_batch + 1)])
        with pytest.raises(BudgetError, match="a text of 64 tokens"):  # of which stock takes as many
            ours.embed("a" * 1000)


@pytest.mark.parametrize("texts", ["", ["abc", ""], []])
def test_nothing_to_embed_is_told(tiny, texts: str | list[str]) -> None:
    with load(tiny("olmoe"), "arena", embedding=True) as ours:
        with pytest.raises(UsageError, match="embed"):
            ours.embed(texts)
        assert len(ours.embed("abc"))
