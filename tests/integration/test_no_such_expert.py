"""Files that name experts which are not there: llama.cpp would end the process over them while it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moestream
from children import run_child
from conftest import load, same_answer
from ggufs import dense_tensors, expert_tensors, write_gguf
from moestream.model import check_architecture, read_model
from typed import typed

TABLE = "blk.0.ffn_gate_tid2eid.weight"
#: Python for a child that takes any table.
UNCHECKED = "from moestream.model import architecture; architecture.check_tables = lambda model: None"


def with_entry(whole: Path, token: int | slice, expert: int, out: Path) -> Path:
    """A copy whose table of experts has another one for a token, or for some."""
    data = bytearray(whole.read_bytes())
    tensor = next(tensor for tensor in read_model(whole).tensors if tensor.name == TABLE)
    table = np.frombuffer(data, "<i4", tensor.nbytes // 4, tensor.offset).reshape(-1, tensor.shape[0])
    table[token, 1] = expert
    out.write_bytes(data)
    return out


@pytest.mark.parametrize("expert", [32, -1, 2**31 - 1])
def test_a_table_of_tokens(expert: int, tiny: Any, stock: Any, tmp_path: Path) -> None:
    path = with_entry(tiny("deepseek4"), 7, expert, tmp_path / "m.gguf")
    said = f"{path}: tensor {TABLE} names expert {expert} for token 7, and layer 0 has 32"
    with pytest.raises(moestream.ModelError) as refused:
        moestream.Llama(path, ram="1GiB", n_ctx=64)
    assert str(refused.value).startswith(said)
    with load(with_entry(tiny("deepseek4"), 7, 5, tmp_path / "good.gguf"), "arena") as llama:
        same_answer(llama, stock, 9)


@pytest.mark.parametrize("words", [("plan",), ("inspect", "--check"), ("run", "-p", "a", "-n", "1")])
def test_every_command_says_so(words: tuple[str, ...], tiny: Any, tmp_path: Path) -> None:
    path = with_entry(tiny("deepseek4"), 300, 99, tmp_path / "m.gguf")
    done = typed(words[0], path, *words[1:])
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert "names expert 99 for token 300" in line


@pytest.mark.parametrize("mechanism", ["arena", "arena+threads:2+lru", "mapped+willneed"])
def test_a_route_to_no_expert_ends_the_step_before_it_is_used(
    mechanism: str, tiny: Any, tmp_path: Path
) -> None:
    """However it came about: the node behind the choice already asserts on it."""
    path = with_entry(tiny("deepseek4"), slice(None), 99, tmp_path / "m.gguf")
    result = run_child(path, "1GiB", mechanism, first=UNCHECKED)
    assert (result["error"], result["text"]) == ("MoestreamError", "ffn_moe_topk-0 names expert 99 of 32")


@pytest.mark.parametrize(
    ("experts", "chunks", "size", "fits"),
    [
        (8, 4, 2, True),
        (7, 4, 2, True),
        (9, 4, 2, False),
        (8, 4, 1, False),
        (8, 4, 0, False),
        (8, 4, 100, True),
    ],
)
def test_groups_and_their_chunk_experts(
    experts: int, chunks: int, size: int, fits: bool, tmp_path: Path
) -> None:
    """Of 9 experts the last would be of a fifth group."""
    tensors = dense_tensors(1) + expert_tensors(0, n_experts=experts)
    tensors += expert_tensors(0, n_ff=32, n_experts=chunks, suffix="chexps")
    keys = {"%s.block_count": 1, "%s.expert_count": experts, "%s.experts_per_group": size}
    model = read_model(write_gguf(tmp_path / "m.gguf", tensors, arch="grovemoe", keys=keys))
    if fits:
        check_architecture(model)
        return
    said = (
        f"layer 0 has {chunks} chunk experts for {experts} experts and grovemoe.experts_per_group is {size};"
    )
    with pytest.raises(moestream.ModelError, match=said):
        check_architecture(model)
