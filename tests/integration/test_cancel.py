"""A call or a load that is stopped ends at once, and the next one is right."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import moestream
from answers import answer, prompt_tokens
from conftest import load, same_answer


@pytest.mark.parametrize("mechanism", ["arena+uring:24+lru", "arena+sync+none", "resident", "mapped+fault"])
def test_cancel_within_a_prompt(mechanism: str, tiny, stock) -> None:
    with load(tiny("olmoe"), mechanism, n_batch=1) as llama:
        decode, seen, cancelled = llama._ctx.decode, threading.Event(), threading.Event()
        steps = 0

        def count(batch: object) -> None:
            nonlocal steps
            steps += 1
            if steps == 20:
                seen.set()
                assert cancelled.wait(30)
            decode(batch)

        def cancel() -> None:
            assert seen.wait(30)
            llama.cancel()
            cancelled.set()

        thread = threading.Thread(target=cancel)
        thread.start()
        llama._ctx.decode = count
        with pytest.raises(moestream.Cancelled):
            llama.eval(prompt_tokens(200, llama.n_vocab(), seed=3))
        thread.join()
        llama._ctx.decode = decode
        assert steps == 20  # the step that was about to run is the last
        same_answer(llama, stock, 7)


def test_cancel_while_generating(tiny) -> None:
    with load(tiny("olmoe"), "arena") as llama:
        expected = llama.create_completion("ab", max_tokens=20, temperature=0)["choices"][0]["text"]
        llama.reset()
        text = ""
        with pytest.raises(moestream.Cancelled):
            for number, part in enumerate(
                llama.create_completion("ab", max_tokens=20, temperature=0, stream=True)
            ):
                text += part["choices"][0]["text"]
                if number == 1:
                    thread = threading.Thread(target=llama.cancel)
                    thread.start()
                    thread.join()
        assert text and expected.startswith(text) and len(text) < len(expected)
        llama.reset()
        again = llama.create_completion("ab", max_tokens=20, temperature=0)["choices"][0]["text"]
        assert again == expected


def test_cancel_from_within_the_wait_for_a_disk(tiny) -> None:
    """Without a hand in the decoding thread: the prompt is long, the other cancels as soon as it runs."""
    with load(tiny("olmoe"), "arena+uring:1+none", n_batch=1) as llama:
        done = threading.Event()

        def cancel_when_running() -> None:
            while llama._engine.counters["routes"] < 50 and not done.is_set():
                done.wait(0.001)
            llama.cancel()

        thread = threading.Thread(target=cancel_when_running)
        thread.start()
        with pytest.raises(moestream.Cancelled):
            for _ in range(50):
                answer(llama, prompt_tokens(300, llama.n_vocab()), 1)
        done.set()
        thread.join()


@pytest.mark.parametrize("mechanism", ["arena+uring:24+lru", "arena+threads:2", "mapped+willneed"])
def test_load_interrupted(mechanism: str, tiny, stock) -> None:
    """An exception from the progress callback stops the load and leaves nothing behind."""
    path = tiny("olmoe")
    before = len(list(Path("/proc/self/fd").iterdir()))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(path, "resident" if mechanism.startswith("mapped") else mechanism, on_progress=stop)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    with load(path, mechanism) as llama:
        same_answer(llama, stock, 7)
