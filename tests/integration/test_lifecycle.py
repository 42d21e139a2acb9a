"""A model's life in a process: opened often, beside others, in children, under signals, at the interpreter's end."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import moestream
from answers import CONTEXT, answer, prompt_tokens
from conftest import load, same_answer

OPENS = Path(__file__).parents[2] / "tools" / "opens.py"
#: The begin of every program here: one model, loaded in a line, and what it makes of three tokens.
BEGIN = """
import gc, os, signal, sys, threading, time
import moestream
from moestream.binding import llama_cpp
def load(mechanism="arena", **arguments):
    return moestream.Llama(sys.argv[1], ram="2GiB", mechanism=mechanism, n_ctx=512, n_threads=2, n_threads_batch=2,
                           **arguments)
def first(llama, prompt=(1, 5, 9)):
    llama.reset()
    return next(llama.generate(list(prompt), temp=0.0))
"""


def run(program: str, *words: object, code: int = 0) -> str:
    """What a process of its own says: a crash or a hang there is not one here."""
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(program), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Fatal" not in done.stderr and "terminate called" not in done.stderr, done.stderr
    if code == 0:
        assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_opening_and_closing_leaves_nothing() -> None:
    """A share of ``make opens`` (figures: FINDINGS.md). After six cycles of each way Python's caches are full."""
    words = [sys.executable, str(OPENS), "--cycles", "180", "--settled", "108"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 grew" in done.stdout


def test_two_models_compute_at_the_same_time(tiny: Any, stock: Any) -> None:
    """Each in a thread of its own, loaded there as well, one by its own pages and one by the page cache's."""
    asked = {tiny("olmoe"): "arena+uring:8+lru+gate:1", tiny("qwen3moe"): "mapped+willneed"}
    got: list[tuple[Path, int, int, Any]] = []
    together = threading.Barrier(len(asked))

    def work(path: Path, mechanism: str) -> None:
        for seed in range(2):
            together.wait(60)
            with load(path, mechanism) as llama:
                together.wait(60)
                got.append((path, seed, llama.n_batch, answer(llama, prompt_tokens(60, 256, seed), 20)))

    threads = [threading.Thread(target=work, args=each) for each in asked.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    for path, seed, n_batch, answered in sorted(got, key=lambda one: str(one[0])):
        assert answered == stock(path, prompt_tokens(60, 256, seed), 20, 2, n_batch, n_batch)


@pytest.mark.parametrize(
    "mechanism", ["arena", "arena+threads:2+lru", "resident", "mapped+pread+background:1"]
)
def test_a_child_loads_a_model_of_its_own(mechanism: str, tiny: Any) -> None:
    """After a fork of a process that has computed: with OpenMP's threads of the parent llama.cpp would hang."""
    said = run(
        """
        llama = load(sys.argv[2])
        expected = first(llama)
        child = os.fork()
        if child == 0:
            with load(sys.argv[2]) as own:
                assert first(own) == expected
            del llama
            gc.collect()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert first(llama) == expected
        llama.close()
        print("both")
        """,
        tiny("olmoe"),
        mechanism,
    )
    assert said == "both\n"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_pool_of_processes(method: str, tiny: Any, tmp_path: Path) -> None:
    program = tmp_path / "pool.py"
    program.write_text(
        BEGIN
        + textwrap.dedent("""
        import multiprocessing
        llama = None
        def inherited(_):
            try:
                return first(llama)
            except moestream.UsageError as error:
                return str(error)
        def own(_):
            with load("arena+threads:2") as mine:
                return first(mine)
        if __name__ == "__main__":
            llama = load()
            expected = first(llama)
            context = multiprocessing.get_context(sys.argv[2])
            with context.Pool(2) as pool:
                assert pool.map(own, range(4)) == [expected] * 4
                if sys.argv[2] == "fork":
                    assert "before the process forked" in pool.map(inherited, range(1))[0]
                assert first(llama) == expected
            assert first(llama) == expected
            llama.close()
            print("all")
        """)
    )
    words = [sys.executable, str(program), str(tiny("olmoe")), method]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr


def test_a_model_that_is_sent_to_a_process_is_loaded_there_as_asked(tiny: Any, stock: Any) -> None:
    """Its cap and its mechanism go along, as the parent's own arguments do."""
    asked = {
        "ram": "1GiB",
        "mechanism": "arena+sync+lru",
        "governor": False,
        "n_ctx": CONTEXT,
        "n_threads": 2,
    }
    with moestream.Llama(tiny("olmoe"), n_batch=64, n_threads_batch=2, **asked) as llama:
        sent = pickle.dumps(llama)
    with pickle.loads(sent) as there:
        assert there.plan.cap_bytes == llama.plan.cap_bytes == 1 << 30
        assert there.mechanism == llama.mechanism
        assert there.governor is None
        same_answer(there, stock, 40)


@pytest.mark.parametrize(
    "mechanism", ["arena", "arena+threads:2", "arena/buffered+sync+lru", "mapped+pread+willneed"]
)
def test_a_thousand_signals_a_second(mechanism: str, tiny: Any, stock: Any) -> None:
    """Every system call of the load and of the run is interrupted at some time."""
    heard = 0

    def hear(number: int, frame: object) -> None:
        nonlocal heard
        heard += 1

    before = signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with load(tiny("olmoe"), mechanism) as llama:
            same_answer(llama, stock, 40, steps=12)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard > 20


@pytest.mark.parametrize(
    ("moment", "mechanism"),
    [
        ("load", "arena"),
        ("load", "resident"),
        ("prompt", "arena+threads:2"),
        ("text", "arena"),
        ("text", "mapped+willneed"),
    ],
)
def test_a_keyboard_interrupt(moment: str, mechanism: str, tiny: Any, stock: Any) -> None:
    """Reaches the caller, who can go on: with a new model after one in the load, else with the same."""

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    if moment == "load":
        with pytest.raises(KeyboardInterrupt):
            load(tiny("olmoe"), mechanism, on_progress=interrupt)
    with load(tiny("olmoe"), mechanism) as llama:
        decode, steps = llama._ctx.decode, 0

        def step(batch: Any) -> None:
            nonlocal steps
            steps += 1
            decode(batch)
            if steps == {"prompt": 1, "text": 5}.get(moment):
                interrupt()

        llama._ctx.decode = step
        if moment != "load":
            with pytest.raises(KeyboardInterrupt):
                for _ in llama.generate(prompt_tokens(150, llama.n_vocab()), temp=0.0):
                    pass
        same_answer(llama, stock, 40)


@pytest.mark.parametrize(
    ("end", "mechanism"),
    [
        ("pass", "arena+uring:8+lru+gate:2"),
        ("pass", "arena+threads:2+lru+previous"),
        ("pass", "mapped+pread+background:2"),
        ("sys.exit(0)", "arena+uring:8+lru+gate:2"),
        ("os._exit(0)", "arena+threads:2+lru+gate:2"),
    ],
)
def test_the_interpreter_ends_while_a_thread_generates(mechanism: str, end: str, tiny: Any) -> None:
    """And reads: a budget holds few of an arena's 128 experts, so each step waits for some."""
    run(
        f"""
        def endless():
            while True:
                for number, _ in enumerate(llama.generate([1, 5, 9], temp=0.0)):
                    reached.set()
                    if number == 300:
                        break
        llama = load(sys.argv[2], _expert_bytes=4 << 20)
        reached = threading.Event()
        running = threading.Thread(target=endless, daemon=True)
        running.start()
        reached.wait()
        while running.is_alive() and llama._engine.counters["misses"] < 2 * sum(llama.plan.capacities):
            running.join(0.01)
        running.join(0.1)
        assert running.is_alive()
        {end}
        """,
        tiny("olmoe"),
        mechanism,
    )


@pytest.mark.parametrize("mechanism", ["arena+uring:8+lru+gate:2", "arena+threads:2+lru+gate:2"])
def test_models_that_nobody_closes(mechanism: str, tiny: Any) -> None:
    """At the end of the interpreter, in a cycle, by the last reference in another thread, after an exception."""
    run(
        """
        llama = load(sys.argv[2])
        llama.eval([1, 2, 3])
        llama.itself = llama
        del llama
        gc.collect()
        holder = [load(sys.argv[2])]
        holder[0].eval([1, 2, 3])
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
        left = load(sys.argv[2], _expert_bytes=4 << 20)
        running = left.generate([1, 5, 9], temp=0.0)
        next(running)
        """,
        tiny("olmoe"),
        mechanism,
    )
    run("llama = load(sys.argv[2]); llama.eval([1]); raise ValueError", tiny("olmoe"), mechanism, code=1)


class Odd(Exception):
    """What a caller's own function raises."""


@pytest.mark.parametrize("stream", [False, True])
def test_closing_waits_for_what_reads_the_model(stream: bool, tiny: Any) -> None:
    """Another thread closes the model while this one makes text of a token: it may, before anything is freed."""
    program = """
        llama = load()
        real = llama.tokenizer_.detokenize
        closer = threading.Thread(target=llama.close)
        def detokenize(*arguments, **named):
            if not closer.is_alive():
                closer.start()
                with llama._lifetime._changed:
                    assert llama._lifetime._changed.wait_for(lambda: llama._lifetime.ended, 60)
            text = real(*arguments, **named)
            print(type(text).__name__)
            return text
        llama.tokenizer_.detokenize = detokenize
        try:
            answer = llama.create_completion("abc", max_tokens=200, stream=STREAM)
            for part in answer if STREAM else ():
                pass
        except (moestream.UsageError, moestream.Cancelled) as error:
            print(error)
        closer.join()
    """.replace("STREAM", str(stream))
    said = run(program, tiny("olmoe")).split("\n")
    assert said[0] == "bytes" and said[-2] in ("stopped", "this model is closed: load it again"), said


def raise_odd(*_: object) -> Any:
    raise Odd


@pytest.mark.parametrize("callback", ["logits_processor", "stopping_criteria", "stream", "on_step"])
def test_exceptions_of_the_callers_own(callback: str, tiny: Any, stock: Any) -> None:
    """Reach the caller as they were raised, and the model goes on."""
    calls = {
        "logits_processor": {"logits_processor": callbacks(raise_odd)},
        "stopping_criteria": {"stopping_criteria": callbacks(raise_odd)},
        "stream": {"stream": True},
        "on_step": {},
    }
    with load(tiny("olmoe"), "arena+uring:8+lru+gate:1") as llama:
        assert llama._recorder is not None
        if callback == "on_step":
            llama._recorder.on_step = raise_odd
        with pytest.raises(Odd) as raised:
            result = llama.create_completion("abc", max_tokens=9, temperature=0, **calls[callback])
            for _ in result:
                raise_odd()
        assert raised.value.__cause__ is None
        llama._recorder.on_step = None
        same_answer(llama, stock, 40)


def callbacks(function: Any) -> Any:
    """The binding's two kinds of list of callbacks are both lists that call each."""
    from llama_cpp import LogitsProcessorList

    return LogitsProcessorList([function])


def test_a_governor_s_listener_that_raises(tiny: Any, stock: Any) -> None:
    """Its exception comes out of the next call, and the model goes on."""
    path = tiny("olmoe")
    with moestream.Llama(path, ram="2GiB", mechanism="arena", n_ctx=CONTEXT, n_batch=64, n_threads=2,
                         n_threads_batch=2) as llama:  # fmt: skip
        assert llama.governor is not None
        told = threading.Event()

        def listen(change: object) -> None:
            told.set()
            raise Odd

        llama.governor.on_change = listen
        llama.governor.decide = lambda *_: llama.plan.expert_bytes // 2
        assert told.wait(30)
        with pytest.raises(Odd):
            llama.eval([1, 2, 3])
        llama.governor.on_change = None
        same_answer(llama, stock, 40)
