"""Models beside each other: of one file and of two, ours and stock's, and a second context of one."""

from __future__ import annotations

import pytest

import moestream
from answers import answer, prompt_tokens
from conftest import load, plain, same_answer


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
