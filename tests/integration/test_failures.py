"""What goes wrong while a model runs: the error names it, the process lives, and the next run is right."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import moestream
from answers import CONTEXT, answer, prompt_tokens
from conftest import load, same_answer
from ggufs import rewrite, write_split
from moestream import engine
from moestream.errors import ModelError

ARENAS = (
    "arena+uring:24+lru",
    "arena+uring:1+lru+gate:1",
    "arena+threads:2+lru",
    "arena+sync+none",
    "arena/buffered",
)


@pytest.fixture
def copy(tiny, tmp_path: Path) -> Path:
    """A model of this test's own, to break."""
    return Path(shutil.copy(tiny("olmoe"), tmp_path / "model.gguf"))


def long_prompt(llama: moestream.Llama) -> list[int]:
    return prompt_tokens(200, llama.n_vocab(), seed=3)


@contextmanager
def descriptors_lead_to(path: Path, other: str) -> Iterator[None]:
    """While inside, every descriptor of a file in this process is one of ``other``: a device that went away."""
    numbers = [
        int(entry.name)
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and entry.readlink() == path
    ]
    assert numbers
    kept = {number: os.dup(number) for number in numbers}
    bad = os.open(other, os.O_RDONLY)
    for number in numbers:
        os.dup2(bad, number, inheritable=False)
    try:
        yield
    finally:
        for number, saved in kept.items():
            os.dup2(saved, number, inheritable=False)
            os.close(saved)
        os.close(bad)


@pytest.mark.parametrize("mechanism", [*ARENAS, "mapped+pread+anon", "mapped+pread+willneed+anon"])
def test_truncated_after_load(mechanism: str, copy: Path, stock) -> None:
    whole = copy.read_bytes()
    with load(copy, mechanism) as llama:
        running = llama.generate(long_prompt(llama), temp=0.0)
        next(running)
        os.truncate(copy, len(whole) // 3)
        with pytest.raises(moestream.ReadError) as raised:
            for _ in range(50):
                next(running)
        text = str(raised.value)
        assert str(copy) in text
        assert "the file ends early" in text
        assert "at byte " in text
        assert "_exps.weight" in text
        assert "\n" not in text
        with pytest.raises(moestream.ReadError, match="was written to while it was in use"):
            llama.eval([1])
    copy.write_bytes(whole)
    with load(copy, mechanism) as llama:
        same_answer(llama, stock, 7)


@pytest.mark.parametrize("mechanism", ["arena", "arena+threads:2", "mapped+pread"])
def test_of_a_split_model_the_shard_is_named(mechanism: str, tiny, tmp_path: Path) -> None:
    shards = write_split(tiny("olmoe"), tmp_path / "m.gguf", 3)
    with load(shards[0], mechanism) as llama:
        last = llama.model_info.banks[-1].tensors[-1]
        assert last.shard == 2
        running = llama.generate(long_prompt(llama), temp=0.0)
        next(running)
        os.truncate(shards[2], last.offset)
        with pytest.raises(moestream.ReadError) as raised:
            for _ in range(50):
                next(running)
    said = rf"{shards[2]} at byte \d+ \({last.name}, expert \d+\): the file ends early"
    assert re.fullmatch(said, str(raised.value)), raised.value


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_generated_comes_with_the_error(stream: bool, copy: Path) -> None:
    with load(copy, "arena+uring:24+lru") as llama:
        asked = {"max_tokens": 60, "temperature": 0, "stream": stream}
        expected = llama.create_completion("abc", max_tokens=60, temperature=0)["choices"][0]["text"]
        llama.reset()
        decode, steps, parts = llama._ctx.decode, 0, []

        def step(batch: object) -> None:
            nonlocal steps
            steps += 1
            if steps == 20:
                os.truncate(copy, 1 << 16)
            decode(batch)

        llama._ctx.decode = step
        with pytest.raises(moestream.ReadError) as raised:
            for part in llama.create_completion("abc", **asked):
                parts.append(part["choices"][0]["text"])
    error = raised.value
    assert len(error.tokens) >= 10
    assert error.text and expected.startswith(error.text)
    # The binding keeps back what is not yet a character; random weights write many that never are.
    assert error.text.startswith("".join(parts)) and bool(parts) == stream


@pytest.mark.parametrize("mechanism", ARENAS)
def test_the_device_fails(mechanism: str, copy: Path, stock, tmp_path: Path) -> None:
    with load(copy, mechanism) as llama:
        with descriptors_lead_to(copy, str(tmp_path)), pytest.raises(moestream.ReadError) as raised:
            answer(llama, long_prompt(llama), 1)
        assert f"{copy} at byte " in str(raised.value)
        assert "Is a directory" in str(raised.value)
        for length in (7, 40):
            same_answer(llama, stock, length)


@pytest.mark.parametrize("mechanism", ["arena+uring:24+lru", "mapped+willneed", "resident"])
def test_written_to_while_in_use_is_named_by_the_next_call(mechanism: str, copy: Path) -> None:
    """In place and as long as before: only the time tells."""
    with load(copy, mechanism) as llama:
        llama.eval([1, 2])
        with copy.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        with pytest.raises(moestream.ReadError, match=f"{copy} was written to while it was in use"):
            llama.eval([3])


@pytest.mark.parametrize("mechanism", ["arena+uring:24+lru", "mapped+willneed"])
def test_written_to_within_a_call_ends_it(mechanism: str, copy: Path) -> None:
    """At the end of that very step: no token of what is there now."""
    with load(copy, mechanism) as llama:
        running = llama.generate([1, 5, 9], temp=0.0)
        before = [next(running) for _ in range(3)]
        with copy.open("r+b") as file:
            file.seek(copy.stat().st_size // 3)
            file.write(bytes(1 << 20))
        with pytest.raises(moestream.ReadError, match=f"{copy} was written to while it was in use") as raised:
            next(running)
    assert raised.value.tokens == before


@pytest.mark.parametrize("mechanism", ["arena+uring:24+lru", "mapped+willneed"])
@pytest.mark.parametrize("what", ["was removed", "is another file now"])
def test_replaced_after_load_is_said_and_changes_nothing(
    what: str, mechanism: str, copy: Path, tiny, stock
) -> None:
    with load(copy, mechanism) as llama:
        before = list(llama.fallbacks)
        copy.unlink()
        if what == "is another file now":
            copy.write_bytes(b"not the model")
        tokens = prompt_tokens(40, llama.n_vocab())
        n_ubatch = min(llama.n_batch, llama.context_params.n_ubatch)
        expected = stock(tiny("olmoe"), tokens, 3, llama.n_threads, llama.n_batch, n_ubatch)
        assert answer(llama, tokens, 3) == expected
        assert llama.fallbacks == [
            *before,
            f"{copy} {what}: the model goes on with the one it was loaded from",
        ]
    with pytest.raises(moestream.ModelError):
        moestream.Llama(copy)


@pytest.mark.parametrize(
    ("step", "mechanism"),
    [
        ("Unchanged", "arena"),
        ("over_the_store", "arena"),
        ("over_the_store", "mapped+willneed"),
        ("over_the_store", "shared"),
    ],
)
def test_replaced_within_the_load_mixes_no_two_models(
    step: str, mechanism: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download renames another file of the same size over it, of which llama.cpp reads the header; ``step``: of the
    load, before which it comes."""
    other = rewrite(copy, copy.with_suffix(".other"), change={"olmoe.rope.freq_base": 77.0})
    assert other.stat().st_size == copy.stat().st_size
    real = getattr(engine, step)

    def replaced_before(*arguments: Any) -> Any:
        other.replace(copy)
        return real(*arguments)

    monkeypatch.setattr(engine, step, replaced_before)
    with pytest.raises(ModelError, match="was replaced or written to while it was loaded: load it again"):
        load(copy, mechanism)
    monkeypatch.undo()
    load(copy, mechanism).close()


def test_changed_between_header_and_load(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = moestream.Llama._load_parent

    def truncate_then_load(llama: moestream.Llama, *arguments: object) -> None:
        os.truncate(copy, copy.stat().st_size - 4096)
        real(llama, *arguments)

    monkeypatch.setattr(moestream.Llama, "_load_parent", truncate_then_load)
    with pytest.raises(moestream.RefusedError, match="has changed since its header was read"):
        moestream.Llama(copy, mechanism="arena", n_ctx=CONTEXT)


def test_too_many_files_open(tiny) -> None:
    program = (
        "import resource, sys, moestream\n"
        "from moestream import Llama\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))\n"
        "files = []\n"
        "try:\n"
        "    while True: files.append(open('/dev/null'))\n"
        "except OSError: pass\n"
        "try: Llama(sys.argv[1], ram='1GiB', mechanism='arena')\n"
        "except moestream.MoestreamError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny("olmoe"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Too many open files" in done.stdout
