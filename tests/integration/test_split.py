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


def test_a_first_shard_without_tensors(tiny, tmp_path: Path, stock) -> None:
    shards = write_split(tiny("olmoe"), tmp_path / "olmoe.gguf", SHARDS, metadata_first=True)
    assert gguf.GGUFReader(shards[0]).tensors == []
    for shard, mechanism in ((0, "arena"), (2, "mapped+willneed")):
        with load(shards[shard], mechanism) as llama:
            assert llama.model_info.paths == tuple(shards)
            same_answer(llama, stock, 7)
            assert not mechanism.startswith("arena") or evicted(llama)


def as_hub_cache(shards: list[Path], home: Path) -> list[Path]:
    """Links with the shards' names, relative, to files with names of no kind."""
    (home / "blobs").mkdir()
    (home / "snapshots" / "main").mkdir(parents=True)
    links = []
    for number, shard in enumerate(shards):
        blob = home / "blobs" / f"{number}c0ffee"
        blob.hardlink_to(shard)
        links.append(home / "snapshots" / "main" / shard.name)
        links[-1].symlink_to(Path("..", "..", "blobs", blob.name))
    return links


def some_linked(shards: list[Path], home: Path) -> list[Path]:
    """The second is a link, with a whole path, to a file elsewhere; the others are files."""
    (home / "elsewhere").mkdir()
    linked = [home / shard.name for shard in shards]
    for number, (shard, path) in enumerate(zip(shards, linked, strict=True)):
        kept = home / "elsewhere" / "blob" if number == 1 else path
        kept.hardlink_to(shard)
        if number == 1:
            path.symlink_to(kept)
    return linked


def found_by_a_link(shards: list[Path], home: Path) -> list[Path]:
    """A link of another name in another directory; the siblings are where it leads."""
    link = home / "model"
    link.symlink_to(shards[1])
    return [link] * len(shards)


@pytest.mark.parametrize("mechanism", ["arena", "mapped+willneed"])
@pytest.mark.parametrize("linked", [as_hub_cache, some_linked, found_by_a_link])
def test_shards_behind_links(linked, mechanism: str, shards: list[Path], tmp_path: Path, stock) -> None:
    named = linked(shards, tmp_path)[1]
    with load(named, mechanism) as llama:
        assert all(path.samefile(shard) for path, shard in zip(llama.model_info.paths, shards, strict=True))
        same_answer(llama, stock, 7)
        assert not mechanism.startswith("arena") or evicted(llama)
