"""What tells two models of the same shapes apart, without reading them: a digest of samples of their weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from moestream.errors import ModelError
from moestream.files import advise
from moestream.model.types import Shard, Tensor
from moestream.unchanged import Stamp, stamp

#: Bytes of a sample, and the most samples of a model: half a megabyte in all, less than a header.
SAMPLE_BYTES = 4096
MOST_SAMPLES = 128


@dataclass(frozen=True)
class Weights:
    """The weights a header was read with, which are read only when their digest is asked for. ``stamps``: of the
    shards, taken before their headers were read."""

    shards: tuple[Shard, ...] = field(repr=False)
    tensors: tuple[Tensor, ...] = field(repr=False)
    stamps: tuple[Stamp | None, ...]

    @cached_property
    def digest(self) -> str:
        """``sample_weights`` of them. Raises ModelError where they cannot be read, or are no longer what the header
        was read with: another file's samples would name a model that never was."""
        digest = sample_weights(self.shards, self.tensors)
        for shard, before in zip(self.shards, self.stamps, strict=True):
            _refuse_changed(shard.path, before)
        return digest


def _refuse_changed(path: Path, before: Stamp | None) -> None:
    if before is None or stamp(path) != before:
        raise ModelError(f"{path} is not what it was when its header was read: load the model again")


def sample_weights(shards: Sequence[Shard], tensors: Sequence[Tensor]) -> str:
    """16 hex digits over the middle of up to 128 tensors, the same tensors for the same header: another seed, another
    training or an edited tensor among them gives others. Raises ModelError when they cannot be read."""
    digest = hashlib.sha256()
    by_shard: dict[int, list[Tensor]] = {}
    for tensor in _spread(tensors):
        by_shard.setdefault(tensor.shard, []).append(tensor)
    for number, chosen in sorted(by_shard.items()):
        path = shards[number].path
        try:
            with path.open("rb", buffering=0) as file:
                # Else each sample would bring its neighbourhood into the page cache.
                advise(file.fileno(), os.POSIX_FADV_RANDOM)
                for tensor in chosen:
                    length = min(SAMPLE_BYTES, tensor.nbytes)
                    digest.update(
                        os.pread(file.fileno(), length, tensor.offset + (tensor.nbytes - length) // 2)
                    )
        except OSError as error:
            raise ModelError(f"{path}: its weights cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:16]


def _spread(tensors: Sequence[Tensor]) -> list[Tensor]:
    """At most MOST_SAMPLES tensors at even distances, always the same ones."""
    count = min(len(tensors), MOST_SAMPLES)
    return [tensors[number * len(tensors) // count] for number in range(count)]
