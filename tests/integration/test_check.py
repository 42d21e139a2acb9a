"""``inspect --check``: a whole model passes, and the first bad value is named with its tensor, expert and place."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ggufs import write_split
from moestream.errors import ModelError
from moestream.model import Model, read_model
from moestream.model.check import check_weights


def inspect(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moestream", "inspect", str(path), "--check", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


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
