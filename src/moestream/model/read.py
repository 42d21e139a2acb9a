"""From a path to a Model: the tensors of all its shards together, and which of them hold experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from moestream.errors import ModelError
from moestream.model.experts import find_banks
from moestream.model.ggml import Header
from moestream.model.overrides import naming, overridden
from moestream.model.shards import File, find_shards
from moestream.model.types import Model, Shard, Tensor, Value
from moestream.model.weights import Weights


def read_model(path: str | Path, overrides: Mapping[str, Value] | None = None) -> Model:
    """Reads the headers of the model that ``path`` is a file of; any shard of a split model will do. ``overrides``:
    values that count instead of the header's, as llama.cpp's ``kv_overrides``.

    Opens files for reading only, and reads no tensor's data. Raises ModelError, with the path and what to do, for
    anything that is not a complete model; AbiError when llama.cpp's libraries cannot be found; UsageError for an
    override that says nothing.
    """
    files = find_shards(Path(path))
    with naming(overrides):
        return _model(files, overrides or {})


def _model(files: tuple[File, ...], overrides: Mapping[str, Value]) -> Model:
    tensors = _all_tensors(files)
    first = files[0].header
    metadata = overridden(first.metadata, first.types, overrides)
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise ModelError(f"{files[0].path}: has no general.architecture; convert the model again")
    banks = find_banks(tensors, arch, metadata, str(files[0].path))
    routed = [bank for bank in banks if bank.kind == "routed"]
    name = metadata.get("general.name")
    n_layers = _number(metadata, f"{arch}.block_count") or _blocks(tensors)
    shards = tuple(Shard(file.path, file.bytes, file.header.data_offset) for file in files)
    return Model(
        shards=shards,
        arch=arch,
        name=name if isinstance(name, str) and name else files[0].path.stem,
        metadata=metadata,
        overrides=dict(overrides),
        tensors=tensors,
        banks=banks,
        n_layers=n_layers,
        n_experts=max((bank.count for bank in routed), default=0),
        n_experts_used=max((bank.used for bank in routed), default=0),
        n_ctx_train=_number(metadata, f"{arch}.context_length"),
        n_embd=_number(metadata, f"{arch}.embedding_length"),
        n_vocab=_vocabulary(first, metadata, arch, tensors),
        n_mtp_layers=min(_number(metadata, f"{arch}.nextn_predict_layers"), n_layers),
        weights=Weights(shards, tensors, tuple(file.stamp for file in files)),
    )


def _number(metadata: dict[str, Value], key: str) -> int:
    """An integer of the metadata, 0 when it is missing; the largest where there is one for each layer."""
    value = metadata.get(key)
    if isinstance(value, tuple):
        value = max(value, default=0)
    return value if isinstance(value, int) else 0


def _blocks(tensors: tuple[Tensor, ...]) -> int:
    found = (re.match(r"blk\.(\d+)\.", tensor.name) for tensor in tensors)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _vocabulary(header: Header, metadata: dict[str, Value], arch: str, tensors: tuple[Tensor, ...]) -> int:
    """Tokens: as many as the tokenizer has; without one what the key or the embedding says."""
    count = header.array_lengths.get("tokenizer.ggml.tokens") or _number(metadata, f"{arch}.vocab_size")
    if count:
        return count
    shapes = (tensor.shape for tensor in tensors if tensor.name == "token_embd.weight")
    return next((shape[1] for shape in shapes if len(shape) > 1), 0)


def _all_tensors(files: tuple[File, ...]) -> tuple[Tensor, ...]:
    """The tensors of all shards in file order. Raises ModelError for none, duplicates and a wrong total."""
    tensors: list[Tensor] = []
    owner: dict[str, Path] = {}
    for shard, file in enumerate(files):
        for t in file.header.tensors:
            if t.name in owner:
                raise ModelError(
                    f"{file.path}: mixed-up shards: tensor {t.name} is also in {owner[t.name].name}"
                )
            owner[t.name] = file.path
            tensors.append(Tensor(t.name, t.type_id, t.type_name, t.shape, shard, t.offset, t.nbytes))
    if not tensors:
        raise ModelError(
            f"{files[0].path}: has 0 tensors: metadata or a vocabulary only; get the whole model"
        )
    total = files[0].number("split.tensors.count")
    if len(files) > 1 and total is not None and total != len(tensors):
        raise ModelError(
            f"{files[0].path}: mixed-up shards: split.tensors.count says {total} tensors, "
            f"the {len(files)} shards hold {len(tensors)}"
        )
    return tuple(tensors)
