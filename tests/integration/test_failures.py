"""What goes wrong while a model runs: the error names it, the process lives, and the next run is right."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import moestream
from answers import CONTEXT, answer, prompt_tokens
from children import child_command, child_result, refusing, run_child
from conftest import load, same_answer, smallest_cap
from ggufs import write_split

ARENAS = (
    "arena+uring:24+lru",
    "arena+uring:1+lru+gate:1",
    "arena+threads:2+lru",
    "arena+sync+none",
    "arena/buffered",
)
#: io_uring_setup has one number everywhere; madvise and fadvise64 have not.
NO_IO_URING = refusing([425], errno.EPERM)
_ADVICE = {"x86_64": [28, 221], "aarch64": [233, 223]}.get(platform.machine(), [])
NO_ADVICE = refusing(_ADVICE, errno.EINVAL)


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


def test_changed_between_header_and_load(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = moestream.Llama._load_parent

    def truncate_then_load(llama: moestream.Llama, *arguments: object) -> None:
        os.truncate(copy, copy.stat().st_size - 4096)
        real(llama, *arguments)

    monkeypatch.setattr(moestream.Llama, "_load_parent", truncate_then_load)
    with pytest.raises(moestream.RefusedError, match="has changed since its header was read"):
        moestream.Llama(copy, mechanism="arena", n_ctx=CONTEXT)


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
            llama.eval(long_prompt(llama))
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


def unprivileged_mlock() -> tuple[str, ...]:
    return ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "--")


def test_mlock_limited(tiny) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root without setpriv: the limit does not bind")
    path = tiny("olmoe")
    first = f"import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, ({1 << 16}, {1 << 16}))"
    for mechanism in ("arena+uring:24+lru+mlock", "mapped+willneed+mlock", "resident+mlock"):
        prefix = unprivileged_mlock() if os.geteuid() == 0 else ()
        result = run_child(path, "1GiB", mechanism, prefix, first=first)
        assert any("mlock" in line and "ulimit -l" in line for line in result["fallbacks"]), result
        assert result["digests"] == run_child(path, "1GiB", mechanism)["digests"]
        refused = run_child(path, "1GiB", mechanism, prefix, first=first, strict=True)
        assert refused["error"] == "EngagementError"
        assert "mlock" in refused["text"]


@pytest.mark.parametrize("mechanism", ["arena+uring:24+lru", "resident"])
def test_io_uring_refused(mechanism: str, tiny) -> None:
    path = tiny("olmoe")
    result = run_child(path, "1GiB", mechanism, first=NO_IO_URING)
    assert any("io_uring is refused" in line and "threads:4" in line for line in result["fallbacks"]), result
    assert "threads:4" in result["mechanism"]
    assert result["digests"] == run_child(path, "1GiB", mechanism)["digests"]
    refused = run_child(path, "1GiB", mechanism, first=NO_IO_URING, strict=True)
    assert refused["error"] == "EngagementError"
    assert "io_uring is refused" in refused["text"]


@pytest.mark.skipif(not _ADVICE, reason="the numbers of madvise and fadvise64 are not known here")
@pytest.mark.parametrize(
    "mechanism",
    [
        "arena/buffered",
        "mapped+willneed+mlock",
        "mapped+fault+mlock",
        "mapped/random+fault",
        "mapped/random+tiered",
        "mapped+pread+dontneed:0",
    ],
)
def test_advice_that_is_promised_and_refused_refuses_the_load(mechanism: str, tiny) -> None:
    result = run_child(tiny("olmoe"), "1GiB", mechanism, first=NO_ADVICE)
    assert result["error"] in ("RefusedError", "EngagementError")
    assert "Invalid argument" in result["text"]
    assert "\n" not in result["text"]


@pytest.mark.skipif(not _ADVICE, reason="the numbers of madvise and fadvise64 are not known here")
@pytest.mark.parametrize(
    "mechanism",
    [
        "mapped+willneed",
        "mapped+fadvise",
        "mapped+pread+willneed",
        "mapped+willneed+background:1",
    ],
)
def test_advice_that_fails_while_it_runs_ends_the_labs_run(mechanism: str, tiny, tmp_path: Path) -> None:
    document = tmp_path / "document.json"
    module = "import runpy; runpy.run_module('moestream.lab.worker', run_name='__main__', alter_sys=True)"
    words = ["-p", "ab", "-n", "6", "--ctx", "128", "--ram", "1GiB", "--mechanism", mechanism]
    done = subprocess.run(
        [sys.executable, "-c", NO_ADVICE + module, str(tiny("olmoe")), *words, "--json", str(document)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "Invalid argument" in done.stderr.splitlines()[-1]
    assert not document.exists()


@pytest.mark.skipif(not _ADVICE, reason="the numbers of madvise and fadvise64 are not known here")
def test_a_mechanism_that_promises_no_advice_needs_none(tiny) -> None:
    result = run_child(tiny("olmoe"), "1GiB", "mapped+fault", first=NO_ADVICE)
    assert result["fallbacks"] == []
    assert result["digests"] == run_child(tiny("olmoe"), "1GiB", "mapped+fault")["digests"]


@pytest.mark.skipif(not _ADVICE, reason="the numbers of madvise and fadvise64 are not known here")
@pytest.mark.parametrize("tokens", [0, 200])
def test_pages_that_cannot_be_given_back_are_an_error(tokens: int, tiny) -> None:
    """Of experts that leave, or (nothing was computed yet) of frames that no expert has had."""
    program = f"""
import moestream
from moestream.geometry import slab_geometry
llama = moestream.Llama({str(tiny("olmoe"))!r}, ram="1GiB", mechanism="arena", n_ctx={CONTEXT}, n_batch=1)
if {tokens}:
    llama.eval(list(range(1, {tokens})))
llama.governor.close()
{NO_ADVICE}
for call in (lambda: llama._engine.resize(slab_geometry(llama.model_info).smallest(1)), lambda: llama.eval([1])):
    try:
        call()
    except Exception as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dropping an expert's pages: Invalid argument") == 2, done.stdout


def test_direct_refused(tiny, tmp_path: Path) -> None:
    """ramfs has no O_DIRECT; mounted for one child alone."""
    mount = f"mount -t ramfs none {tmp_path} 2>/dev/null || exit 77; cp {tiny('olmoe')} {tmp_path}/m.gguf; "
    path = tmp_path / "m.gguf"

    def run(mechanism: str, strict: bool) -> dict[str, object]:
        command = child_command(path, "1GiB", mechanism, strict=strict)
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount + 'exec "$@"', "sh", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode in (1, 77) and not done.stdout:
            pytest.skip(f"no mount of our own can be had: {done.stderr.strip()}")
        return child_result(done)

    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    for mechanism in ("arena+uring:24+lru", "arena+threads:2+lru", "resident"):
        result = run(mechanism, strict=False)
        assert any("O_DIRECT is refused" in line for line in result["fallbacks"]), result
        assert result["digests"] == run_child(tiny("olmoe"), "1GiB", mechanism)["digests"]
        assert run(mechanism, strict=True)["error"] == "EngagementError"
    assert "error" not in run("arena/buffered", strict=True)


def test_strict_takes_what_engages(tiny) -> None:
    path = tiny("olmoe")
    cap = smallest_cap(path, "arena") + (200 << 20)
    with moestream.Llama(path, ram=cap, mechanism="arena+threads:2+lru", strict=True, n_ctx=CONTEXT) as llama:
        assert llama.fallbacks == []


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
