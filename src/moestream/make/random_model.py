"""A model of any supported architecture and shape with random weights, for tests and for measuring bytes and
compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from moestream.errors import UsageError
from moestream.make.output import Progress, TensorSpec, write_model
from moestream.make.quantize import RandomWeights
from moestream.make.shapes import (
    Shape,
    check_shape,
    llama_name,
    model_keys,
    model_tensors,
    nearest,
    parse_shape,
)
from moestream.make.tokenizer import add_tokenizer

_TYPE = gguf.GGMLQuantizationType
_F32 = _TYPE.F32

#: Types ggml's quantizer makes and its CPU backend multiplies with.
_QUANTS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
    "MXFP4", "NVFP4",
)  # fmt: skip
_KEY_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
}
#: Standard deviation of a router's logits: the chosen experts' weights differ, but none takes all.
_ROUTER_SPREAD = 1.5


@dataclass(frozen=True)
class Recipe:
    """Which type a tensor gets: routed experts ``experts``, other matrices ``dense``, a choice of layers
    ``better``."""

    experts: gguf.GGMLQuantizationType
    dense: gguf.GGMLQuantizationType
    better: gguf.GGMLQuantizationType | None = None

    def wanted(self, name: str, layers: int) -> gguf.GGMLQuantizationType:
        if self.better is not None and (name == "output.weight" or _gets_better(name, layers)):
            return self.better
        return self.experts if "_exps" in name else self.dense


def _gets_better(name: str, layers: int) -> bool:
    """llama.cpp's rule for the _M mixtures: the first and last eighth of the layers and every third
    between."""
    if "attn_v." not in name and "ffn_down" not in name:
        return False
    layer, eighth = int(name.split(".")[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def parse_quant(text: str) -> Recipe:
    """The recipe of a name of ``_QUANTS`` or of ``Q4_K_M``. Raises UsageError with the nearest names."""
    name = text.upper()
    if name == "Q4_K_M":
        return Recipe(_TYPE.Q4_K, _TYPE.Q4_K, _TYPE.Q6_K)
    if name not in _QUANTS:
        raise UsageError(f"unknown quantisation {text!r}: {nearest(name, (*_QUANTS, 'Q4_K_M'))}")
    kind: gguf.GGMLQuantizationType = getattr(_TYPE, name)
    # Files in the 4-bit float types keep everything but the experts in eight bits.
    return Recipe(kind, _TYPE.Q8_0 if name in ("MXFP4", "NVFP4") else kind)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model to be, and for each that could not have the type asked for, why."""

    specs: list[TensorSpec]
    fallbacks: list[str]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def lay_out(arch: str, shape: Shape, quant: str) -> Layout:
    """Decide every tensor's type. Raises UsageError when an expert tensor cannot have the type asked for.

    A dense matrix whose rows are no whole number of blocks falls back to Q8_0, or to F16; that costs little
    and is said.
    """
    recipe = parse_quant(quant)
    specs, fallbacks = [], []
    for name, extents in model_tensors(arch, shape):
        kind = _F32 if _stays_f32(name, extents) else recipe.wanted(name, shape.layers)
        if extents[0] % gguf.GGML_QUANT_SIZES[kind][0]:
            block = gguf.GGML_QUANT_SIZES[kind][0]
            if "_exps" in name:
                raise UsageError(
                    f"{name}: its rows of {extents[0]} are not whole {kind.name} blocks of {block}; "
                    "choose a type with smaller blocks, such as Q8_0 or Q4_0, or another ff or embd"
                )
            other = _TYPE.F16 if extents[0] % 32 else _TYPE.Q8_0
            fallbacks.append(
                f"{name} is {other.name}: rows of {extents[0]} are not whole {kind.name} blocks of {block}"
            )
            kind = other
        specs.append(TensorSpec(name, extents, int(kind)))
    return Layout(specs, fallbacks)


def _stays_f32(name: str, extents: tuple[int, ...]) -> bool:
    return len(extents) == 1 or name.endswith(".bias") or "ffn_gate_inp" in name


def build_model(
    arch: str, shape_text: str, quant: str, out: Path, seed: int = 0, progress: Progress | None = None
) -> Path:
    """``moestream.make.make_model`` without its default path; see there."""
    shape = parse_shape(arch, shape_text)
    check_shape(arch, shape)
    layout = lay_out(arch, shape, quant)
    weights = RandomWeights(seed)

    def add_metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_name(f"random {arch} {shape_text} {quant} seed {seed}")
        for key, value in model_keys(arch, shape).items():
            writer.add_key_value(key, value, _KEY_TYPES[type(value)])
        add_tokenizer(writer, shape.vocab)

    sources = [(spec, _chunks(weights, spec, number, seed)) for number, spec in enumerate(layout.specs)]
    return write_model(out, llama_name(arch), add_metadata, sources, progress)


def _chunks(
    weights: RandomWeights, spec: TensorSpec, number: int, seed: int
) -> Callable[[], Iterable[npt.NDArray[np.uint8]]]:
    if len(spec.shape) == 1 or spec.name.endswith(".bias"):
        return lambda: [_small_tensor(spec, np.random.RandomState([seed, number])).view(np.uint8).reshape(-1)]
    scale = 1.0 if spec.name == "token_embd.weight" else spec.shape[0] ** -0.5
    if ".ffn_gate_inp." in spec.name:
        scale *= _ROUTER_SPREAD
    return lambda: weights.tensor(spec, scale, number)


def _small_tensor(spec: TensorSpec, random: np.random.RandomState) -> npt.NDArray[np.float32]:
    """Norms near one, biases and the rest near zero; (rows, ne0)."""
    noise = 0.1 * random.standard_normal((spec.rows, spec.shape[0]))
    values = 1 + noise if "norm" in spec.name else noise
    return values.astype(np.float32)
