"""A model in shards, opened at any of them, gives stock's logits while its experts come and go."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from conftest import evicted, load, same_answer
from ggufs import write_split

SHARDS = 3


@pytest.fixture(scope="module")
def shards(tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("split") / "olmoe.gguf"
    return write_split(tiny("olmoe"), out, SHARDS)


def test_the_experts_are_in_all_shards(shards: list[Path]) -> None:
    keys = [{k: v.contents() for k, v in gguf.GGUFReader(path).fields.items()} for path in shards]
    assert [k["split.no"] for k in keys] == [0, 1, 2]
    assert {k["split.count"] for k in keys} == {SHARDS}
    assert len({k["split.tensors.count"] for k in keys}) == 1
    for path in shards:
        assert any("_exps" in tensor.name for tensor in gguf.GGUFReader(path).tensors)


@pytest.mark.parametrize("experts_mb", [0, 6])
@pytest.mark.parametrize(
    "mechanism",
    ["arena", "arena+uring:8+lru+gate:2", "arena/buffered+threads:2+lfu-decay:16+none", "mapped+willneed"],
)
def test_split_gives_the_same_logits(mechanism: str, experts_mb: int, shards: list[Path], stock) -> None:
    with load(shards[1], mechanism, experts=experts_mb << 20) as llama:
        assert llama.model_info.paths == tuple(shards)
        for length in (7, 40):
            same_answer(llama, stock, length)
        assert not mechanism.startswith("arena") or evicted(llama)
