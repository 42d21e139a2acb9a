"""What the program knows of a model, as plain values: where every byte is, and which of them are experts.

Nothing here reads a file, and nothing here knows what llama.cpp will do with the tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moestream.model.weights import Weights
    from moestream.unchanged import Stamp

Scalar = str | int | float | bool
Value = Scalar | tuple[int | float | bool, ...]


@dataclass(frozen=True)
class Shard:
    """One file of the model. ``data_offset``: bytes from the start of the file to its tensor data."""

    path: Path
    bytes: int
    data_offset: int


@dataclass(frozen=True)
class Tensor:
    """One tensor. ``shape`` is in ggml's order (ne0 first, trailing ones dropped); ``offset`` counts from the
    start of the file of shard number ``shard``."""

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor that holds a slab for each expert of a bank: slab e is the ``slab_bytes`` bytes at
    ``offset + e * slab_bytes`` of the shard's file.

    ``role`` is gate_up, gate, up or down, with ``chunk_`` before it in a chunk bank.
    """

    name: str
    layer: int
    role: str
    bank: int
    shard: int
    offset: int
    slab_bytes: int
    count: int
    type_name: str


@dataclass(frozen=True)
class Bank:
    """The experts one routing decision chooses from: ``used`` of ``count``, each owning one slab in every
    tensor.

    ``kind`` is ``routed`` or ``chunk``; ``tensors`` are in the order the matmuls use them: gate_up, gate, up,
    down.
    """

    index: int
    layer: int
    kind: str
    count: int
    used: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: its slabs together."""
        return sum(tensor.slab_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Model:
    """A whole model, all shards of it, as its header describes it.

    ``metadata`` holds scalars, and arrays of at most 4096 numbers as tuples; never the tokenizer's arrays.
    ``n_experts`` and ``n_experts_used`` are the largest over the routed banks, 0 for a dense model.
    ``n_layers`` counts all blocks, the last ``n_mtp_layers`` of which are multi-token-prediction heads that
    ordinary decoding does not run. ``weights``: what tells models of one header apart; None: nothing is known.
    """

    shards: tuple[Shard, ...]
    arch: str
    name: str
    metadata: dict[str, Value] = field(hash=False, repr=False)
    tensors: tuple[Tensor, ...] = field(repr=False)
    banks: tuple[Bank, ...] = field(repr=False)
    n_layers: int
    n_experts: int
    n_experts_used: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_mtp_layers: int = 0
    weights: Weights | None = None
    overrides: dict[str, Value] = field(default_factory=dict, hash=False)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The shards' paths in order; llama.cpp is to be given the first."""
        return tuple(shard.path for shard in self.shards)

    @property
    def stamps(self) -> dict[Path, Stamp | None]:
        """The shards' files as they were just before their headers were read."""
        taken = self.weights.stamps if self.weights is not None else (None,) * len(self.shards)
        return dict(zip(self.paths, taken, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def expert_bytes(self) -> int:
        """Bytes that are slabs."""
        return sum(bank.expert_bytes * bank.count for bank in self.banks)

    @property
    def dense_bytes(self) -> int:
        """All bytes that are not slabs."""
        return self.bytes - self.expert_bytes

    @property
    def is_moe(self) -> bool:
        return bool(self.banks)

    @property
    def demand_bytes_per_token(self) -> int:
        """Expert bytes one decoded token's matmuls read: ``used`` experts of every bank that decoding
        runs."""
        last = self.n_layers - self.n_mtp_layers
        return sum(bank.used * bank.expert_bytes for bank in self.banks if bank.layer < last)

    def tensor_at(self, shard: int, offset: int) -> str:
        """The name of the tensor that has this byte of a shard's file."""
        holders = (t.name for t in self.tensors if t.shard == shard and 0 <= offset - t.offset < t.nbytes)
        return next(holders, "no tensor")

    @property
    def identity(self) -> str:
        """16 hex digits over the sizes of the shards, every tensor's name, type, shape and place, and samples of the
        weights: the same wherever the file lies, different for another quantization, split, seed or training.

        The samples are read when it is first asked for. Raises ModelError where that is too late (``Weights``)."""
        sizes = [shard.bytes for shard in self.shards]
        samples = self.weights.digest if self.weights is not None else ""
        digest = hashlib.sha256(f"{self.arch}\n{sizes}\n{samples}\n".encode())
        for t in self.tensors:
            line = f"{t.name} {t.type_id} {t.shape} {t.shard} {t.offset} {t.nbytes}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]
