"""Shards that are missing, mixed up or joined: each its own one-line ModelError; and the links that lead to them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ggufs import (
    cut,
    dense_tensors,
    expert_tensors,
    moe_tensors,
    patch,
    refused,
    rename_bytes,
    split_gguf,
)
from moestream.model import read_model


def test_missing_shards(tmp_path: Path) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    assert len(shards) == 4
    shards[1].unlink()
    refused(shards[3], r"1 of 4 shards missing beside it: m-00002-of-00004\.gguf$")
    shards[0].unlink()
    refused(shards[2], r"2 of 4 shards missing .*: m-00001-of-00004\.gguf, m-00002-of-00004\.gguf$")


def test_swapped_shards(tmp_path: Path) -> None:
    first, second, third, *_ = split_gguf(tmp_path / "m.gguf", 3)
    second.rename(tmp_path / "x")
    third.rename(second)
    (tmp_path / "x").rename(third)
    for shard in (first, second, third):
        refused(shard, r"mixed-up shards: its name says [23] of 4, its header shard [23] of 4")


def test_shards_of_two_models(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours = split_gguf(tmp_path / "a" / "m.gguf", 3)
    fewer = dense_tensors(2) + expert_tensors(0)
    theirs = split_gguf(tmp_path / "b" / "m.gguf", 3, tensors=fewer)
    (tmp_path / "a" / "m-00002-of-00004.gguf").write_bytes(theirs[1].read_bytes())
    refused(ours[0], "mixed-up shards: its name says 2 of 4, its header shard 2 of 3")
    same_count = [*fewer, *expert_tensors(5)][:11]
    (tmp_path / "c").mkdir()
    theirs = split_gguf(tmp_path / "c" / "m.gguf", 3, tensors=same_count)
    (tmp_path / "a" / "m-00002-of-00004.gguf").write_bytes(theirs[1].read_bytes())
    refused(ours[0], r"mixed-up shards: split\.tensors\.count is 11 here and 12 in m-00001")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    (tmp_path / "b").mkdir()
    theirs = split_gguf(tmp_path / "b" / "m.gguf", 3, tensors=moe_tensors()[::-1])
    shards[3].write_bytes(theirs[3].read_bytes())
    refused(shards[0], r"mixed-up shards: tensor \S+ is also in m-00001-of-00004\.gguf")


def test_wrong_tensor_total(tmp_path: Path) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    for shard in shards:
        patch(shard, _set_integer("split.tensors.count", 12, 13))
    refused(shards[0], "split.tensors.count says 13 tensors, the 4 shards hold 12")


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("shard", [0, 2])
def test_a_shard_that_says_it_is_alone(tmp_path: Path, shard: int, count: int) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    patch(shards[shard], _set_integer("split.count", 4, count))
    refused(
        shards[shard], rf"its name says 4 shards and split\.tensors\.count 12 .* its split\.count is {count}"
    )
    refused(
        shards[1],
        rf"mixed-up shards: its name says {shard + 1} of 4, its header shard {shard + 1} of {count}",
    )


@pytest.mark.parametrize(
    ("key", "shard", "pattern"),
    [
        (
            "split.count",
            0,
            r"its name says 4 shards and split\.tensors\.count 12 .* its split\.count is missing",
        ),
        ("split.no", 0, r"split\.no None and split\.count 4 make no sense"),
        ("split.no", 1, r"split\.no None and split\.count 4 make no sense"),
        (
            "split.tensors.count",
            0,
            r"split\.tensors\.count is missing, llama\.cpp reads i32; split the model again",
        ),
    ],
)
def test_missing_split_keys(tmp_path: Path, key: str, shard: int, pattern: str) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    patch(shards[shard], rename_bytes(key.encode(), key.encode()[:-1] + b"X"))
    refused(shards[shard], pattern)


@pytest.mark.parametrize(
    ("key", "shard", "value"),
    [
        ("split.count", 0, struct.pack("<II", 4, 4)),
        ("split.count", 0, struct.pack("<If", 6, 4)),
        ("split.no", 0, struct.pack("<II", 4, 0)),
        ("split.no", 2, struct.pack("<II", 4, 2)),
        ("split.tensors.count", 0, struct.pack("<II", 4, 12)),
    ],
)
def test_split_keys_of_another_type(tmp_path: Path, key: str, shard: int, value: bytes) -> None:
    """llama.cpp ends the process over the number of a later shard."""
    shards = split_gguf(tmp_path / "m.gguf", 3)
    was = {"split.no": (2, "<H", shard), "split.count": (2, "<H", 4), "split.tensors.count": (5, "<i", 12)}[
        key
    ]
    old = struct.pack("<I", was[0]) + struct.pack(was[1], was[2])
    name = key.encode()
    patch(shards[shard], rename_bytes(name + old, name + value, same_length=False))
    kind = {4: "u32", 6: "f32"}[value[0]]
    refused(shards[shard], rf"{key} is of type {kind}, llama\.cpp reads [ui]\d+; split the model again")


def test_a_link_to_a_shard_leads_to_its_siblings(tmp_path: Path) -> None:
    """Whatever its name and place, and through a link to the link."""
    shards = split_gguf(tmp_path / "m.gguf", 3)
    (tmp_path / "elsewhere").mkdir()
    links = [
        tmp_path / "model.gguf",
        tmp_path / "elsewhere" / "latest",
        tmp_path / "elsewhere" / shards[1].name,
    ]
    links[0].symlink_to(shards[2].name)
    links[1].symlink_to("../model.gguf")
    links[2].symlink_to(shards[1])
    for link in links:
        assert read_model(link).paths == tuple(shards)
    shards[3].unlink()
    refused(links[2], rf"elsewhere/{shards[1].name}: 3 of 4 shards missing beside it")


def test_a_blob_of_a_cache_is_no_shard(tmp_path: Path) -> None:
    """It leads to no sibling: the links to it do."""
    shards = split_gguf(tmp_path / "m.gguf", 3)
    blob = shards[1].rename(tmp_path / "6c1e0f")
    shards[1].symlink_to(blob.name)
    assert read_model(shards[1]).paths == tuple(shards)
    refused(blob, "is shard 2 of 4; rename it and its siblings")


def test_a_link_to_a_shard_that_is_gone(tmp_path: Path) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    shards[2].unlink()
    shards[2].symlink_to("6c1e0f")
    refused(shards[0], f"1 of 4 shards missing beside it: {shards[2].name}$")


def _set_integer(key: str, old: int, new: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        at = data.index(key.encode()) + len(key)
        (kind,) = struct.unpack_from("<I", data, at)
        code = {2: "<H", 3: "<h", 4: "<I", 5: "<i"}[kind]
        assert struct.unpack_from(code, data, at + 4) == (old,)
        struct.pack_into(code, data, at + 4, new)

    return change


def test_shard_numbers_out_of_range(tmp_path: Path) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    refused(patch(shards[0], _set_integer("split.no", 0, 4)), r"split\.no 4 and split\.count 4 make no sense")


def test_renamed_shards(tmp_path: Path) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    other = shards[1].rename(tmp_path / "model.gguf")
    refused(other, r"is shard 2 of 4; rename it and its siblings to NAME-00002-of-00004\.gguf")
    other = shards[0].rename(tmp_path / "m-00001-of-00009.gguf")
    refused(other, r"its name says 9 shards, its split\.count 4")


def test_truncated_shard(tmp_path: Path) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3)
    cut(shards[2], -100)
    text = refused(shards[0], "short by 100 bytes")
    assert shards[2].name in text


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_shards_joined_with_cat(tmp_path: Path, small_first_shard: bool) -> None:
    shards = split_gguf(tmp_path / "m.gguf", 3, small_first_shard=small_first_shard)
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(shard.read_bytes() for shard in shards))
    refused(joined, rf"second GGUF at byte {shards[0].stat().st_size}: shards joined with cat")
