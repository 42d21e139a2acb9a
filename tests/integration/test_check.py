"""``inspect --check``: a whole model passes, and the first bad value is named with its tensor, expert and place."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ggufs import rewrite, tensor_sources, write_gguf, write_split
from moestream.errors import ModelError
from moestream.model import Model, read_model
from moestream.model.check import PIECE_BYTES, check_weights
from typed import typed


def inspect(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("inspect", path, "--check", *words)


def poisoned(model: Model, name: str, at: int, value: bytes, out: Path) -> Path:
    """A copy with other bytes at ``at`` bytes into a tensor."""
    tensor = next(tensor for tensor in model.tensors if tensor.name == name)
    shutil.copyfile(model.paths[0], out)
    with out.open("r+b") as file:
        file.seek(tensor.offset + at)
        file.write(value)
    return out


NAN16, INFINITE16 = struct.pack("<e", math.nan), struct.pack("<e", math.inf)
#: A tensor of the small model, the bytes into it, what is written there, and what must be said.
SLAB = "blk.1.ffn_up_exps.weight"
BAD = {
    "a scale of an expert": (SLAB, ("slab", 5), NAN16, ", expert 5, at byte {at}: found nan value"),
    "the first block": (SLAB, ("slab", 0), INFINITE16, ", expert 0, at byte {at}: found inf value"),
    "a norm": (
        "blk.0.attn_norm.weight",
        ("bytes", 8),
        struct.pack("<f", math.nan),
        "at byte {at}: found nan value",
    ),
}


@pytest.mark.parametrize("which", BAD)
def test_the_first_bad_value_is_named(which: str, tiny: Any, tmp_path: Path) -> None:
    model = read_model(tiny("olmoe"))
    name, (unit, count), value, said = BAD[which]
    slab_bytes = {slab.name: slab.slab_bytes for bank in model.banks for slab in bank.tensors}
    at = count * slab_bytes[name] if unit == "slab" else count
    path = poisoned(model, name, at, value, tmp_path / "bad.gguf")
    start = next(tensor.offset for tensor in model.tensors if tensor.name == name)
    done = inspect(path)
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"{path}: tensor {name} (" in done.stderr
    assert said.format(at=start + at) in done.stderr
    # Of two the first in the file is named, whichever thread is faster.
    twice = poisoned(read_model(path), model.tensors[-1].name, 0, b"\xff" * 4, tmp_path / "twice.gguf")
    with pytest.raises(ModelError, match=name):
        check_weights(read_model(twice), threads=4)


@pytest.mark.parametrize("key", ["olmoe.attention.head_count", "olmoe.block_count"])
@pytest.mark.parametrize("value", [0, 1, 7, 2**31, 2**32 - 1])
def test_numbers_that_llama_cpp_would_end_over_are_told(
    key: str, value: int, tiny: Any, tmp_path: Path
) -> None:
    data = bytearray(tiny("olmoe").read_bytes())
    at = data.index(key.encode()) + len(key) + 4  # behind the value's type
    data[at : at + 4] = value.to_bytes(4, "little")
    path = tmp_path / "odd.gguf"
    path.write_bytes(data)
    done = inspect(path)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert str(path) in done.stderr


def test_a_shape_that_the_header_s_numbers_do_not_make_is_told(tiny: Any, tmp_path: Path) -> None:
    """Its bytes are good: only llama.cpp's own loader knows what a tensor beside the experts is to be like."""
    router = "blk.1.ffn_gate_inp.weight"
    tensors = [
        (replace(spec, shape=spec.shape[::-1]) if spec.name == router else spec, chunks)
        for spec, chunks in tensor_sources(tiny("olmoe"))
    ]
    path = rewrite(tiny("olmoe"), tmp_path / "m.gguf", tensors=tensors)
    check_weights(read_model(path))
    done = inspect(path)
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"moestream: {path}: ")
    assert f"'{router}' has wrong shape" in line


@pytest.mark.parametrize("arch", ["olmoe", "gpt-oss"])
def test_a_whole_model_passes_and_every_byte_is_read(arch: str, tiny: Any) -> None:
    seen: list[tuple[int, int]] = []
    model = read_model(tiny(arch))
    checked = check_weights(model, lambda done, total: seen.append((done, total)))
    assert checked.tensors == len(model.tensors)
    assert checked.untested == 0
    assert seen[-1] == (checked.bytes, checked.bytes)
    assert checked.bytes == sum(tensor.nbytes for tensor in model.tensors)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_file_whose_end_never_came_is_told(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    shutil.copyfile(tiny("olmoe"), path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2)
        file.truncate(size)
    done = inspect(path)
    assert done.returncode == 3
    assert "holds only zeros" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_all_shards_are_read(tiny: Any, tmp_path: Path) -> None:
    shards = write_split(tiny("olmoe"), tmp_path / "olmoe.gguf", 3)
    done = inspect(shards[1], "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checked"]["tensors"] == len(read_model(shards[0]).tensors)
    last = read_model(shards[0]).tensors[-1]
    with shards[last.shard].open("r+b") as file:
        file.seek(last.offset)
        file.write(b"\xff" * 4)
    assert f"{shards[last.shard]}: tensor {last.name}" in inspect(shards[1]).stderr


#: What makes the last bytes of a type's block no number (all bits set): which ones, counted from the block's beginning.
SCALE_AT = {
    "F64": 0, "F32": 0, "F16": 0, "BF16": 0, "Q4_0": 0, "Q4_1": 2, "Q5_0": 0, "Q5_1": 2, "Q8_0": 0, "Q2_K": 82,
    "Q3_K": 108, "Q4_K": 2, "Q5_K": 0, "Q6_K": 208, "IQ1_S": 0, "IQ1_M": 48, "IQ2_XXS": 0, "IQ2_XS": 0, "IQ2_S": 0,
    "IQ3_XXS": 0, "IQ3_S": 0, "IQ4_NL": 0, "IQ4_XS": 0, "TQ1_0": 52, "TQ2_0": 64, "MXFP4": 0,
}  # fmt: skip
#: Where the scale's bits are in more bytes than two.
SCALE_BYTES = {"F64": 8, "F32": 4, "IQ1_M": 8, "MXFP4": 1}


@pytest.mark.parametrize("name", SCALE_AT)
def test_the_last_block_of_every_type(name: str, tmp_path: Path) -> None:
    """Its tensor is named, its expert and its byte; nothing bad is found before it is there."""
    kind = GGMLQuantizationType[name]
    tensors = [("token_embd.weight", (256, 8), GGMLQuantizationType.F32)]
    tensors += [(f"blk.0.ffn_{role}_exps.weight", (256, 256, 8), kind) for role in ("gate", "up", "down")]
    path = write_gguf(tmp_path / "m.gguf", tensors, quantize=alike)
    check_weights(model := read_model(path))
    size = GGML_QUANT_SIZES[kind][1]
    up = model.banks[0].tensors[1]
    at = up.offset + up.count * up.slab_bytes - size
    with path.open("r+b") as file:
        file.seek(at + SCALE_AT[name])
        file.write(b"\xff" * SCALE_BYTES.get(name, 2))
    said = rf": tensor {up.name} \({up.type_name}\), expert 7, at byte {at}: found "
    with pytest.raises(ModelError, match=said):
        check_weights(read_model(path))


def alike(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks of one byte again and again, good ones of every type, for some quantizers take half a minute to start."""
    block, size = GGML_QUANT_SIZES[kind]
    return np.full((*values.shape[:-1], values.shape[-1] // block * size), 0x11, np.uint8)


def test_every_scale_of_nvfp4_is_a_number(tmp_path: Path) -> None:
    """So none can be bad: not even all bits set."""
    kind = GGMLQuantizationType.NVFP4
    path = write_gguf(tmp_path / "m.gguf", [("token_embd.weight", (64, 8), kind)], quantize=alike)
    (tensor,) = read_model(path).tensors
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\xff" * 36)
    assert check_weights(read_model(path)).untested == 0


def test_python_sees_pieces_of_megabytes(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for each of them is all that Python does: the disk, not the interpreter, says how long it takes."""
    model = read_model(tiny("olmoe"))
    seen: list[tuple[int, int]] = []
    check_weights(model, lambda done, total: seen.append((done, total)))
    assert len(seen) <= len(model.tensors) + model.bytes // PIECE_BYTES


def test_progress_on_a_terminal(tiny: Any) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "moestream", "inspect", str(tiny("olmoe")), "--check", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: its other end is closed
            while piece := os.read(ours, 4096):
                shown += piece
        os.close(ours)
        out = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert b"checking" in shown
    assert json.loads(out)["checked"]["tensors"] == len(read_model(tiny("olmoe")).tensors)
