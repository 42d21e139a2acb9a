"""The lab's mechanisms on other shapes of routing and of files: one expert a token, all of them, a model in shards, and
an answer long enough that every expert has come and gone many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import load, same_answer
from ggufs import write_split
from moestream.geometry import slab_geometry

#: One of each way that bytes reach a matmul which the identity tests of shapes do not run already.
MECHANISMS = (
    "cow+sync+lru",
    "shared/align16k+threads:2+lfu-adapt",
    "mapped/random+hybrid:mincore",
    "mapped+tiered",
    "mapped/huge+pread:2x4",
    "mapped+memcpy",
    "mapped+willneed+background:2+none+previous",
    "mapped+pread+dontneed:8",
    "arena/fresh+uring:8+sieve+random",
    "arena/thp/align2m+threads:3+s3fifo",
    "arena/populate+sync+lfu-adapt+previous",
)
#: What a token routes: one expert of 16, or every one of 8.
ROUTED = {"one expert": "tiny,experts=16,used=1", "all experts": "tiny,experts=8,used=8"}
LONG = 300


@pytest.mark.parametrize("routed", ROUTED)
@pytest.mark.parametrize("text", MECHANISMS)
def test_as_many_experts_as_there_are(text: str, routed: str, tiny, stock) -> None:
    with load(tiny("qwen3moe", ROUTED[routed]), text, i_know=True) as llama:
        for length in (1, 70):
            same_answer(llama, stock, length)


@pytest.fixture(scope="module")
def shards(tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_split(tiny("olmoe"), tmp_path_factory.mktemp("split") / "olmoe.gguf", 3)


@pytest.mark.parametrize("text", MECHANISMS)
def test_in_shards(text: str, shards: list[Path], stock) -> None:
    with load(shards[2], text, i_know=True) as llama:
        assert len(llama.model_info.shards) == 3
        same_answer(llama, stock, 70)


@pytest.mark.parametrize("text", ["arena", "mapped+pread+dontneed:8"])
def test_a_long_answer(text: str, tiny, stock) -> None:
    with load(tiny("olmoe"), text, n_ctx=LONG + 64) as llama:
        same_answer(llama, stock, 5, steps=LONG)
        if text.startswith("arena"):
            experts = sum(part.experts for part in slab_geometry(llama.model_info).parts)
            assert llama._engine.counters["misses"] > 10 * experts
