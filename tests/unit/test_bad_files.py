"""What bad files get: each its own one-line ModelError, exit code 3, quickly and without changing a byte."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFEndian
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufs import (
    cut,
    dense_tensors,
    expert_tensors,
    moe_tensors,
    patch,
    rename_bytes,
    set_tensor_type,
    split_gguf,
    tensor_table_offset,
    write_gguf,
)
from moestream.errors import ModelError
from moestream.model import read_model


def refused(path: Path, pattern: str) -> str:
    """Asserts that reading ``path`` is refused in one line that names it and matches; returns the line."""
    with pytest.raises(ModelError) as caught:
        read_model(path)
    text = str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in text
    assert str(path.parent) in text
    assert re.search(pattern, text), text
    return text


def test_missing_directory_and_device(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", r"none\.gguf: no such file")
    refused(tmp_path, "is a directory; name a .gguf file")
    write_gguf(tmp_path / "m.gguf")
    refused(tmp_path, r"is a directory; name the file, such as .*m\.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "is not a regular file")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    refused(tmp_path / "loop.gguf", "cannot be read")


def test_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")

    # The tests may run as root, whom no mode stops.
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    refused(path, "permission denied")


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
        (b"\xef\xbb\xbf \n<html lang=en>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (struct.pack("<Q", 100) + b'{"__metadata__":{}}' + bytes(100), "safetensors"),
        (b"ggjt" + bytes(100), r"not a GGUF file \(it starts with b'ggjt'"),
        (bytes(4096), "not a GGUF file"),
        (b"GG", "truncated in the header"),
        (b"GGUF", "truncated in the header"),
        (b"GGUF" + struct.pack("<I", 3), "truncated in the header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 1, 1), "GGUF version 4"),
        (b"GGUF" + struct.pack("<IQQ", 0, 1, 1), "GGUF version 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1), "implausible number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 40), "implausible number of metadata keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1 << 62), "implausible length .* metadata key"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 1, 1, 1, b"k", 8, 1 << 62), "implausible .* value of 'k'"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 1, 1, 1, b"k", 9, 8, 1 << 62), "implausible .* array 'k'"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 1, 1, b"k", 77), "implausible type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 1, 1, 1, b"k", 9, 9, 1), "implausible type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQQ", 3, 1, 1, 1, b"k", 9, 8, 1000, 3), "truncated in the header"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 200), "implausible number of dimensions 200"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "0 tensors"),
    ],
)  # fmt: skip
def test_other_content(tmp_path: Path, content: bytes, pattern: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, pattern)


def test_big_endian_file(tmp_path: Path) -> None:
    refused(write_gguf(tmp_path / "m.gguf", endianess=GGUFEndian.BIG), "is a big-endian GGUF")


def test_truncated_in_each_part(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    table = tensor_table_offset(path)
    refused(cut(path, -1), "in the tensor data, short by 1 bytes")
    refused(cut(path, -1000), "in the tensor data, short by 1001 bytes")
    refused(cut(path, table + 300), r"in the tensor table \(tensor \d+ of 12\)")
    refused(cut(path, table), r"in the tensor table \(tensor 1 of 12\)")
    refused(cut(path, table - 1), r"in the header \(metadata key (\d+) of \1\)")
    refused(cut(path, 100), r"in the header \(metadata key \d+ of")
    refused(cut(path, 23), "in the header")


def test_truncation_at_every_byte_of_the_header(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", dense_tensors(1), n_tokens=3)
    whole = path.read_bytes()
    for size in range(tensor_table_offset(path) + 200):
        path.write_bytes(whole[:size])
        refused(path, "truncated in|is empty")


def test_no_tensors(tmp_path: Path) -> None:
    refused(write_gguf(tmp_path / "m.gguf", []), "has 0 tensors")


def test_no_architecture(tmp_path: Path) -> None:
    path = patch(
        write_gguf(tmp_path / "m.gguf"), rename_bytes(b"general.architecture", b"general.archite_ture")
    )
    refused(path, r"has no general\.architecture")


@pytest.mark.parametrize("type_id", [200, -1, 4, 1 << 20])
def test_unknown_type(tmp_path: Path, type_id: int) -> None:
    name = "blk.1.ffn_up_exps.weight"
    path = patch(write_gguf(tmp_path / "m.gguf"), set_tensor_type(name, type_id))
    refused(path, rf"tensor {name} has ggml type {type_id}, which llama-cpp-python \d.* newer")


def test_what_only_ggml_sees(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    refused(
        patch(path, rename_bytes(b"blk.1.ffn_up_exps", b"blk.0.ffn_up_exps")),
        "refuses its header: duplicate tensor name 'blk.0.ffn_up_exps.weight'",
    )


def test_one_tensor_an_expert(tmp_path: Path) -> None:
    old = [
        (f"blk.0.ffn_{role}.{expert}.weight", (64, 64), Q.Q8_0)
        for role in ("gate", "up", "down")
        for expert in range(8)
    ]
    path = write_gguf(tmp_path / "m.gguf", dense_tensors(1) + old, arch="llama")
    refused(path, r"one tensor for each expert \(blk\.0\.ffn_gate\.0\.weight\).*Mixtral.*April 2024")


def _without(role: str) -> list[Any]:
    return [tensor for tensor in moe_tensors() if f"blk.1.ffn_{role}_exps" not in tensor[0]]


@pytest.mark.parametrize(
    ("tensors", "keys", "pattern"),
    [
        (moe_tensors(roles=("gate_up", "gate", "up", "down")), {}, "both fused and separate"),
        (moe_tensors(roles=("gate_up", "up", "down")), {}, "both fused and separate"),
        (
            [*moe_tensors(), ("blk.0.ffn_up_gate_exps.weight", (64, 192, 8), Q.Q8_0)],
            {},
            "order of ik_llama.cpp",
        ),
        (_without("down"), {}, "layer 1 has .* but no down experts"),
        (_without("up"), {}, "layer 1 has .* but no up experts"),
        (
            dense_tensors(1) + expert_tensors(0, ("gate", "up")) + expert_tensors(0, ("down",), n_experts=4),
            {},
            r"disagree on the number of experts: .*ffn_gate_exps\.weight 8.*ffn_down_exps\.weight 4",
        ),
        (moe_tensors(n_experts=4), {}, r"has 4 experts but olmoe\.expert_count says 8"),
        (
            [*_without("down"), ("blk.1.ffn_down_exps.weight", (96, 64), Q.Q8_0)],
            {},
            r"ffn_down_exps\.weight has shape \(96, 64\), not",
        ),
        (moe_tensors(), {"%s.expert_used_count": None}, r"the key olmoe\.expert_used_count is missing"),
        (moe_tensors(), {"%s.expert_used_count": 0}, "says 0"),
        (moe_tensors(), {"%s.expert_used_count": 9}, "says 9"),
        (moe_tensors(), {"%s.expert_used_count": "two"}, "says 'two'"),
        (moe_tensors(), {"%s.expert_used_count": [2]}, "covers only 1 layers"),
    ],
)
def test_experts_that_cannot_work(
    tmp_path: Path, tensors: list[Any], keys: dict[str, Any], pattern: str
) -> None:
    refused(write_gguf(tmp_path / "m.gguf", tensors, keys=keys), pattern)


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


@pytest.mark.parametrize("suffix", [".part1of2", ".part2of2", "-split-a", ".part-b", ".part1"])
def test_pieces_of_a_cut_file(tmp_path: Path, suffix: str) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    piece = tmp_path / f"model.gguf{suffix}"
    piece.write_bytes(whole[: len(whole) // 2] if "1" in suffix else whole[len(whole) // 2 :])
    refused(piece, r"one piece of a file that was cut up; .*cat model\.gguf\* > ")


def test_numbered_name_without_split_keys_is_one_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf").rename(tmp_path / "m-00001-of-00001.gguf")
    assert len(read_model(path).shards) == 1


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes change: a model or a one-line error, never a crash, a hang or a flood of memory."""
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_gguf(path, n_tokens=3)
        (tmp_path / "whole").write_bytes(path.read_bytes())
    damaged = bytearray((tmp_path / "whole").read_bytes())
    header = read_model_header_bytes(damaged)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(4, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        model = read_model(path)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert 0 <= model.expert_bytes <= model.bytes


def read_model_header_bytes(data: bytearray) -> int:
    """Bytes up to the end of the tensor table, of a file write_gguf made with its usual tensors."""
    return data.index(b"blk.1.ffn_down_exps.weight") + 26 + 4 + 3 * 8 + 4 + 8


def test_nothing_is_allocated_for_a_huge_count(tmp_path: Path) -> None:
    """An array of 2^26 strings in a sparse file that has room for them would cost ggml 2 GB."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 1, 1, 1, b"k", 9, 8, (1 << 26) + 1))
    with path.open("r+b") as file:
        file.truncate(1 << 31)
    code = (
        "import sys; from moestream.box import peak_rss_bytes; from moestream.model import read_model\n"
        "try: read_model(sys.argv[1])\n"
        "except Exception as error: print(error)\n"
        "print(peak_rss_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    text, peak_bytes = done.stdout.splitlines()
    assert "implausible" in text
    assert int(peak_bytes) < 100_000_000
