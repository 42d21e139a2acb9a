"""Files an experiment needs beside the model: one in another quantisation, one whose tensors begin on pages.

They are made in the ``lab`` directory of the user's cache, named after the model's identity, kept for the next
experiment, and removed by ``lab clean``. The model itself is only read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestream.box import cache_directory
from moestream.errors import RefusedError
from moestream.model import Model
from moestream.units import format_bytes

if TYPE_CHECKING:
    from moestream.make.output import Progress, TensorSource

PAGE = 4096
#: Bits of a weight of the two types experts are made anew in, scales included; the one that differs more is taken.
_Q8_0, _Q4_0 = ("Q8_0", 8.5), ("Q4_0", 4.5)
#: Beside the tensors: the header, and what is left for everybody else.
_ROOM = 256 << 20
#: Rows dequantised at a time: some MB as floats.
_CHUNK_FLOATS = 1 << 22


def directory() -> Path:
    return cache_directory() / "lab"


def path_of(model: Model, kind: str) -> Path:
    """Where the file of that kind is, or would be."""
    if kind == "model":
        return model.paths[0]
    return directory() / f"{model.identity}-{kind}.gguf"


def bytes_needed(model: Model, kinds: Iterable[str]) -> int:
    """Of disk, for those of the kinds that are not there yet."""
    return sum(_size(model, kind) for kind in dict.fromkeys(kinds) if not path_of(model, kind).exists())


def check_room(model: Model, kinds: Sequence[str], copies: int = 0) -> None:
    """Raises RefusedError where the cache directory's disk has no room for the kinds that are not there yet, and for
    ``copies`` of the model at a time."""
    needed = bytes_needed(model, kinds) + copies * model.bytes
    if not needed:
        return
    place = directory()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed + _ROOM:
        raise RefusedError(
            f"the files this needs take {format_bytes(needed)} and {directory()} has {format_bytes(free)} free: "
            "free some space, or set XDG_CACHE_HOME to a directory on a larger disk"
        )


def make(model: Model, kind: str, progress: Progress | None = None) -> Path:
    """The file of that kind, made if it is not there. Raises RefusedError, and leaves nothing behind, without room or
    for experts of a type that nobody here can take apart."""
    path = path_of(model, kind)
    if path.exists():
        return path
    from moestream.make.output import copy_metadata, write_model

    sources, readers = _sources(
        model, partial(_requantized, target=_target(model)) if kind == "requantized" else None
    )

    def add_metadata(writer: Any) -> None:
        split = {key: None for key in readers[0].fields if key.startswith("split.")}
        copy_metadata(readers[0], writer, {**split, "general.alignment": None})
        if kind == "aligned":
            writer.add_custom_alignment(PAGE)

    return write_model(path, model.arch, add_metadata, sources, progress)


def clean() -> list[tuple[Path, int]]:
    """Remove every file that was made here, unfinished ones too; what was removed, with its bytes."""
    removed = []
    for path in sorted([*directory().glob("*.gguf"), *directory().glob(".*.gguf.*.partial")]):
        try:
            size = path.lstat().st_size
            path.unlink()
        except OSError as error:
            raise RefusedError(
                f"{path} cannot be removed ({error.strerror or error}): remove it yourself"
            ) from None
        removed.append((path, size))
    return removed


def _sources(
    model: Model, change: Callable[[Any, TensorSource], TensorSource] | None
) -> tuple[list[TensorSource], list[Any]]:
    """Every tensor as it is, expert tensors changed; and the readers of the shards, in order."""
    import gguf

    from moestream.make.output import TensorSpec

    experts = {tensor.name for bank in model.banks for tensor in bank.tensors}
    readers = [gguf.GGUFReader(path) for path in model.paths]
    sources: list[TensorSource] = []
    for reader in readers:
        for tensor in reader.tensors:
            spec = TensorSpec(tensor.name, tuple(int(n) for n in tensor.shape), int(tensor.tensor_type))
            source: TensorSource = (spec, partial(_as_it_is, tensor))
            sources.append(
                change(tensor, source) if change is not None and tensor.name in experts else source
            )
    return sources, readers


def _as_it_is(tensor: Any) -> Iterator[Any]:
    """A tensor's bytes, some MB at a time: the reader maps the file."""
    import numpy as np

    raw = tensor.data.reshape(-1).view(np.uint8)
    for start in range(0, raw.nbytes, _CHUNK_FLOATS):
        yield np.ascontiguousarray(raw[start : start + _CHUNK_FLOATS])


def _target(model: Model) -> str:
    """The type experts are made anew in: eight bits, or four where they have about eight or more."""
    return _Q8_0[0] if _bits(model) < _Q8_0[1] - 1 else _Q4_0[0]


def _bits(model: Model) -> float:
    """Bits of an expert's weight."""
    experts = {tensor.name for bank in model.banks for tensor in bank.tensors}
    weights = bytes_ = 0
    for tensor in model.tensors:
        if tensor.name in experts:
            count = 1
            for extent in tensor.shape:
                count *= extent
            weights, bytes_ = weights + count, bytes_ + tensor.nbytes
    return bytes_ * 8 / max(1, weights)


def _requantized(tensor: Any, source: TensorSource, target: str) -> TensorSource:
    import gguf

    from moestream.make.output import TensorSpec

    kind = gguf.GGMLQuantizationType[target]
    spec = source[0]
    if spec.shape[0] % gguf.GGML_QUANT_SIZES[kind][0]:
        return source
    return TensorSpec(spec.name, spec.shape, int(kind)), partial(_quantize, tensor, int(kind))


def _quantize(tensor: Any, kind: int) -> Iterator[Any]:
    import gguf
    import numpy as np

    from moestream.make.quantize import quantize_rows

    length = int(tensor.shape[0])
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    at_once = max(1, _CHUNK_FLOATS // length)
    for start in range(0, len(rows), at_once):
        try:
            values = gguf.quants.dequantize(rows[start : start + at_once], tensor.tensor_type)
        except NotImplementedError:
            raise RefusedError(
                f"{tensor.name} is {tensor.tensor_type.name}, which cannot be taken apart here: "
                "name a --model of another quantisation"
            ) from None
        yield quantize_rows(np.asarray(values, np.float32), kind).reshape(-1)


def _size(model: Model, kind: str) -> int:
    """About how large the file of that kind is."""
    if kind != "requantized":
        return model.bytes + len(model.tensors) * PAGE
    bits = dict((_Q8_0, _Q4_0))[_target(model)]
    return model.dense_bytes + int(model.expert_bytes * bits / max(1.0, _bits(model)))
