"""The parent's arguments that change what llama.cpp computes: stock's answer with the same ones, or one line."""

from __future__ import annotations

from typing import Any

import pytest

import moestream
from answers import answer, prompt_tokens
from conftest import load, plain
from moestream.dryrun import measure_context
from moestream.errors import EngagementError, ModelError, UsageError

USED = "olmoe.expert_used_count"


@pytest.mark.parametrize("used", [1, 7, 32])
@pytest.mark.parametrize("mechanism", ["arena+gate:1", "mapped+willneed"])
def test_more_or_fewer_experts_a_token(tiny, mechanism: str, used: int) -> None:
    """The plan is of as many as will be used: the smallest budget works."""
    overrides = {USED: used}
    with load(tiny("olmoe"), mechanism, kv_overrides=overrides) as ours:
        assert ours.model_info.n_experts_used == used
        stock = plain(tiny("olmoe"), n_batch=ours.n_batch, n_ubatch=ours.n_batch, kv_overrides=overrides)
        tokens = prompt_tokens(20, stock.n_vocab())
        assert answer(ours, tokens, 4) == answer(stock, tokens, 4)
        stock.close()


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        ({USED: "4"}, False),  # another type than the header's: llama.cpp goes by the file
        ({USED: 2**32 + 3}, True),  # as the header's 32 bits hold it
        ({"olmoe.attention.layer_norm_rms_epsilon": 0.25}, True),
        ({"nobody.asks": 1}, False),
    ],
)
def test_an_override_counts_as_llama_cpp_counts_it(tiny, overrides: dict[str, Any], change: bool) -> None:
    answers = []
    for said in (overrides, None):
        with load(tiny("olmoe"), "arena", kv_overrides=said, n_batch=8) as ours:
            stock = plain(tiny("olmoe"), n_batch=ours.n_batch, n_ubatch=ours.n_batch, kv_overrides=said)
            tokens = prompt_tokens(8, stock.n_vocab())
            answers.append(answer(ours, tokens, 2))
            assert answers[-1] == answer(stock, tokens, 2)
            stock.close()
    assert (answers[0] != answers[1]) == change


@pytest.mark.parametrize(
    "overrides",
    [
        {USED: 0},
        {USED: 33},
        {"olmoe.expert_count": 16},
        {"olmoe.block_count": 1},
        {"olmoe.attention.head_count": 0},
        {"olmoe.attention.head_count_kv": 0},
        {"olmoe.attention.layer_norm_rms_epsilon": float("nan")},
        {"general.architecture": "nobody"},
    ],
    ids=str,
)
def test_an_override_that_makes_no_model_is_named(tiny, overrides: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"leave out kv_overrides") as refused:
        moestream.Llama(tiny("olmoe"), ram="1GiB", kv_overrides=overrides)
    assert next(iter(overrides)) in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_overrides": {USED: [1]}},
        {"kv_overrides": {USED: 2**64}},
        {"kv_overrides": {"x" * 128: 1}},
        {"kv_overrides": {"x": "y" * 128}},
        {"kv_overrides": {"": 1}},
        {"n_batch": -1},
        {"n_batch": 0},
        {"n_batch": 2.5},
        {"n_ubatch": -1},
        {"n_ctx": -1},
        {"n_ctx": 2**31},
        {"n_ctx": "many"},
        {"type_k": -1},
        {"type_k": 4},  # a type that ggml no longer has
        {"type_k": 9},  # one that nothing can be written in
        {"type_v": 16},
        {"type_v": 999},
        {"pooling_type": 4},  # a rank, which the binding reads as an embedding
        {"pooling_type": 99},
        {"attention_type": 7},
        {"attention_type": [1]},
        {"n_threads": 100000},
        {"n_threads": "2"},
        {"n_threads_batch": 513},
    ],
    ids=str,
)
def test_a_value_that_llama_cpp_would_crash_over(tiny, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))) as refused:
        moestream.Llama(tiny("olmoe"), ram="1GiB", **arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 6, 7, 8, 20, 30])
def test_every_type_of_cache(tiny, kind: int) -> None:
    arguments = {"type_k": kind, "type_v": kind, "flash_attn": True}
    with load(tiny("olmoe"), "arena", **arguments) as ours:
        stock = plain(tiny("olmoe"), n_batch=ours.n_batch, n_ubatch=ours.n_batch, **arguments)
        tokens = prompt_tokens(20, stock.n_vocab())
        assert answer(ours, tokens, 4) == answer(stock, tokens, 4)
        stock.close()


def test_a_plan_counts_a_state_for_each_text_of_a_step(tiny) -> None:
    """The binding makes room for as many texts as a step has tokens; a recurrent layer keeps a state for each."""
    text, texts = (
        measure_context(tiny("granitehybrid"), 256, 64, 64, embeddings=embeddings).kv_bytes
        for embeddings in (False, True)
    )
    with load(tiny("granitehybrid"), "arena", experts=32 << 20, embedding=True) as ours:
        assert ours.context_params.n_seq_max == ours.plan.n_batch == 64
        assert ours.plan.kv_bytes > texts - (1 << 20) > 16 * text


@pytest.mark.parametrize("token", [-7, 320, 99999])
def test_a_token_that_is_none_has_no_text(tiny, token: int) -> None:
    with load(tiny("olmoe"), "arena") as ours:
        assert ours.n_vocab() == 320
        with pytest.raises(UsageError, match=f"{token} is no token .* 0 to 319 are"):
            ours.detokenize([1, token])
        assert ours.detokenize(ours.tokenize(b"abc")) == b"abc"


def test_a_word_that_is_no_argument_is_told(tiny) -> None:
    """The binding takes any word: a cap that is misspelt would be none."""
    with load(tiny("olmoe"), "arena", ramm="1GiB", frobnicate=3) as ours:
        assert ours.fallbacks == [
            "frobnicate is no argument and was ignored",
            "ramm is no argument and was ignored: did you mean ram?",
        ]
    with pytest.raises(EngagementError, match="did you mean ram"):
        moestream.Llama(tiny("olmoe"), strict=True, ramm="1GiB")
    with load(tiny("olmoe"), "arena", flash_attn=True) as ours:
        assert ours.fallbacks == []
