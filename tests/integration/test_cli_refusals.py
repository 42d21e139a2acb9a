"""Each bad input at the command line: exit code 3 and one line that names it, never a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFEndian

from ggufs import cut, dense_tensors, patch, set_tensor_type, split_gguf, tensor_table_offset, write_gguf
from moestream.make import make_model
from typed import typed


def refusal(*words: object, within: tuple[str, ...] = ()) -> str:
    """The one line of a command that is refused; asserts exit code 3 and that nothing else was said.
    ``within``: the words of a program that runs it."""
    command = [*within, sys.executable, "-m", "moestream", *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120) if within else typed(*words)
    assert done.returncode == 3, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("moestream: ")
    assert "Traceback" not in lines[0]
    return lines[0]


def no_gguf(path: Path) -> Path:
    path.write_bytes(bytes(4096))
    return path


def web_page(path: Path) -> Path:
    path.write_text("<!DOCTYPE html><html><body>Sign in</body></html>")
    return path


def cut_header(path: Path) -> Path:
    return cut(write_gguf(path), 100)


def cut_table(path: Path) -> Path:
    write_gguf(path)
    return cut(path, tensor_table_offset(path) + 300)


def cut_data(path: Path) -> Path:
    return cut(write_gguf(path), -1000)


def missing_shard(path: Path) -> Path:
    first, second, *_ = split_gguf(path, 3)
    second.unlink()
    return first


def mixed_shards(path: Path) -> Path:
    first, second, third, *_ = split_gguf(path, 3)
    second.write_bytes(third.read_bytes())
    return first


def unknown_architecture(path: Path) -> Path:
    return write_gguf(path, arch="olmoa")


def unknown_type(path: Path) -> Path:
    return patch(write_gguf(path), set_tensor_type("blk.1.ffn_up_exps.weight", 200))


def old_mixtral(path: Path) -> Path:
    experts = [
        (f"blk.0.ffn_{role}.{expert}.weight", (64, 64), Q.Q8_0)
        for role in ("gate", "up", "down")
        for expert in range(8)
    ]
    return write_gguf(path, dense_tensors(1) + experts, arch="llama")


def big_endian(path: Path) -> Path:
    return write_gguf(path, endianess=GGUFEndian.BIG)


#: Each way of making a bad file, and what its refusal says.
BAD_FILES: list[tuple[Callable[[Path], Path], str]] = [
    (no_gguf, "not a GGUF file"),
    (web_page, "HTML"),
    (cut_header, "truncated in the header"),
    (cut_table, "in the tensor table"),
    (cut_data, "in the tensor data, short by 1000 bytes"),
    (missing_shard, "1 of 4 shards missing"),
    (mixed_shards, "mixed-up shards"),
    (unknown_type, "has ggml type 200"),
    (old_mixtral, "one tensor for each expert"),
    (big_endian, "big-endian"),
]


@pytest.mark.parametrize("command", [("inspect",), ("run", "-p", "a")], ids=["inspect", "run"])
@pytest.mark.parametrize(("make", "says"), BAD_FILES, ids=[make.__name__ for make, _ in BAD_FILES])
def test_a_bad_file(
    make: Callable[[Path], Path], says: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    path = make(tmp_path / "m.gguf")
    said = refusal(command[0], path, *command[1:])
    assert says in said
    assert str(tmp_path) in said


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    """Only to run it: its expert table can be shown all the same."""
    said = refusal("run", unknown_architecture(tmp_path / "m.gguf"), "-p", "a")
    assert "architecture 'olmoa' is unknown" in said


@pytest.mark.parametrize(
    ("mechanism", "says"),
    [
        ("arenna", "did you mean arena"),
        ("arena+urng", "did you mean uring"),
        ("mapped+lru", "page cache decides"),
    ],
)
def test_a_mechanism_that_is_none(mechanism: str, says: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert says in refusal("run", path, "-p", "a", "--mechanism", mechanism)


def test_a_cap_that_is_too_small(tmp_path: Path) -> None:
    path = make_model("olmoe", "tiny", "Q8_0", tmp_path / "tiny.gguf")
    said = refusal("run", path, "-p", "a", "--ram", "1MB", "--mechanism", "arena", "--ctx", 512)
    assert "the smallest cap that works is" in said


def test_strict_where_little_may_be_locked(tmp_path: Path) -> None:
    limited: tuple[str, ...] = ("sh", "-c", 'ulimit -l 64 && exec "$@"', "sh")
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root without setpriv: the limit does not bind")
        limited = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "--", *limited)
    path = make_model("olmoe", "tiny", "Q8_0", tmp_path / "tiny.gguf")
    words = ("-p", "a", "-n", 1, "--ram", "1GiB", "--mechanism", "arena+sync+lru+mlock", "--ctx", 512)
    said = refusal("run", path, *words, "--strict", within=limited)
    assert "--strict" in said
    assert "ulimit -l" in said
