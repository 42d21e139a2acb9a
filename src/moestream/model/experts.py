"""Which tensors hold experts: the banks of a model, from tensor names and shapes.

Keys in GGUF files can be missing or lie, so which layers have experts and how many comes from the tensors;
only how many experts a token uses is the metadata's word. Biases, scales, routers and shared experts are
dense.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from moestream.errors import ModelError
from moestream.model.ggml import binding_version
from moestream.model.types import Bank, ExpertTensor, Tensor, Value

# ggml visits a node's sources in order and the activation takes (gate, up): gate is multiplied before up.
ROLE_ORDER = ("gate_up", "gate", "up", "down")
KIND_ORDER = ("routed", "chunk")
#: llama.cpp's LLAMA_MAX_EXPERTS: it ends the process over one more.
MOST_EXPERTS = 1024

# Both ends are anchored: "_exps.bias" and "_exps.scale" (any architecture), "ffn_norm_exps" (arctic) are
# dense.
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_(ch|)exps\.weight")
_ONE_TENSOR_AN_EXPERT = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)\.\d+\.weight")
_OTHER_FORK = re.compile(r"blk\.\d+\.ffn_up_gate_exps\.weight")


def find_banks(
    tensors: Iterable[Tensor], arch: str, metadata: dict[str, Value], where: str
) -> tuple[Bank, ...]:
    """The banks in layer order, routed before chunk, numbered from 0; empty for a dense model.

    ``where`` names the file in errors. Raises ModelError for layouts llama.cpp cannot load (one tensor an
    expert, another fork's order), for banks whose tensors disagree or are incomplete, and for a mixture of
    experts whose metadata does not say how many experts a token uses.
    """
    groups: dict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        _refuse_foreign_layout(tensor.name, where)
        match = _EXPERTS.fullmatch(tensor.name)
        if match:
            kind = 1 if match[3] else 0
            groups[int(match[1]), kind][match[2]] = tensor
    banks = []
    for index, ((layer, kind), by_role) in enumerate(sorted(groups.items())):
        label = f"{where}: layer {layer}"
        count = _experts_of(by_role, label)
        _check_axes(by_role, label)
        if kind == 0:
            _check_count(count, arch, metadata, label)
        used = _experts_used(layer, count, kind, arch, metadata, label)
        prefix = "chunk_" if kind else ""
        members = tuple(
            ExpertTensor(
                name=by_role[role].name,
                layer=layer,
                role=prefix + role,
                bank=index,
                shard=by_role[role].shard,
                offset=by_role[role].offset,
                slab_bytes=by_role[role].nbytes // count,
                count=count,
                type_name=by_role[role].type_name,
            )
            for role in ROLE_ORDER
            if role in by_role
        )
        banks.append(Bank(index, layer, KIND_ORDER[kind], count, used, members))
    return tuple(banks)


def _refuse_foreign_layout(name: str, where: str) -> None:
    if _ONE_TENSOR_AN_EXPERT.fullmatch(name):
        raise ModelError(
            f"{where}: has one tensor for each expert ({name}), the layout of Mixtral files from before "
            "April 2024 that llama.cpp no longer loads; get a newer conversion of the model"
        )
    if _OTHER_FORK.fullmatch(name):
        raise ModelError(
            f"{where}: {name} has up before gate, the order of ik_llama.cpp that llama.cpp does not load; "
            "get the model as llama.cpp's own converter writes it"
        )


def _experts_of(by_role: dict[str, Tensor], label: str) -> int:
    """Experts of one bank. Raises ModelError unless its tensors form one loadable set."""
    if "gate_up" in by_role and ("gate" in by_role or "up" in by_role):
        raise ModelError(f"{label} has its gate and up experts both fused and separate; convert it again")
    for needed in ("down", "up"):
        if needed not in by_role and not (needed == "up" and "gate_up" in by_role):
            names = ", ".join(tensor.name for tensor in by_role.values())
            raise ModelError(f"{label} has {names} but no {needed} experts; a shard or a tensor is missing")
    counts = {}
    for tensor in by_role.values():
        if len(tensor.shape) != 3 or tensor.nbytes == 0:
            raise ModelError(
                f"{label}: {tensor.name} has shape {tensor.shape}, not (inputs, outputs, experts)"
            )
        counts[tensor.name] = tensor.shape[2]
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ModelError(f"{label}: its expert tensors disagree on the number of experts: {listed}")
    return next(iter(counts.values()))


def _check_axes(by_role: dict[str, Tensor], label: str) -> None:
    """Raises ModelError unless what goes into an expert comes out of it, through as many values between."""
    width, between = by_role["down"].shape[1], by_role["down"].shape[0]
    for role, tensor in by_role.items():
        expected = (width, 2 * between if role == "gate_up" else between)
        if role != "down" and tensor.shape[:2] != expected:
            raise ModelError(
                f"{label}: {tensor.name} is {tensor.shape[0]} x {tensor.shape[1]} and {by_role['down'].name} "
                f"{between} x {width}: with the latter it would be {expected[0]} x {expected[1]}; convert it again"
            )


def _check_count(count: int, arch: str, metadata: dict[str, Value], label: str) -> None:
    """Raises ModelError unless a routed bank has as many experts as llama.cpp will think, and no more than it takes."""
    key = f"{arch}.expert_count"
    if key not in metadata:
        raise ModelError(f"{label} has {count} experts but the key {key} is missing; convert it again")
    if metadata[key] != count:
        raise ModelError(f"{label} has {count} experts but {key} says {metadata[key]!r}; convert it again")
    if count > MOST_EXPERTS:
        raise ModelError(
            f"{label} has {count} experts, more than the {MOST_EXPERTS} that {binding_version()} takes; "
            "take a model with fewer"
        )


def _experts_used(
    layer: int, count: int, kind: int, arch: str, metadata: dict[str, Value], label: str
) -> int:
    """Experts one token uses in one bank; the key is a number, or an array with one for each layer."""
    key = f"{arch}.expert_used_count"
    value = metadata.get(key)
    if value is None:
        raise ModelError(f"{label} has experts but the key {key} is missing; convert the model again")
    if isinstance(value, tuple):
        if layer >= len(value):
            raise ModelError(
                f"{label} has experts but {key} covers only {len(value)} layers; convert it again"
            )
        value = value[layer]
    # Several routed experts can share a chunk expert, so a token uses at most all of the chunks.
    limit = count if kind == 0 else None
    if not isinstance(value, int) or value < 1 or (limit is not None and value > limit):
        raise ModelError(f"{label} has {count} experts but {key} says {value!r}; convert the model again")
    return min(value, count)
