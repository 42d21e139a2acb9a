"""A model that computes what another computes for a token, with few enough experts to fit in memory.

The dense part is the model's own, tensor for tensor. Of each layer's experts the first so many are kept, two tokens'
worth, and as many rows of its router: each token does the same work on as many bytes. What it says means nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moestream.errors import RefusedError
from moestream.make.output import Progress, TensorSource, TensorSpec, write_model
from moestream.model import Model
from moestream.model.types import Tensor

if TYPE_CHECKING:
    import gguf

_CHUNK = 8 << 20
#: Sets of one token's experts that are kept.
SETS = 2
#: Of a layer's tensors that are no slabs, those with an extent for its experts.
_PER_EXPERT = ("_exps.", "ffn_gate_inp.", "exp_probs_b")


@dataclass(frozen=True)
class Cut:
    """A tensor of the smaller model: the first ``nbytes`` bytes of one of the model's, in another shape."""

    tensor: Tensor
    shape: tuple[int, ...]
    nbytes: int


def kept_experts(model: Model) -> int:
    """How many experts of each layer the smaller model has. Raises RefusedError where layers cannot be cut alike."""
    counts = {(bank.count, bank.used, bank.kind) for bank in model.banks}
    if len(counts) != 1 or next(iter(counts))[2] != "routed":
        raise RefusedError(
            "its layers differ in their experts, so no smaller model of the same work can be made"
        )
    count, used, _ = counts.pop()
    # Where experts are chosen by groups, every group keeps as many.
    groups = model.metadata.get(f"{model.arch}.expert_group_count", 1)
    step = groups if isinstance(groups, int) and groups > 1 else 1
    return min(count, -(-SETS * used // step) * step)


def cut_tensors(model: Model) -> list[Cut]:
    """Every tensor of the smaller model, in the model's order."""
    kept = kept_experts(model)
    slabs = {tensor.name: tensor for bank in model.banks for tensor in bank.tensors}
    cuts = []
    for tensor in model.tensors:
        shape, nbytes = tensor.shape, tensor.nbytes
        if tensor.name in slabs:
            shape, nbytes = (*shape[:-1], kept), kept * slabs[tensor.name].slab_bytes
        elif any(part in tensor.name for part in _PER_EXPERT) and shape[-1:] == (model.n_experts,):
            shape, nbytes = (*shape[:-1], kept), nbytes // model.n_experts * kept
        cuts.append(Cut(tensor, shape, nbytes))
    return cuts


def shrunk_bytes(model: Model) -> int:
    """About the bytes of the smaller model."""
    return sum(cut.nbytes for cut in cut_tensors(model)) + model.shards[0].data_offset


def write_shrunk(model: Model, out: Path, progress: Progress | None = None) -> Path:
    """Write the smaller model to ``out``. Raises RefusedError where there is no room; nothing is then left."""
    import gguf

    free = shutil.disk_usage(out.parent).free
    if free < 2 * shrunk_bytes(model):
        raise RefusedError(f"{out.parent} has no room to spare for a smaller model: free some space")
    reader = gguf.GGUFReader(model.paths[0])
    kept = kept_experts(model)

    def add_metadata(writer: gguf.GGUFWriter) -> None:
        for key, value, kinds in _metadata(reader, model.arch, kept):
            writer.add_key_value(key, value, kinds[0], sub_type=kinds[1])

    sources: list[TensorSource] = [
        (TensorSpec(cut.tensor.name, cut.shape, cut.tensor.type_id), partial(_chunks, model, cut))
        for cut in cut_tensors(model)
    ]
    return write_model(out, model.arch, add_metadata, sources, progress)


def _metadata(reader: Any, arch: str, kept: int) -> Iterator[tuple[str, Any, tuple[Any, Any]]]:
    """The model's keys and values, the writer's own and the split's left out."""
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "split.")) or name in ("general.architecture", "general.alignment"):
            continue
        value = kept if name == f"{arch}.expert_count" else field.contents()
        yield name, value, (field.types[0], field.types[1] if len(field.types) > 1 else None)


def _chunks(model: Model, cut: Cut) -> Iterator[npt.NDArray[np.uint8]]:
    with model.paths[cut.tensor.shard].open("rb", buffering=0) as file:
        file.seek(cut.tensor.offset)
        left = cut.nbytes
        while left:
            block = file.read(min(_CHUNK, left))
            if not block:
                raise RefusedError(f"{model.paths[cut.tensor.shard]} ended inside {cut.tensor.name}")
            left -= len(block)
            yield np.frombuffer(block, dtype=np.uint8)
