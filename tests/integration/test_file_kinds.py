"""Kinds of files: whatever llama.cpp itself loads streams with stock's logits, and the rest is told in one line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from answers import Answer, answer
from conftest import evicted, load, plain, same_answer
from ggufs import rewrite, tensor_sources, write_behind_holes
from moestream.errors import ModelError
from moestream.make.output import TensorSource, TensorSpec
from moestream.model import read_model

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


@pytest.mark.parametrize("alignment", [1, 8, 16])
def test_alignments_that_may_map(alignment: int, whole: Path, tmp_path: Path, stock) -> None:
    """Below 32 it is luck where the first tensor begins: llama.cpp takes it at multiples of 32 and ends over others."""

    def made(length: int) -> tuple[Path, int]:
        path = tmp_path / f"{length}.gguf"
        rewrite(whole, path, alignment=alignment, add={"general.description": "-" * (1 + length)})
        return path, GGUFReader(path).tensors[0].data_offset

    lacking = -made(0)[1] % 32
    (fits, begin), (misfit, other) = made(lacking), made(lacking + alignment)
    assert (begin % 32, other % 32) == (0, alignment)
    streams(fits, "arena", stock)
    with pytest.raises(ModelError, match=rf"begin at byte {other}, and llama\.cpp needs a multiple of 32"):
        read_model(misfit)
    code = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], use_extra_bufts=False)"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(misfit)],
        capture_output=True,
        text=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        check=False,
    )
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "TENSOR_ALIGNMENT" in ended.stderr


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


#: A key of a model with 2 layers and experts of 512, what it says instead, and what must be said of that.
COUNTS = [
    ("block_count", 3, r"tensor 'blk\.2\.attn_norm\.weight' not found"),
    ("block_count", 1, r"wrong number of tensors; expected 27, got 15"),
    ("block_count", 0, "n_layer_all <= LLAMA_MAX_LAYERS"),
    ("block_count", 513, "n_layer_all <= LLAMA_MAX_LAYERS"),
    (
        "feed_forward_length",
        256,
        r"'blk\.0\.ffn_gate_exps\.weight' has wrong shape; expected +256, +256, +32, got +256, +512",
    ),
    ("embedding_length", 128, r"'token_embd\.weight' has wrong shape; expected +128, +320, got +256, +320"),
    ("expert_count", 31, r"layer 0 has 32 experts but olmoe\.expert_count says 31"),
    ("expert_used_count", 33, r"layer 0 has 32 experts but olmoe\.expert_used_count says 33"),
]


@pytest.mark.parametrize(("key", "value", "said"), COUNTS)
def test_counts_that_are_not_the_tensors(
    key: str, value: int, said: str, whole: Path, tmp_path: Path
) -> None:
    path = rewrite(whole, tmp_path / "m.gguf", change={f"olmoe.{key}": value})
    with pytest.raises(ModelError, match=said) as refused:
        load(path, "arena")
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_a_width_that_llama_cpp_works_out(tiny, tmp_path: Path, stock) -> None:
    """Without the experts' width it takes the dense one's share of one expert."""
    path = rewrite(
        tiny("qwen3moe", SHAPE), tmp_path / "m.gguf", change={"qwen3moe.expert_feed_forward_length": 0}
    )
    streams(path, "arena", stock)


#: Bytes of expert tensors that decoding never reads, in front of those that it does: more than 32 bits count.
FAR = 1 << 32
#: How bytes get from there to the matmuls: past the page cache, through it, and by the kernel's own mapping.
READ_BY = ("arena+uring:8", "arena+threads:2", "arena/buffered+sync", "mapped+willneed", "mapped+pread")


@pytest.fixture(scope="module")
def far(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with next-token-prediction blocks, whose experts lie first: holes of the widest type there is."""
    whole = tiny("glm4moe", "tiny,layers=2,experts=32,ff=1024")
    tensors = tensor_sources(whole)
    last = [source for source in tensors if source[0].name.startswith("blk.1.")]
    experts = [spec for spec, _ in last if "_exps." in spec.name and len(spec.shape) == 3]
    widened = [replace(spec, ggml_type=int(GGMLQuantizationType.F64)) for spec in experts]
    blocks = -(-FAR // sum(spec.nbytes for spec in widened))
    holes = [_as_block(spec, 2 + block) for block in range(blocks) for spec in widened]
    dense = [source for source in last if source[0] not in experts]
    rest = [(_as_block(spec, 2 + block), chunks) for block in range(blocks) for spec, chunks in dense]
    path = write_behind_holes(
        whole,
        tmp_path_factory.mktemp("far") / "far.gguf",
        holes,
        tensors + rest,
        change={"glm4moe.block_count": 2 + blocks},
        add={"glm4moe.nextn_predict_layers": blocks},
    )
    model = read_model(path)
    assert min(slab.offset for slab in model.banks[0].tensors) > FAR
    assert path.stat().st_blocks * 512 < 64 << 20 < FAR < path.stat().st_size
    assert model.n_mtp_layers == blocks
    return path


def _as_block(spec: TensorSpec, block: int) -> TensorSpec:
    return replace(spec, name=spec.name.replace("blk.1.", f"blk.{block}."))


@pytest.mark.parametrize("mechanism", READ_BY)
def test_beyond_four_gigabytes(mechanism: str, far: Path) -> None:
    streams(far, mechanism, unmapped)


def unmapped(path: Path, tokens: list[int], steps: int, threads: int, n_batch: int, n_ubatch: int) -> Answer:
    """Stock's answer, which reads what it uses: where it maps, it fills memory with the holes."""
    llama = plain(path, threads, n_batch=n_batch, n_ubatch=n_ubatch, use_mmap=False)
    try:
        return answer(llama, tokens, steps)
    finally:
        llama.close()
