"""Numbers of a header that llama.cpp neither checks nor survives: it divides by them, takes all memory for them, or
asserts on them where a worker computes, which no load can fail of.

Found by ``tools/fuzz_header.py --load``; what llama.cpp checks or asserts while it loads is left to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from moestream.errors import ModelError
from moestream.model.types import Model, Value
from moestream.units import format_bytes

#: What llama.cpp divides by: 0 is a signal. Of a list for each layer some may be 0, but not all.
_DIVISORS = ("attention.head_count", "full_attention_interval", "attention.indexer.types")
#: 0 there is one too, of one architecture each: a division, or a pointer to what was not made.
_NEVER_0 = (
    "deepseek4.attention.output_group_count",
    "afmoe.attention.sliding_window",
    "llama4.attention.sliding_window",
)
#: The first layer whose attention llama4 scales by position; a graph without one has an input that nobody made.
_LLAMA4_SCALED = 4
#: Vectors that it adds and multiplies, on CPUs as F32 only.
_VECTOR = re.compile(r"norm|bias|_scale|sinks|ssm_")


def check_numbers(model: Model) -> None:
    """Raises ModelError for the first number that would end the process."""
    for complaint in _complaints(model):
        raise ModelError(
            f"{model.paths[0]}: {complaint}; the file is damaged or was made wrong: download it again"
        )


def _complaints(model: Model) -> Iterator[str]:
    for key, value in model.metadata.items():
        if key.endswith("_epsilon") and not (isinstance(value, float) and 0 <= value < math.inf):
            yield f"{key} is {value}, which no norm can be made with"
    for name in _DIVISORS:
        divisor = model.metadata.get(f"{model.arch}.{name}")
        if (
            divisor is not None
            and not _any(divisor)
            and any(".attn_" in tensor.name for tensor in model.tensors)
        ):
            yield f"{model.arch}.{name} is 0, and its layers have attention"
    for key in _NEVER_0:
        if model.metadata.get(key) == 0:
            yield f"{key} is 0, which this architecture cannot be"
    if model.arch == "llama4" and model.n_layers < _LLAMA4_SCALED:
        yield f"llama4.block_count is {model.n_layers}, and llama.cpp computes none with fewer than {_LLAMA4_SCALED}"
    names = {tensor.name for tensor in model.tensors}
    pattern = model.metadata.get(f"{model.arch}.attention.sliding_window_pattern")
    for layer, slides in enumerate(pattern if isinstance(pattern, tuple) else ()):
        # Only where all layers that see everything choose what they see: llama.cpp takes the tensor for granted.
        if model.arch == "dots3note" and not slides and f"blk.{layer}.indexer.attn_q_b.weight" not in names:
            yield f"layer {layer} is no sliding one and has no indexer"
    yield from _groups_without_chunks(model)
    state = _state_bytes(model)
    if state > model.bytes:
        yield (
            f"by its {model.arch}.ssm, kda and shortconv numbers one sequence's state would take "
            f"{format_bytes(state)}, more than the whole model ({format_bytes(model.bytes)})"
        )
    for tensor in model.tensors:
        if len(tensor.shape) == 1 and tensor.type_name != "f32" and _VECTOR.search(tensor.name):
            yield f"tensor {tensor.name} is {tensor.type_name}, and llama.cpp computes with such vectors as f32 only"


def _groups_without_chunks(model: Model) -> Iterator[str]:
    """The chunk expert of an expert is the number of its group, which must be there: the last group may be a part."""
    key = f"{model.arch}.experts_per_group"
    size = model.metadata.get(key)
    for routed, chunks in pairwise(model.banks):
        if chunks.kind != "chunk" or not isinstance(size, int):
            continue
        if routed.count > size * chunks.count:
            has = f"layer {routed.layer} has {chunks.count} chunk experts for {routed.count} experts"
            yield f"{has} and {key} is {size}"


def _any(value: Value) -> bool:
    return any(value) if isinstance(value, tuple) else bool(value)


def _state_bytes(model: Model) -> int:
    """What recurrent layers keep of one sequence, at most; llama.cpp allocates it even when it only tries."""

    def number(name: str) -> int:
        value = model.metadata.get(f"{model.arch}.{name}")
        largest = max(value, default=0) if isinstance(value, tuple) else value
        return largest if isinstance(largest, int) else 0

    inner, state = number("ssm.inner_size"), number("ssm.state_size")
    width = inner + 2 * number("ssm.group_count") * state
    heads = number("kda.head_dim") ** 2 * number("attention.head_count")
    floats = (
        inner * state + number("ssm.conv_kernel") * width + heads + number("shortconv.l_cache") * model.n_embd
    )
    return 4 * floats * model.n_layers
