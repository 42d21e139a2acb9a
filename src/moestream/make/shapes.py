"""Shapes of models, and the keys and tensors that an architecture's entry means for one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from moestream.errors import UsageError
from moestream.make.architecture import Architecture, KeyValue, PerLayer
from moestream.make.asked import ASKED
from moestream.make.written import WRITTEN
from moestream.nearest import did_you_mean

#: Every architecture ``make-model`` knows.
ARCHITECTURES: dict[str, Architecture] = {**WRITTEN, **ASKED}

#: Keys that are the same for every architecture.
_WITHOUT_PREFIX = ("tokenizer.", "xielu.")

#: A value of a key in a file.
Scalar = int | float | bool


@dataclass(frozen=True)
class Shape:
    """The numbers of a model. The defaults are the shape ``tiny``."""

    layers: int = 4
    embd: int = 256
    ff: int = 512  #: hidden neurons of one expert
    experts: int = 8
    used: int = 2
    vocab: int = 320
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ctx: int = 2048
    dense_ff: int = 1024  #: hidden neurons of a dense layer's feed-forward block
    leading_dense: int = 1  #: layers without experts at the front, for architectures that have them
    shared: int = 1  #: shared experts, for architectures that have them
    window: int = 128  #: sliding attention window, for architectures that have one
    q_lora: int = 256
    kv_lora: int = 256
    rope_dim: int = 32  #: rotated part of a head, for latent attention

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def shared_ff(self) -> int:
        return self.shared * self.ff

    @property
    def twice_ff(self) -> int:
        return 2 * self.ff

    @property
    def mla_q(self) -> int:
        return self.heads * self.mla_head

    @property
    def mla_head(self) -> int:
        return self.head_dim + self.rope_dim

    @property
    def mla_kv(self) -> int:
        return self.kv_lora + self.rope_dim

    @property
    def twice_embd(self) -> int:
        return 2 * self.embd

    @property
    def one(self) -> int:
        return 1


SHAPES: dict[str, Shape] = {
    "tiny": Shape(),
    "olmoe-1b-7b": Shape(
        layers=16, embd=2048, ff=1024, experts=64, used=8, vocab=50304, heads=16, kv_heads=16, head_dim=128,
        ctx=4096, dense_ff=1024,
    ),
    "qwen3-30b-a3b": Shape(
        layers=48, embd=2048, ff=768, experts=128, used=8, vocab=151936, heads=32, kv_heads=4, head_dim=128,
        ctx=40960, dense_ff=6144,
    ),
    "mixtral-8x7b": Shape(
        layers=32, embd=4096, ff=14336, experts=8, used=2, vocab=32000, heads=32, kv_heads=8, head_dim=128,
        ctx=32768, dense_ff=14336,
    ),
    "gpt-oss-20b": Shape(
        layers=24, embd=2880, ff=2880, experts=32, used=4, vocab=201088, heads=64, kv_heads=8, head_dim=64,
        ctx=131072, dense_ff=2880,
    ),
}  # fmt: skip


def find_architecture(name: str) -> Architecture:
    """Raises UsageError with the nearest names for one that is not in the table."""
    if name not in ARCHITECTURES:
        raise unknown(f"architecture {name!r}", name, ARCHITECTURES)
    return ARCHITECTURES[name]


def parse_shape(arch: str, text: str) -> Shape:
    """``tiny``, ``layers=8,ff=1024`` (the rest as in tiny) or ``mixtral-8x7b,layers=4``. Raises
    UsageError."""
    shape = tiny = replace(SHAPES["tiny"], **find_architecture(arch).tiny)
    known = {entry.name for entry in fields(Shape)}
    changes: dict[str, int] = {}
    for position, part in enumerate(text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and position == 0:
            if key not in SHAPES:
                raise unknown(f"shape {key!r}", key, SHAPES, ", or key=value pairs")
            shape = tiny if key == "tiny" else SHAPES[key]
        elif key not in known:
            raise unknown(f"key {key!r} in shape {text!r}", key, known)
        elif not value.isdecimal():
            raise UsageError(f"shape {text!r}: {key} must be a whole number, not {value!r}")
        else:
            changes[key] = int(value)
    return replace(shape, **changes)


def check_shape(arch: str, shape: Shape) -> None:
    """Raises UsageError when llama.cpp could not run ``arch`` in this shape."""
    may_be_zero = {"leading_dense"}
    for entry in fields(Shape):
        if getattr(shape, entry.name) < 1 and entry.name not in may_be_zero:
            raise UsageError(f"shape: {entry.name} must be at least 1")
    if shape.used > shape.experts:
        raise UsageError(f"shape: used={shape.used} is more than experts={shape.experts}")
    if shape.heads % shape.kv_heads:
        raise UsageError(f"shape: kv_heads={shape.kv_heads} does not divide heads={shape.heads}")
    if shape.head_dim % 2:
        raise UsageError(f"shape: head_dim={shape.head_dim} must be even, positions rotate pairs")
    if find_architecture(arch).square_attention and shape.q != shape.embd:
        raise UsageError(f"shape: {arch} needs heads * head_dim = embd, and {shape.q} is not {shape.embd}")
    if find_architecture(arch).equal_heads and shape.kv_heads != shape.heads:
        raise UsageError(f"shape: {arch} needs kv_heads = heads, and {shape.kv_heads} is not {shape.heads}")
    group = find_architecture(arch).keys.get("experts_per_group")
    if isinstance(group, int) and shape.experts % group:
        raise UsageError(
            f"shape: {arch} groups experts by {group}, which does not divide experts={shape.experts}"
        )
    if find_architecture(arch).dense and shape.leading_dense >= shape.layers:
        raise UsageError(
            f"shape: leading_dense={shape.leading_dense} leaves no layer of {shape.layers} with experts"
        )


def model_tensors(arch: str, shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model in file order, (name, extents with ne0 first)."""
    entry = find_architecture(arch)
    tensors = [_tensor("token_embd embd,vocab", shape)]
    for layer in range(shape.layers):
        block = entry.dense if entry.dense and layer < shape.leading_dense else entry.experts
        tensors += [_tensor(f"blk.{layer}.{line}", shape) for line in (*entry.attention, *block)]
    return [*tensors, _tensor("output_norm embd", shape), _tensor("output embd,vocab", shape)]


def llama_name(arch: str) -> str:
    """What llama.cpp calls the architecture that this table calls ``arch``."""
    return find_architecture(arch).known_as or arch


def model_keys(arch: str, shape: Shape) -> dict[str, Scalar | list[Scalar]]:
    """The metadata of the architecture, keys with their ``<arch>.``."""
    return written_keys(llama_name(arch), find_architecture(arch).keys, shape)


def written_keys(prefix: str, keys: dict[str, KeyValue], shape: Shape) -> dict[str, Scalar | list[Scalar]]:
    """What every architecture is asked for and ``keys``, as in a file of the architecture ``prefix``."""
    keys = {
        "block_count": "layers", "context_length": "ctx", "embedding_length": "embd",
        "feed_forward_length": "dense_ff", "attention.head_count": "heads",
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "expert_count": "experts", "expert_used_count": "used", "vocab_size": "vocab",
        **keys,
    }  # fmt: skip
    return {
        key if key.startswith(_WITHOUT_PREFIX) else f"{prefix}.{key}": _value(value, shape)
        for key, value in keys.items()
    }


def _value(value: KeyValue, shape: Shape) -> Scalar | list[Scalar]:
    if isinstance(value, PerLayer):
        return [_scalar(value[layer % len(value)], shape) for layer in range(shape.layers)]
    if isinstance(value, list):
        return [_scalar(element, shape) for element in value]
    return _scalar(value, shape)


def _scalar(value: str | Scalar, shape: Shape) -> Scalar:
    return getattr(shape, value) if isinstance(value, str) else value


def _tensor(line: str, shape: Shape) -> tuple[str, tuple[int, ...]]:
    name, extents = line.split()
    suffix = "" if name.endswith(".bias") else ".weight"
    return name + suffix, tuple(getattr(shape, extent) for extent in extents.split(","))


def unknown(what: str, word: str, known: Iterable[str], more: str = "") -> UsageError:
    """The error for a ``word`` that is none of ``known``: those it may have meant, or all of them."""
    near = did_you_mean(word, known) or f" (known: {', '.join(sorted(known))}{more})"
    return UsageError(f"unknown {what}{near}")
