"""What a caller hands in for the making of text: stock's answer, or one line where llama.cpp would end the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaGrammar

import moestream
from answers import answer, prompt_tokens
from conftest import load, plain, smallest_cap
from ggufs import rewrite
from moestream.errors import BudgetError, ModelError, UsageError
from moestream.make.demo import dense_model_path

PROMPT = prompt_tokens(20, 320)


@pytest.fixture(scope="module")
def ours(tiny: Callable[..., Path]) -> Iterator[moestream.Llama]:
    with load(tiny("olmoe"), "arena") as llama:
        yield llama


def text_of(llama: Any) -> list[int]:
    """Six tokens, after which it is closed."""
    text = [token for token, _ in zip(llama.generate(PROMPT, temp=0.0), range(6), strict=False)]
    llama.close()
    assert len(text) == 6
    return text


@pytest.fixture
def all_rows(tiny: Callable[..., Path]) -> Iterator[moestream.Llama]:
    with load(tiny("olmoe"), "arena", logits_all=True) as llama:
        assert llama.n_batch < len(PROMPT)
        yield llama


@pytest.mark.parametrize("place", [0, 18, 20, 99, -1])
def test_a_token_without_logits_is_not_sampled(place: int, ours: moestream.Llama) -> None:
    ours.reset()
    ours.eval(PROMPT)
    with pytest.raises(UsageError, match=rf"token {place} has no logits"):
        ours.sample(temp=0.0, idx=place)
    assert ours.sample(temp=0.0, idx=19) == ours.sample(temp=0.0)


def test_rows_of_the_last_step_are_there_and_those_before_are_not(all_rows: moestream.Llama) -> None:
    all_rows.eval(PROMPT)
    last = len(PROMPT) - 1
    step = len(PROMPT) % all_rows.n_batch or all_rows.n_batch
    assert all_rows.sample(temp=0.0, idx=last - step + 1) == all_rows.scores[last - step + 1].argmax()
    with pytest.raises(UsageError, match=f"at most n_batch={all_rows.n_batch} at once"):
        all_rows.sample(temp=0.0, idx=last - step)


def test_a_restored_state_is_evaluated_before_it_is_sampled(ours: moestream.Llama, tiny: Any) -> None:
    ours.reset()
    ours.eval(PROMPT)
    state, token = ours.save_state(), ours.sample(temp=0.0)
    with load(tiny("olmoe"), "arena") as other:
        other.load_state(state)
        with pytest.raises(UsageError, match="the last token has no logits"):
            other.sample(temp=0.0)
        assert next(other.generate(PROMPT, temp=0.0)) == token


def test_tokens_sent_to_a_text_need_their_rows(ours: moestream.Llama, all_rows: moestream.Llama) -> None:
    running = ours.generate(PROMPT, temp=0.0)
    next(running)
    with pytest.raises(UsageError, match="has no logits"):
        running.send([5, 6])
    running = all_rows.generate(PROMPT, temp=0.0)
    next(running)
    assert 0 <= running.send([5, 6]) < 320


@pytest.mark.parametrize("rules", ["root ::= nobody", 'root ::= root "a"', 'other ::= "a"', 'root ::= "a'])
def test_a_grammar_that_is_none(rules: str, ours: moestream.Llama) -> None:
    grammar = LlamaGrammar(_grammar=rules)
    for call in (
        lambda: ours.create_completion("abc", max_tokens=4, grammar=grammar),
        lambda: ours.sample(grammar=grammar),
    ):
        ours.reset()
        ours.eval(PROMPT)
        ours._sampler = None  # as after a load: it is made for this call
        with pytest.raises(UsageError, match="this grammar is none") as refused:
            call()
        assert "\n" not in str(refused.value)
    assert ours.create_completion("abc", max_tokens=4)["usage"]["completion_tokens"] > 0


def test_a_draft_longer_than_a_step_changes_no_text(tiny: Callable[..., Path]) -> None:
    """The cap cuts the step, not the caller; and there is room for the logits of more than a step's tokens."""

    def draft(tokens: Any, /, **options: Any) -> Any:
        return np.full(50, tokens[-1], dtype=np.intc)

    assert text_of(load(tiny("olmoe"), "arena", draft_model=draft)) == text_of(
        plain(tiny("olmoe"), n_batch=64, draft_model=draft, logits_all=True)
    )
    dense = dense_model_path()
    drafted = moestream.Llama(dense, n_ctx=256, n_batch=4, n_threads=2, draft_model=draft)
    assert text_of(drafted) == text_of(plain(dense, n_batch=64, draft_model=draft, logits_all=True))


def test_the_logits_of_every_token_are_in_the_plan(tiny: Callable[..., Path]) -> None:
    """The parent keeps them in memory of its own, which it takes as it goes."""
    n_ctx = 32768
    with_all, without = (
        smallest_cap(tiny("olmoe"), "arena", n_ctx=n_ctx, n_batch=8, logits_all=kept)
        for kept in (True, False)
    )
    assert with_all - without > 0.8 * n_ctx * 320 * 4  # what else the process holds moves by some megabytes


def test_tokens_that_see_each_other_are_one_step_or_refused(tiny: Callable[..., Path]) -> None:
    settings = {"n_batch": 64, "n_ubatch": 64, "attention_type": 1}
    stock = plain(tiny("olmoe"), **settings)
    for experts in (0, 64 << 20):
        with load(tiny("olmoe"), "arena", experts=experts, **settings) as ours:
            part = PROMPT[: ours.n_batch]
            assert answer(ours, part, 0) == answer(stock, part, 0)
            if ours.n_batch < len(PROMPT):
                with pytest.raises(
                    BudgetError, match=f"the cap holds steps of {ours.n_batch}: name more memory"
                ):
                    ours.eval(PROMPT)
    assert part == PROMPT  # with memory enough all of it was one
    stock.close()


@pytest.mark.parametrize("template", ["{% for %}", "{{ nobody | unknown_filter }}", "{{" + "(" * 5000])
def test_a_template_that_is_none_costs_the_chats_alone(
    template: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = rewrite(tiny("olmoe"), tmp_path / "m.gguf", change={"tokenizer.chat_template": template})
    messages = [{"role": "user", "content": "hi"}]
    with load(path, "arena") as ours, load(tiny("olmoe"), "arena") as sound:
        for _ in range(2):
            with pytest.raises(ModelError, match="a chat template in it is none") as refused:
                ours.create_chat_completion(messages, max_tokens=2)
            assert str(path) in str(refused.value)
            assert "\n" not in str(refused.value)
        assert next(ours.generate(PROMPT, temp=0.0)) == next(sound.generate(PROMPT, temp=0.0))
        sound.create_chat_completion(messages, max_tokens=1)
        ours.chat_format = "chatml"
        assert ours.create_chat_completion(messages, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("n_batch", [4, 16, 512])
def test_a_state_saved_under_another_cap_is_restored(
    n_batch: int, ours: moestream.Llama, tiny: Callable[..., Path]
) -> None:
    tokens = prompt_tokens(80, 320)
    expected = next(ours.generate(tokens, temp=0.0))
    with load(tiny("olmoe"), "arena", n_batch=n_batch) as other:
        other.eval(tokens)
        state = other.save_state()
    ours.reset()
    assert (
        len(state.scores) == 0
    )  # rows that nothing was written into take hundreds of MB in large vocabularies
    ours.load_state(state)
    assert ours.n_tokens == len(tokens)
    assert next(ours.generate(tokens, temp=0.0)) == expected
