"""What bad files get: each its own one-line ModelError, exit code 3, quickly and without changing a byte."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufs import (
    cut,
    dense_tensors,
    expert_tensors,
    moe_tensors,
    patch,
    refused,
    rename_bytes,
    set_tensor_type,
    tensor_table_offset,
    write_gguf,
)
from moestream.errors import ModelError
from moestream.model import read_model


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
        (b"GGUF" + struct.pack("<IQQ", 3, (1 << 16) + 1, 1), "implausible number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 40), "implausible number of metadata keys"),
        # Zeros behind a count, as where a download broke off: not walked to their end.
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 16, 0) + bytes(4096), "implausible empty name of tensor 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 16) + bytes(4096), "implausible length 0 of a metadata key"),
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


@pytest.mark.parametrize(
    ("name", "shape", "pattern"),
    [
        ("n" * 64, (32,), "tensor name 12 is too long: 64 >= 64"),
        ("n" * 1000, (32,), "tensor name 12 is too long: 1000 >= 64"),
        ("five", (32, 1, 1, 1, 2), "tensor 'five' has invalid number of dimensions: 5 > 4"),
        ("nine", (32, 1, 1, 1, 1, 1, 1, 1, 2), "implausible number of dimensions 9 of tensor 13"),
    ],
)
def test_what_a_tensor_cannot_be(tmp_path: Path, name: str, shape: tuple[int, ...], pattern: str) -> None:
    refused(write_gguf(tmp_path / "m.gguf", [*moe_tensors(), (name, shape, Q.F32)]), pattern)


def test_the_longest_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", [*moe_tensors(), ("n" * 63, (32,), Q.F32)])
    assert read_model(path).tensors[-1].name == "n" * 63


def test_infos_in_another_order_than_the_data(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", dense_tensors(1))
    data = bytearray(path.read_bytes())
    first = tensor_table_offset(path)
    second = data.index(struct.pack("<Q", 18) + b"output_norm.weight")
    third = data.index(struct.pack("<Q", 19) + b"blk.0.attn_q.weight")
    data[first:third] = data[second:third] + data[first:second]
    path.write_bytes(data)
    refused(path, r"refuses its header: tensor 'output_norm.weight' has offset \d+, expected 0")


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (struct.pack("<II", 4, 0), "alignment 0 is not a power of 2"),
        (struct.pack("<II", 4, 48), "alignment 48 is not a power of 2"),
        (struct.pack("<II", 4, 2**31), "failed to seek to beginning of data section"),
        (struct.pack("<Ii", 5, -32), "must be of type u32 but is i32"),
        (struct.pack("<IQ", 10, 32), "must be of type u32 but is u64"),
        (struct.pack("<IH", 2, 32), "must be of type u32 but is u16"),
        (struct.pack("<If", 6, 32), "must be of type u32 but is f32"),
        (struct.pack("<IQ", 8, 2) + b"32", "must be of type u32 but is str"),
    ],
)
def test_illegal_alignments(tmp_path: Path, value: bytes, pattern: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys={"general.alignment": 32})
    key = b"general.alignment"
    refused(
        patch(path, rename_bytes(key + struct.pack("<II", 4, 32), key + value, same_length=False)), pattern
    )


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16])
def test_alignments_that_llama_cpp_reads_but_cannot_map(tmp_path: Path, alignment: int) -> None:
    """Read where the first tensor happens to begin at a multiple of 32 bytes, told where not."""
    begins = set()
    for length in range(0, 32, alignment):
        path = _aligned(tmp_path / "m.gguf", alignment, "n" * (1 + length))
        begin = min(tensor.data_offset for tensor in GGUFReader(path).tensors)
        begins.add(begin % 32)
        if begin % 32:
            refused(path, rf"begin at byte {begin}, .*multiple of 32: general\.alignment is {alignment}; ")
        else:
            assert read_model(path).tensors[0].offset == begin
    assert begins == set(range(0, 32, alignment))


def _aligned(path: Path, alignment: int, name: str) -> Path:
    """A model of one tensor whose header, and so where the tensor begins, is as long as its name."""
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_custom_alignment(alignment)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
        (
            dense_tensors(1)
            + expert_tensors(0, ("gate", "up"), n_embd=96, n_ff=64)
            + expert_tensors(0, ("down",)),
            {},
            r"layer 0: blk\.0\.ffn_gate_exps\.weight is 96 x 64 and .*ffn_down.* 96 x 64: .* would be 64 x 96;",
        ),
        (
            dense_tensors(1) + expert_tensors(0, ("gate_up",), n_ff=48) + expert_tensors(0, ("down",)),
            {},
            r"ffn_gate_up_exps\.weight is 64 x 96 and .* would be 64 x 192;",
        ),
        (moe_tensors(n_experts=4), {}, r"has 4 experts but olmoe\.expert_count says 8"),
        (
            [*_without("down"), ("blk.1.ffn_down_exps.weight", (96, 64), Q.Q8_0)],
            {},
            r"ffn_down_exps\.weight has shape \(96, 64\), not",
        ),
        (
            moe_tensors(),
            {"%s.expert_count": None},
            r"has 8 experts but the key olmoe\.expert_count is missing",
        ),
        (moe_tensors(), {"%s.expert_count": [8, 8]}, r"olmoe\.expert_count says \(8, 8\)"),
        (
            moe_tensors(1, n_embd=32, n_ff=32, n_experts=1025),
            {"%s.expert_count": 1025},
            r"layer 0 has 1025 experts, more than the 1024 that llama-cpp-python \d",
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
