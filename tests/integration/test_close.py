"""The end of a model: closed, dropped, closed by another thread, forked; what is freed is not read again."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from conftest import load, same_answer


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


def test_who_computes_may_close_while_another_waits_for_its_turn(tiny) -> None:
    """As a signal's handler does. In a process of its own: what it must not do is hang."""
    script = f"""
import threading
import moestream
llama = moestream.Llama({str(tiny("olmoe"))!r}, mechanism="arena", n_ctx=256)
said = []
def other():
    try:
        llama("ab", max_tokens=2)
    except moestream.UsageError as error:
        said.append(str(error))
thread = threading.Thread(target=other)
def stop(tokens, logits):
    thread.start()
    while thread.ident not in llama._lifetime._depths:
        pass
    llama.close()
    return False
try:
    list(llama.generate([1, 5, 9], temp=0.0, stopping_criteria=stop))
except moestream.UsageError as error:
    said.append(str(error))
thread.join()
print(*said, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "this model is closed: load it again\n" * 2), done.stderr
