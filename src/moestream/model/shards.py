"""The files of a model: any one of them leads to all, and each is whole and in its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moestream.errors import ModelError
from moestream.model.ggml import Header, read_header
from moestream.model.header import check_file
from moestream.unchanged import Stamp, stamp

MAX_SHARDS = 99_999  # the names have five digits
#: llama.cpp maps tensors as they lie, and ends the process where a file's first does not begin at a multiple of this.
_FIRST_TENSOR_ALIGNMENT = 32
#: llama.cpp reads these as these types; a later shard's number it does not even look at before.
_SPLIT_TYPES = {"split.no": "u16", "split.count": "u16", "split.tensors.count": "i32"}
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class File:
    """One file of a model. ``stamp``: what its file system said of it before the header was read."""

    path: Path
    bytes: int
    header: Header
    stamp: Stamp | None

    def number(self, key: str) -> int | None:
        """An integer of the metadata, or None when it is missing or something else."""
        value = self.header.metadata.get(key)
        return value if isinstance(value, int) else None


def find_shards(path: Path) -> tuple[File, ...]:
    """All files of the model that ``path`` is a file of, in order. Raises ModelError for what is not whole, and for
    missing and mixed-up shards."""
    given = _open(path)
    count = given.number("split.count") or 1
    if count == 1:
        _check_alone(given)
        return (given,)
    number = given.number("split.no")
    if count < 0 or count > MAX_SHARDS or number is None or not 0 <= number < count:
        raise ModelError(
            f"{given.path}: split.no {number} and split.count {count} make no sense; download it again"
        )
    given, paths = _siblings(given, number, count)
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ModelError(f"{given.path}: {len(missing)} of {count} shards missing beside it: {listed}")
    files = tuple(given if path == given.path else _open(path) for path in paths)
    for index, file in enumerate(files):
        _check_place(file, index, count, files[0])
    return files


def _open(path: Path) -> File:
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
    _refuse_misaligned(path, header)
    return File(path, size, header, before)


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


def _refuse_misaligned(path: Path, header: Header) -> None:
    begin = min((tensor.offset for tensor in header.tensors), default=0)
    if begin % _FIRST_TENSOR_ALIGNMENT:
        raise ModelError(
            f"{path}: its tensors begin at byte {begin}, and llama.cpp needs a multiple of "
            f"{_FIRST_TENSOR_ALIGNMENT}: general.alignment is {header.alignment}; convert it with 32"
        )


def _check_alone(file: File) -> None:
    """Raises ModelError for a shard whose header says that it is the whole model."""
    if "split.count" in file.header.types:
        _check_types(file, ("split.count",))
    name = _SHARD_NAME.fullmatch(file.path.name)
    total = file.number("split.tensors.count")
    if name and int(name[3]) > 1 and total not in (None, len(file.header.tensors)):
        raise ModelError(
            f"{file.path}: its name says {int(name[3])} shards and split.tensors.count {total} tensors, but its "
            f"split.count is {file.header.metadata.get('split.count', 'missing')}; split the model again"
        )


def _check_types(file: File, keys: Iterable[str]) -> None:
    for key in keys:
        found, wanted = file.header.types.get(key), _SPLIT_TYPES[key]
        if found != wanted:
            said = f"of type {found}" if found else "missing"
            raise ModelError(f"{file.path}: {key} is {said}, llama.cpp reads {wanted}; split the model again")


def _siblings(given: File, number: int, count: int) -> tuple[File, list[Path]]:
    """A shard and where the ``count`` shards of its model should be. The name given comes first, then what it is a link
    to: the first place where all of them are, else the first whose name is a shard's."""
    named = [(path, name) for path in _behind(given.path) if (name := _SHARD_NAME.fullmatch(path.name))]
    if not named:
        raise ModelError(
            f"{given.path}: is shard {number + 1} of {count}; "
            f"rename it and its siblings to NAME-{number + 1:05}-of-{count:05}.gguf"
        )
    path, name = named[0]
    if int(name[3]) != count:
        raise ModelError(
            f"{path}: its name says {int(name[3])} shards, its split.count {count}: mixed-up shards"
        )
    places = [
        (path, [path.with_name(f"{name[1]}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)])
        for path, name in named
    ]
    path, paths = next((place for place in places if all(shard.exists() for shard in place[1])), places[0])
    return replace(given, path=path), paths


def _behind(path: Path) -> Iterator[Path]:
    """A path that can be opened, and what it is a link to, link after link."""
    yield path
    while path.is_symlink():
        target = path.parent / path.readlink()
        path = target.parent.resolve() / target.name
        yield path


def _check_place(file: File, index: int, count: int, first: File) -> None:
    """Raises ModelError unless a file is shard ``index`` of the model that ``first`` begins."""
    if file.number("split.no") != index or file.number("split.count") != count:
        number, of = file.number("split.no"), file.number("split.count")
        said = "no shard at all" if number is None or of is None else f"shard {number + 1} of {of}"
        raise ModelError(
            f"{file.path}: mixed-up shards: its name says {index + 1} of {count}, its header {said}"
        )
    _check_types(file, ("split.no",) if index else _SPLIT_TYPES)
    for key in ("split.tensors.count", "general.architecture"):
        mine, theirs = file.header.metadata.get(key), first.header.metadata.get(key)
        if mine is not None and theirs is not None and mine != theirs:
            raise ModelError(
                f"{file.path}: mixed-up shards: {key} is {mine!r} here and {theirs!r} in {first.path.name}"
            )
