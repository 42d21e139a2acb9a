"""The lab's stores and the arena's page sources in a running model: no bit differs while experts come and go, each does
what it says it does, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moestream
from answers import answer, prompt_tokens
from conftest import evicted, load, same_answer
from moestream import assembly, engine
from moestream.box import Box, process_memory
from moestream.errors import MoestreamError, RefusedError
from moestream.guard import check_store
from moestream.mechanism import Mechanism

ARCHS = ("olmoe", "gpt-oss")
#: Three steps of a prompt, then tokens one by one.
PROMPT_TOKENS = 150
#: Holds a few of the small models' experts, so nearly every route evicts.
EXPERT_BYTES = 2 << 20

COPYING = (
    "cow+sync",
    "cow/buffered+threads:3x2",
    "shared+sync",
    "shared/align16k+threads:2",
    "shared+uring:4x2",
)
SOURCES = ("arena", "arena/fresh", "arena/populate", "arena/thp/align2m", "arena/fresh/align16k+threads:4x4")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are made: a directory that is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache" / "of-mine"))
    return tmp_path / "cache" / "of-mine" / "moestream"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("text", COPYING)
def test_copies_change_no_bit(text: str, arch: str, tiny, stock, cache: Path) -> None:
    path = tiny(arch)
    before = digest(path)
    with load(path, f"{text}+lru", EXPERT_BYTES, i_know=True) as llama:
        same_answer(llama, stock, PROMPT_TOKENS, steps=12)
        assert evicted(llama)
        engaged, counters = llama._engine.engagement, llama._engine.counters
        assert engaged["bytes copied"] == counters["bytes"] > engaged["bytes written at least once"] > 0
        assert engaged["pieces read"] > 0
        if text.startswith("shared"):
            assert engaged["bytes of the file's copy"] == path.stat().st_size
            assert list(cache.iterdir()) == []
    assert digest(path) == before


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("policy", ["lru", "dontneed:2"])
@pytest.mark.parametrize("text", SOURCES)
def test_page_sources_change_no_bit(text: str, policy: str, arch: str, tiny, stock) -> None:
    with load(tiny(arch), f"{text}+{policy}", EXPERT_BYTES) as llama:
        same_answer(llama, stock, PROMPT_TOKENS, steps=12)
        engaged = llama._engine.engagement
        assert policy != "lru" or evicted(llama)
        assert (engaged["bytes moved"] > 0) == (text == "arena")
        assert (engaged["bytes dropped"] > 0) == (text != "arena" or policy != "lru")
        assert (engaged["bytes populated"] > 0) == ("populate" in text)


def test_pieces_are_as_many_as_asked_for(tiny) -> None:
    counts = {}
    for reader in ("threads:2", "threads:2x4"):
        with load(tiny("olmoe"), f"arena+{reader}+lru", EXPERT_BYTES) as llama:
            before = llama._engine.engagement["pieces read"]
            answer(llama, prompt_tokens(8, llama.n_vocab()), 4)
            counts[reader] = llama._engine.engagement["pieces read"] - before
    # A slab of the small model has few pages: cut into what it has.
    assert counts["threads:2"] < counts["threads:2x4"] <= 4 * counts["threads:2"]


@pytest.mark.parametrize("text", ["cow", "shared"])
def test_without_import_slots(text: str, tiny, stock) -> None:
    with load(tiny("olmoe"), text, EXPERT_BYTES, i_know=True, _interpose=False) as llama:
        same_answer(llama, stock, PROMPT_TOKENS)
        assert llama._engine.engagement["bytes copied"] > 0


def test_what_cow_writes_stays(tiny) -> None:
    """Resident memory grows by what was written, far beyond the budget; the arena's does not."""
    grown = {}
    for text in ("cow+sync+lru", "arena+sync+lru"):
        with load(tiny("olmoe"), text, EXPERT_BYTES, i_know=True) as llama:
            before = process_memory().anon_bytes
            answer(llama, prompt_tokens(PROMPT_TOKENS, llama.n_vocab()), 12)
            grown[text] = process_memory().anon_bytes - before
            if text.startswith("cow"):
                written = llama._engine.engagement["bytes written at least once"]
                assert llama.plan is not None
                assert written > 2 * llama.plan.expert_bytes
    assert grown["cow+sync+lru"] > written * 0.9
    assert grown["cow+sync+lru"] - grown["arena+sync+lru"] > written * 0.5


@pytest.mark.parametrize("left", [EXPERT_BYTES, 2 * EXPERT_BYTES])
def test_cow_stops_at_what_the_cap_leaves_after_the_load(
    left: int, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its budget, at the bytes that were left when the process was measured: not at what the plan had hoped."""
    real = assembly.give_budget

    def give(core: Any, model: Any, plan: Any, *rest: Any) -> Any:
        used = plan.cap_bytes - plan.compute_bytes - plan.margin_bytes - left
        monkeypatch.setattr(
            assembly, "process_memory", lambda: dataclasses.replace(process_memory(), anon_bytes=used)
        )
        return real(core, model, plan, *rest)

    monkeypatch.setattr(engine, "give_budget", give)
    with load(tiny("olmoe"), "cow+sync+lru", EXPERT_BYTES, i_know=True) as llama:
        slab_bytes = max(bank.expert_bytes for bank in llama.model_info.banks)
        with pytest.raises(MoestreamError, match="keeps every page it has written") as stopped:
            answer(llama, prompt_tokens(PROMPT_TOKENS, llama.n_vocab()), 12)
        assert "\n" not in str(stopped.value)
        layer = llama.model_info.n_experts * slab_bytes
        assert left - layer < llama._engine.engagement["bytes written at least once"] <= left


def box_of(tmp_path: Path, limit: int | None) -> Box:
    """A machine of 8 GiB, and a cgroup's limit of this process."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "self" / "mountinfo").write_text("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    if limit is not None:
        (group / "memory.max").write_text(f"{limit}\n")
    return Box(tmp_path)


def test_cow_wants_a_cap_or_a_word(tmp_path: Path) -> None:
    cow, arena = Mechanism.parse("cow"), Mechanism.parse("arena")
    free = box_of(tmp_path / "free", None)
    with pytest.raises(RefusedError, match="--i-know"):
        check_store(cow, free, False)
    check_store(cow, free, True)
    check_store(arena, free, False)
    check_store(cow, box_of(tmp_path / "capped", 1 << 30), False)


def test_cow_is_refused_before_anything_is_read(
    tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("moestream.engine.Box", lambda: box_of(tmp_path / "free", None))
    with pytest.raises(RefusedError, match="without bound"):
        moestream.Llama(tiny("olmoe"), ram="1GiB", mechanism="cow")


def test_shared_without_a_place_for_its_copy(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such/place")
    with pytest.raises(RefusedError, match="XDG_CACHE_HOME"):
        load(tiny("olmoe"), "shared", EXPERT_BYTES)


def test_a_killed_process_leaves_no_copy(tiny, cache: Path) -> None:
    program = (
        "import sys, moestream\n"
        "llama = moestream.Llama(sys.argv[1], ram='2GiB', mechanism='shared', n_ctx=64, n_batch=8)\n"
        "print('(deleted)' in open('/proc/self/maps').read(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tiny("olmoe"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert list(cache.iterdir()) == []
        child.send_signal(signal.SIGKILL)
    assert list(cache.iterdir()) == []
