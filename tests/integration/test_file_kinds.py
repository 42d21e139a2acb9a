"""Kinds of files: whatever llama.cpp itself loads streams with stock's logits, and the rest is told in one line."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import evicted, load, same_answer
from ggufs import rewrite, tensor_sources
from moestream.make.output import TensorSource

#: A budget that forces evictions, read past the page cache and through it; and the kernel's own mapping.
MECHANISMS = ("arena", "mapped+willneed")
SHAPE = "tiny,layers=2,experts=32"


@pytest.fixture(scope="module")
def whole(tiny) -> Path:
    return tiny("olmoe", SHAPE)


def streams(path: Path, mechanism: str, stock, length: int = 9) -> None:
    """The file gives stock's logits while its experts come and go."""
    with load(path, mechanism) as llama:
        same_answer(llama, stock, length)
        assert not mechanism.startswith("arena") or evicted(llama)


@pytest.mark.parametrize(
    ("mechanism", "alignment"),
    [*(("arena", 2**power) for power in range(5, 13)), ("mapped+willneed", 64), ("mapped+willneed", 4096)],
)
def test_alignments(mechanism: str, alignment: int, whole: Path, tmp_path: Path, stock) -> None:
    streams(rewrite(whole, tmp_path / "m.gguf", alignment=alignment), mechanism, stock)


def shuffled(tensors: list[TensorSource]) -> list[TensorSource]:
    """The experts of a layer are all over the file, dense tensors between them."""
    return random.Random(1).sample(tensors, len(tensors))


def experts_first(tensors: list[TensorSource]) -> list[TensorSource]:
    return sorted(tensors, key=lambda source: "_exps" not in source[0].name)


ORDERS: dict[str, Callable[[list[TensorSource]], list[TensorSource]]] = {
    "shuffled": shuffled,
    "backwards": lambda tensors: tensors[::-1],
    "experts first": experts_first,
    "by role": lambda tensors: sorted(tensors, key=lambda source: source[0].name.split(".")[2:]),
}


@pytest.mark.parametrize(
    ("mechanism", "order"), [*(("arena", order) for order in ORDERS), ("mapped+willneed", "shuffled")]
)
def test_tensors_in_any_order(mechanism: str, order: str, whole: Path, tmp_path: Path, stock) -> None:
    tensors = ORDERS[order](tensor_sources(whole))
    assert [spec.name for spec, _ in tensors] != [spec.name for spec, _ in tensor_sources(whole)]
    streams(rewrite(whole, tmp_path / "m.gguf", tensors=tensors), mechanism, stock)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_tied_output(mechanism: str, tiny, tmp_path: Path, stock) -> None:
    untied = tiny("qwen3moe", SHAPE)
    tensors = [source for source in tensor_sources(untied) if source[0].name != "output.weight"]
    assert len(tensors) == len(tensor_sources(untied)) - 1
    streams(rewrite(untied, tmp_path / "m.gguf", tensors=tensors), mechanism, stock)


@pytest.mark.parametrize("name", ["model", "ein Modell für 模型 🦊.bin", "%s{0}.gguf.bak"])
def test_any_name(name: str, whole: Path, tmp_path: Path, stock) -> None:
    path = tmp_path / name
    path.hardlink_to(whole)
    streams(path, "arena", stock)


@pytest.mark.parametrize(
    ("mechanism", "experts"), [*(("arena", count) for count in (513, 896, 1024)), ("mapped+willneed", 1024)]
)
def test_hundreds_of_experts(mechanism: str, experts: int, tiny, stock) -> None:
    """1,024 are the most that llama.cpp takes."""
    path = tiny("olmoe", f"tiny,layers=1,experts={experts},used=8,ff=256", "Q2_K")
    streams(path, mechanism, stock, length=64)


def test_hundreds_of_experts_all_used(tiny, stock) -> None:
    path = tiny("olmoe", "tiny,layers=1,experts=257,used=257,ff=256", "Q2_K")
    with load(path, "arena") as llama:
        same_answer(llama, stock, 2)
