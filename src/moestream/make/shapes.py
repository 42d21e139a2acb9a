"""Shapes of models and the tensors each architecture wants, as tables: a new architecture is one entry.

Facts are from llama.cpp's ``src/models/*.cpp`` (``load_arch_hparams`` for the keys, ``load_arch_tensors`` for
the tensors). A tensor is written ``name extent,extent,...`` where an extent is an attribute of ``Shape``, ne0
first; a name without a dot ends in ``.weight``. A key is written without its ``<arch>.`` and takes an
attribute of ``Shape`` or a plain value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from moestream.errors import UsageError


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


@dataclass(frozen=True)
class Architecture:
    """What one architecture of llama.cpp asks of a file beyond what all of them ask."""

    attention: tuple[str, ...]
    experts: tuple[str, ...]
    keys: dict[str, str | float | bool] = field(default_factory=dict)
    #: Tensors of a layer before ``leading_dense``; empty when every layer has experts.
    dense: tuple[str, ...] = ()
    #: True when the loader wants heads * head_dim to be embd.
    square_attention: bool = False
    #: True when the loader wants as many key heads as query heads.
    equal_heads: bool = False
    #: What llama.cpp calls it, where the table has a second layout of one architecture.
    known_as: str = ""
    #: Where this architecture's ``tiny`` differs from the others'.
    tiny: dict[str, int] = field(default_factory=dict)


_GQA = ("attn_norm embd", "attn_q embd,q", "attn_k embd,kv", "attn_v embd,kv", "attn_output q,embd")
_GQA_BIAS = ("attn_q.bias q", "attn_k.bias kv", "attn_v.bias kv")
_ROUTED = (
    "ffn_gate_inp embd,experts",
    "ffn_gate_exps embd,ff,experts",
    "ffn_up_exps embd,ff,experts",
    "ffn_down_exps ff,embd,experts",
)
_MERGED = (
    "ffn_gate_inp embd,experts",
    "ffn_gate_up_exps embd,twice_ff,experts",
    "ffn_down_exps ff,embd,experts",
)
_SHARED = ("ffn_gate_shexp embd,shared_ff", "ffn_up_shexp embd,shared_ff", "ffn_down_shexp shared_ff,embd")
_DENSE = ("ffn_gate embd,dense_ff", "ffn_up embd,dense_ff", "ffn_down dense_ff,embd")
_GQA_KEYS: dict[str, str | float | bool] = {
    "attention.head_count_kv": "kv_heads", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim", "rope.dimension_count": "head_dim",
}  # fmt: skip
#: Sigmoid routing with a selection bias, as DeepSeek-V3 introduced it.
_SIGMOID_KEYS: dict[str, str | float | bool] = {
    "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5,
    "expert_shared_count": "shared", "leading_dense_block_count": "leading_dense",
    "expert_feed_forward_length": "ff",
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "olmoe": Architecture(
        (*_GQA, "attn_q_norm q", "attn_k_norm kv", "ffn_norm embd"), _ROUTED,
        {**_GQA_KEYS, "feed_forward_length": "ff"},
        square_attention=True, equal_heads=True, tiny={"kv_heads": 4},
    ),
    "llama": Architecture((*_GQA, "ffn_norm embd"), _ROUTED, {**_GQA_KEYS, "feed_forward_length": "ff"}),
    "qwen2moe": Architecture(
        (*_GQA, *_GQA_BIAS, "ffn_norm embd"), (*_ROUTED, "ffn_gate_inp_shexp embd", *_SHARED),
        {**_GQA_KEYS, "expert_feed_forward_length": "ff", "expert_shared_feed_forward_length": "shared_ff"},
        square_attention=True,
    ),
    "qwen3moe": Architecture(
        (*_GQA, "attn_q_norm head_dim", "attn_k_norm head_dim", "ffn_norm embd"), _ROUTED,
        {**_GQA_KEYS, "expert_feed_forward_length": "ff"},
    ),
    "deepseek2": Architecture(
        ("attn_norm embd", "attn_q_a embd,q_lora", "attn_q_a_norm q_lora", "attn_q_b q_lora,mla_q",
         "attn_kv_a_mqa embd,mla_kv", "attn_kv_a_norm kv_lora", "attn_k_b head_dim,kv_lora,heads",
         "attn_v_b kv_lora,head_dim,heads", "attn_output q,embd", "ffn_norm embd"),
        (*_ROUTED, "exp_probs_b.bias experts", *_SHARED),
        {**_SIGMOID_KEYS, "attention.head_count_kv": "one", "attention.key_length": "mla_kv",
         "attention.value_length": "kv_lora", "attention.key_length_mla": "mla_head",
         "attention.value_length_mla": "head_dim", "attention.q_lora_rank": "q_lora",
         "attention.kv_lora_rank": "kv_lora", "rope.dimension_count": "rope_dim"},
        dense=_DENSE,
    ),
    "gpt-oss": Architecture(
        (*_GQA, *_GQA_BIAS, "attn_output.bias embd", "attn_sinks heads", "post_attention_norm embd"),
        (*_ROUTED, "ffn_gate_inp.bias experts", "ffn_gate_exps.bias ff,experts",
         "ffn_up_exps.bias ff,experts", "ffn_down_exps.bias embd,experts"),
        {**_GQA_KEYS, "expert_feed_forward_length": "ff", "attention.sliding_window": "window"},
    ),
    "glm4moe": Architecture(
        (*_GQA, *_GQA_BIAS, "post_attention_norm embd"), (*_ROUTED, "exp_probs_b.bias experts", *_SHARED),
        {**_GQA_KEYS, **_SIGMOID_KEYS}, dense=_DENSE,
    ),
    "dots1": Architecture(
        (*_GQA, "attn_q_norm head_dim", "attn_k_norm head_dim", "ffn_norm embd"),
        (*_ROUTED, "exp_probs_b.bias experts", *_SHARED),
        {**_GQA_KEYS, **_SIGMOID_KEYS}, dense=_DENSE, equal_heads=True, tiny={"kv_heads": 4},
    ),
    "granitemoe": Architecture(
        (*_GQA, "ffn_norm embd"), (*_ROUTED, *_SHARED),
        {**_GQA_KEYS, "feed_forward_length": "ff", "expert_shared_feed_forward_length": "shared_ff",
         "logit_scale": 1.0},
    ),
    "minimax-m2": Architecture(
        (*_GQA, "attn_q_norm q", "attn_k_norm kv", "ffn_norm embd"), (*_ROUTED, "exp_probs_b.bias experts"),
        {**_GQA_KEYS, "feed_forward_length": "ff", "expert_feed_forward_length": "ff",
         "expert_gating_func": 2},
    ),
    # Its router runs on the layer's input, before attention.
    "smallthinker": Architecture(
        (*_GQA, "ffn_norm embd"), _ROUTED,
        {**_GQA_KEYS, "expert_feed_forward_length": "ff", "expert_gating_func": 2},
    ),
}  # fmt: skip

# Gate and up as one tensor, which newer converters write and the loader tries first.
ARCHITECTURES["deepseek2-merged"] = replace(
    ARCHITECTURES["deepseek2"],
    experts=(*_MERGED, "exp_probs_b.bias experts", *_SHARED),
    known_as="deepseek2",
)


def find_architecture(name: str) -> Architecture:
    """Raises UsageError with the nearest names for one that is not in the table."""
    if name not in ARCHITECTURES:
        raise UsageError(f"unknown architecture {name!r}: {nearest(name, ARCHITECTURES)}")
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
                raise UsageError(f"unknown shape {key!r}: {nearest(key, SHAPES)}, or key=value pairs")
            shape = tiny if key == "tiny" else SHAPES[key]
        elif key not in known:
            raise UsageError(f"unknown key {key!r} in shape {text!r}: {nearest(key, known)}")
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


def model_keys(arch: str, shape: Shape) -> dict[str, int | float | bool]:
    """The metadata of the architecture, keys with their ``<arch>.``."""
    keys: dict[str, str | float | bool] = {
        "block_count": "layers", "context_length": "ctx", "embedding_length": "embd",
        "feed_forward_length": "dense_ff", "attention.head_count": "heads",
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "expert_count": "experts", "expert_used_count": "used", "vocab_size": "vocab",
        **find_architecture(arch).keys,
    }  # fmt: skip
    return {
        f"{llama_name(arch)}.{key}": getattr(shape, value) if isinstance(value, str) else value
        for key, value in keys.items()
    }


def _tensor(line: str, shape: Shape) -> tuple[str, tuple[int, ...]]:
    name, extents = line.split()
    suffix = "" if name.endswith(".bias") else ".weight"
    return name + suffix, tuple(getattr(shape, extent) for extent in extents.split(","))


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error's sentence: the names of ``known`` that ``word`` may have meant, or all of them."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.4)
    return "did you mean " + " or ".join(near) if near else "known are " + ", ".join(sorted(known))
