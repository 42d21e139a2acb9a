"""Calls that overlap on one model: the last that began has the context, the others end in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moestream
from conftest import load
from moestream.errors import UsageError

#: Begin with different tokens, so that no call takes over what another has computed.
PROMPTS = [list(range(first, first + 40)) for first in (10, 60, 110, 160)]
LENGTH = 12


def text_of(llama: moestream.Llama, prompt: list[int]) -> Iterator[int]:
    tokens = llama.generate(prompt, temp=0.0)
    for _ in range(LENGTH):
        yield next(tokens)


@pytest.fixture(scope="module", params=["arena", "arena+threads:2+lru", "mapped+willneed"])
def llama(request: Any, tiny: Callable[..., Path]) -> Iterator[moestream.Llama]:
    with load(tiny("olmoe"), request.param, verbose=False) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(llama: moestream.Llama) -> list[list[int]]:
    return [list(text_of(llama, prompt)) for prompt in PROMPTS]


def test_the_last_that_began_has_the_context(llama: moestream.Llama, expected: list[list[int]]) -> None:
    left, last = text_of(llama, PROMPTS[0]), text_of(llama, PROMPTS[1])
    got = [next(left), next(left)]
    said = [next(last)]
    with pytest.raises(UsageError, match="one call at a time") as refused:
        next(left)
    assert got == refused.value.tokens == expected[0][:2]
    assert said + list(last) == expected[1]


def test_one_left_halfway_hinders_nobody(llama: moestream.Llama, expected: list[list[int]]) -> None:
    left, last = text_of(llama, PROMPTS[0]), text_of(llama, PROMPTS[1])
    next(left)
    said = [next(last)]
    llama.cancel()
    left.close()  # is no end of the other, nor of its being cancelled
    with pytest.raises(moestream.Cancelled):
        next(last)
    assert said == expected[1][:1]
    assert list(text_of(llama, PROMPTS[2])) == expected[2]


def test_threads_at_once_get_their_own_text_or_one_line(
    llama: moestream.Llama, expected: list[list[int]]
) -> None:
    together = threading.Barrier(len(PROMPTS))
    came: dict[int, list[int] | str] = {}

    def work(number: int) -> None:
        together.wait(30)
        try:
            came[number] = list(text_of(llama, PROMPTS[number]))
        except UsageError as error:
            came[number] = str(error)

    for _ in range(5):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = {number for number, got in came.items() if got == expected[number]}
        assert ended
        for number in came.keys() - ended:
            assert str(came[number]).startswith("one call at a time")
            assert "\n" not in str(came[number])
        came.clear()


def test_whoever_uses_the_context_takes_it(llama: moestream.Llama, expected: list[list[int]]) -> None:
    """What is evaluated beside a text is not put into it."""
    state = llama.save_state()
    uses: dict[str, Callable[[], Any]] = {
        "eval": lambda: llama.eval(PROMPTS[1]),
        "reset": llama.reset,
        "sample": llama.sample,
        "load_state": lambda: llama.load_state(state),
    }
    for use in uses.values():
        left = text_of(llama, PROMPTS[0])
        assert next(left) == expected[0][0]
        llama.save_state()  # only looks
        assert next(left) == expected[0][1]
        user = threading.Thread(target=use)
        user.start()
        user.join(60)
        with pytest.raises(UsageError, match="one call at a time"):
            next(left)
    assert next(text_of(llama, PROMPTS[0])) == expected[0][0]


def test_eval_beside_a_text_waits_for_its_step_and_ends_it(
    llama: moestream.Llama, expected: list[list[int]]
) -> None:
    """The step that runs is whole; the tokens that came before are the text's."""
    begun = threading.Event()
    came: list[int] = []

    def work() -> None:
        with pytest.raises(UsageError, match="one call at a time"):
            for token in llama.generate(PROMPTS[0], temp=0.0):
                came.append(token)
                begun.set()
        refused.set()

    refused = threading.Event()
    user = threading.Thread(target=work)
    user.start()
    assert begun.wait(60)
    llama.eval(PROMPTS[1])
    user.join(60)
    assert refused.is_set()
    assert came[:LENGTH] == expected[0][: len(came)]
    llama.reset()
    llama.eval(PROMPTS[1])
    assert llama.sample(temp=0.0) == expected[1][0]
