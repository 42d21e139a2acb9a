"""From a path to a Model: all shards found, checked against each other, and their experts listed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moestream.errors import ModelError
from moestream.model.experts import find_banks
from moestream.model.ggml import Header, read_header
from moestream.model.header import check_file
from moestream.model.types import Model, Shard, Tensor, Value
from moestream.model.weights import Weights
from moestream.unchanged import Stamp, stamp

MAX_SHARDS = 99_999  # the names have five digits
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class _File:
    path: Path
    bytes: int
    header: Header
    stamp: Stamp | None

    def number(self, key: str) -> int | None:
        """An integer of the metadata, or None when it is missing or something else."""
        value = self.header.metadata.get(key)
        return value if isinstance(value, int) else None


def read_model(path: str | Path) -> Model:
    """Reads the headers of the model that ``path`` is a file of; any shard of a split model will do.

    Opens files for reading only, and reads no tensor's data. Raises ModelError, with the path and what to do, for
    anything that is not a complete model; AbiError when llama.cpp's libraries cannot be found.
    """
    files = _all_shards(_open(Path(path)))
    tensors = _all_tensors(files)
    first = files[0].header
    arch = first.metadata.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise ModelError(f"{files[0].path}: has no general.architecture; convert the model again")
    banks = find_banks(tensors, arch, first.metadata, str(files[0].path))
    routed = [bank for bank in banks if bank.kind == "routed"]
    name = first.metadata.get("general.name")
    n_layers = _number(first.metadata, f"{arch}.block_count") or _blocks(tensors)
    shards = tuple(Shard(file.path, file.bytes, file.header.data_offset) for file in files)
    return Model(
        shards=shards,
        arch=arch,
        name=name if isinstance(name, str) and name else files[0].path.stem,
        metadata=first.metadata,
        tensors=tensors,
        banks=banks,
        n_layers=n_layers,
        n_experts=max((bank.count for bank in routed), default=0),
        n_experts_used=max((bank.used for bank in routed), default=0),
        n_ctx_train=_number(first.metadata, f"{arch}.context_length"),
        n_embd=_number(first.metadata, f"{arch}.embedding_length"),
        n_vocab=_vocabulary(first, arch, tensors),
        n_mtp_layers=min(_number(first.metadata, f"{arch}.nextn_predict_layers"), n_layers),
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


def _vocabulary(header: Header, arch: str, tensors: tuple[Tensor, ...]) -> int:
    """Tokens: as many as the tokenizer has; without one what the key or the embedding says."""
    count = header.array_lengths.get("tokenizer.ggml.tokens") or _number(
        header.metadata, f"{arch}.vocab_size"
    )
    if count:
        return count
    shapes = (tensor.shape for tensor in tensors if tensor.name == "token_embd.weight")
    return next((shape[1] for shape in shapes if len(shape) > 1), 0)


def _open(path: Path) -> _File:
    """One file, its header read and its data known to be complete."""
    check_file(path)
    before = stamp(path)
    header = read_header(path)
    size = path.stat().st_size
    end = max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=header.data_offset)
    if size < end:
        raise ModelError(
            f"{path}: is truncated in the tensor data, short by {end - size} bytes; download it again"
        )
    _refuse_joined(path, size, end, header)
    return _File(path, size, header, before)


def _refuse_joined(path: Path, size: int, end: int, header: Header) -> None:
    """Refuses shards that were put into one file with cat: llama.cpp would see only the first of them."""
    padded = -(-end // header.alignment) * header.alignment
    with path.open("rb") as file:
        for offset in {end, padded}:
            file.seek(offset)
            if offset < size and file.read(4) == b"GGUF":
                raise ModelError(
                    f"{path}: holds a second GGUF at byte {offset}: shards joined with cat; keep them as "
                    "separate files NAME-00001-of-0000N.gguf, or merge them with llama-gguf-split --merge"
                )


def _all_shards(given: _File) -> tuple[_File, ...]:
    """All files of the model in order. Raises ModelError for missing and mixed-up shards."""
    count = given.number("split.count") or 1
    if count == 1:
        return (given,)
    name = _SHARD_NAME.fullmatch(given.path.name)
    number = given.number("split.no")
    if count < 0 or count > MAX_SHARDS or number is None or not 0 <= number < count:
        raise ModelError(
            f"{given.path}: split.no {number} and split.count {count} make no sense; download it again"
        )
    if name is None:
        raise ModelError(
            f"{given.path}: is shard {number + 1} of {count}; "
            f"rename it and its siblings to NAME-{number + 1:05}-of-{count:05}.gguf"
        )
    if int(name[3]) != count:
        raise ModelError(
            f"{given.path}: its name says {int(name[3])} shards, its split.count {count}: mixed-up shards"
        )
    paths = [given.path.with_name(f"{name[1]}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ModelError(f"{given.path}: {len(missing)} of {count} shards missing beside it: {listed}")
    files = tuple(given if path == given.path else _open(path) for path in paths)
    for index, file in enumerate(files):
        _check_place(file, index, count, files[0])
    return files


def _check_place(file: _File, index: int, count: int, first: _File) -> None:
    """Raises ModelError unless a file is shard ``index`` of the model that ``first`` begins."""
    if file.number("split.no") != index or file.number("split.count") != count:
        number, of = file.number("split.no"), file.number("split.count")
        said = "no shard at all" if number is None or of is None else f"shard {number + 1} of {of}"
        raise ModelError(
            f"{file.path}: mixed-up shards: its name says {index + 1} of {count}, its header {said}"
        )
    for key in ("split.tensors.count", "general.architecture"):
        mine, theirs = file.header.metadata.get(key), first.header.metadata.get(key)
        if mine is not None and theirs is not None and mine != theirs:
            raise ModelError(
                f"{file.path}: mixed-up shards: {key} is {mine!r} here and {theirs!r} in {first.path.name}"
            )


def _all_tensors(files: tuple[_File, ...]) -> tuple[Tensor, ...]:
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
