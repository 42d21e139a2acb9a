"""A model of any supported architecture and shape with random weights, for tests and for measuring bytes and
compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from moestream.errors import UsageError
from moestream.make.ask import asked_tensors
from moestream.make.kinds import Kind, named
from moestream.make.output import Progress, TensorSpec, write_model
from moestream.make.quantize import RandomWeights
from moestream.make.shapes import (
    Scalar,
    Shape,
    check_shape,
    find_architecture,
    llama_name,
    model_keys,
    model_tensors,
    parse_shape,
    unknown,
)
from moestream.make.tokenizer import add_tokenizer

_F32 = named("F32")

#: Types ggml's quantizer makes and its CPU backend multiplies with.
QUANTS = (
    "F32", "F16", "BF16", "Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
    "MXFP4", "NVFP4",
)  # fmt: skip
_KEY_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
}
#: Names that are not one type but a rule for several.
MIXTURES = ("Q4_K_M",)
#: Matrices that llama.cpp's own quantizer leaves alone, and some its graphs want as floats.
_UNQUANTIZED = re.compile(
    r"norm|ffn_gate_inp|conv1d|shortconv\.conv|\.ssm_[ad]\b|hc_|_ape|token_types|position_embd|rel_b|scale"
)
#: Standard deviation of a router's logits: the chosen experts' weights differ, but none takes all.
_ROUTER_SPREAD = 1.5


@dataclass(frozen=True)
class Recipe:
    """Which type a tensor gets: routed experts ``experts``, other matrices ``dense``, a choice of layers
    ``better``."""

    experts: Kind
    dense: Kind
    better: Kind | None = None

    def wanted(self, name: str, layers: int) -> Kind:
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
    """The recipe of a name of ``QUANTS`` or ``MIXTURES``. Raises UsageError with the unknown names."""
    name = text.upper()
    if name == "Q4_K_M":
        return Recipe(named("Q4_K"), named("Q4_K"), named("Q6_K"))
    if name not in QUANTS:
        raise unknown(f"quantisation {text!r}", name, (*QUANTS, *MIXTURES))
    kind = named(name)
    # Files in the 4-bit float types keep everything but the experts in eight bits.
    return Recipe(kind, named("Q8_0") if name in ("MXFP4", "NVFP4") else kind)


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
    for name, extents in tensors_of(arch, shape):
        kind = _kind_of(name, extents, recipe, shape.layers)
        if extents[0] % kind.values:
            if "_exps" in name:
                raise UsageError(
                    f"{name}: its rows of {extents[0]} are not whole {kind.name} blocks of {kind.values}; "
                    "choose a type with smaller blocks, such as Q8_0 or Q4_0, or another ff or embd"
                )
            other = named("F16" if extents[0] % 32 else "Q8_0")
            fallbacks.append(
                f"{name} is {other.name}: rows of {extents[0]} are not whole {kind.name} blocks of {kind.values}"
            )
            kind = other
        specs.append(TensorSpec(name, extents, kind.number))
    return Layout(specs, fallbacks)


@cache
def tensors_of(arch: str, shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model in file order, (name, extents with ne0 first)."""
    entry = find_architecture(arch)
    if not entry.asked:
        return model_tensors(arch, shape)
    tensors = []
    for name, extents in asked_tensors(llama_name(arch), lambda writer: _add_metadata(writer, arch, shape)):
        if entry.without and re.search(entry.without, name):
            continue
        if entry.apart and ".ffn_gate_up_exps." in name:
            half = (extents[0], extents[1] // 2, *extents[2:])
            tensors += [(name.replace("gate_up", role), half) for role in ("gate", "up")]
        else:
            tensors.append((name, extents))
    return tensors


def _add_metadata(writer: gguf.GGUFWriter, arch: str, shape: Shape) -> None:
    add_keys(writer, model_keys(arch, shape))
    add_tokenizer(writer, shape.vocab)


def add_keys(writer: gguf.GGUFWriter, keys: Mapping[str, Scalar | list[Scalar]]) -> None:
    """Add a model's own keys, whole numbers as 32 bits without a sign."""
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, _KEY_TYPES[type(value[0])])
        else:
            writer.add_key_value(key, value, _KEY_TYPES[type(value)])


def _kind_of(name: str, extents: tuple[int, ...], recipe: Recipe, layers: int) -> Kind:
    if "tid2eid" in name:
        return named("I32")
    return _F32 if _stays_f32(name, extents) else recipe.wanted(name, layers)


def _stays_f32(name: str, extents: tuple[int, ...]) -> bool:
    return len(extents) == 1 or name.endswith(".bias") or _UNQUANTIZED.search(name) is not None


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
        _add_metadata(writer, arch, shape)

    sources = [
        (spec, _chunks(weights, spec, number, shape.experts)) for number, spec in enumerate(layout.specs)
    ]
    return write_model(out, llama_name(arch), add_metadata, sources, progress)


def _chunks(
    weights: RandomWeights, spec: TensorSpec, number: int, experts: int
) -> Callable[[], Iterable[npt.NDArray[np.uint8]]]:
    random = np.random.RandomState([weights.seed, number])
    if spec.ggml_type == named("I32").number:
        return lambda: [_token_table(spec, random, experts).view(np.uint8).reshape(-1)]
    if (_stays_f32(spec.name, spec.shape) and ".ffn_gate_inp." not in spec.name) or len(spec.shape) == 1:
        return lambda: [_small_tensor(spec, random).view(np.uint8).reshape(-1)]
    scale = 1.0 if spec.name == "token_embd.weight" else spec.shape[0] ** -0.5
    if ".ffn_gate_inp." in spec.name:
        scale *= _ROUTER_SPREAD
    return lambda: weights.tensor(spec, scale, number)


def _small_tensor(spec: TensorSpec, random: np.random.RandomState) -> npt.NDArray[np.float32]:
    """Norms and scales near one, decays of a state below zero, biases and the rest near zero; (rows, ne0)."""
    noise = 0.1 * random.standard_normal((spec.rows, spec.shape[0]))
    if ".ssm_a" in spec.name:
        values = -1 - np.abs(noise)
    elif "norm" in spec.name or "scale" in spec.name:
        values = 1 + noise
    else:
        values = noise
    return values.astype(np.float32)


def _token_table(spec: TensorSpec, random: np.random.RandomState, experts: int) -> npt.NDArray[np.int32]:
    """Which experts each token goes to: different ones in a row; (tokens, experts a token)."""
    first = random.randint(0, experts, (spec.rows, 1))
    return ((first + np.arange(spec.shape[0])) % experts).astype(np.int32)
