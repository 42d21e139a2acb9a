"""What tells two models of the same shapes apart, without reading them: a digest of samples of their weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from moestream.errors import ModelError
from moestream.files import advise
from moestream.model.types import Shard, Tensor

#: Bytes of a sample, and the most samples of a model: half a megabyte in all, less than a header.
SAMPLE_BYTES = 4096
MOST_SAMPLES = 128


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
