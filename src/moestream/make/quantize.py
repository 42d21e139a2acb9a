"""Random weights in any of ggml's types, quantised by ggml's own quantizer, at the speed of the disk.

Quantising 40 GB would take hours, so a pool of blocks is quantised once for each (type, scale) and every row
of a tensor is a run of consecutive blocks that starts at a random place in the pool. A quantised block stands
alone, so any run of blocks is a row that the quantizer could have made; there are hundreds of thousands of
different rows in a pool. Good for bytes, arithmetic and tests of identity; the routes of random weights say
nothing about those of a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moestream.errors import MoestreamError
from moestream.make.ggml import ggml_base
from moestream.make.kinds import numbered
from moestream.make.output import TensorSpec

Bytes = npt.NDArray[np.uint8]

_POOL_ELEMENTS = 1 << 21
_CHUNK_BYTES = 4 << 20
#: Of the quantizer, which takes longer than the random numbers do.
_THREADS = 2


def quantize_rows(values: npt.NDArray[np.float32], ggml_type: int) -> Bytes:
    """``values``, (rows, n_per_row), in ``ggml_type``: (rows, bytes of a row). The type's block must divide
    n_per_row."""
    ggml = ggml_base()
    _, _, block, size = numbered(ggml_type)
    rows, length = values.shape
    if length % block:
        raise MoestreamError(f"rows of {length} are not whole blocks of {block}")
    source = np.ascontiguousarray(values, dtype=np.float32)
    target = np.empty((rows, length // block * size), dtype=np.uint8)
    # Types that cannot be made without an importance matrix get one in which every weight counts the same.
    importance = np.ones(length, dtype=np.float32)
    matrix = importance.ctypes.data if ggml.ggml_quantize_requires_imatrix(ggml_type) else None

    def quantize(first: int) -> int:
        many = min(share, rows - first)
        return int(
            ggml.ggml_quantize_chunk(
                ggml_type, source.ctypes.data, target.ctypes.data, first * length, many, length, matrix
            )
        )

    # A row stands alone: several processors make the bytes that one makes.
    share = max(1, -(-rows // _THREADS))
    with ThreadPoolExecutor(_THREADS) as threads:
        written = sum(threads.map(quantize, range(0, rows, share)))
    if written != target.nbytes:
        raise MoestreamError(f"ggml's quantizer wrote {written} bytes where {target.nbytes} were expected")
    return target


@dataclass
class RandomWeights:
    """Random tensors, the same for the same ``seed``; holds one pool for each (type, scale) asked for so
    far."""

    seed: int

    def __post_init__(self) -> None:
        self._pools: dict[tuple[int, float, int], Bytes] = {}

    def tensor(self, spec: TensorSpec, scale: float, number: int) -> Iterator[Bytes]:
        """The bytes of one tensor in chunks. ``scale`` is the standard deviation, ``number`` tells tensors
        apart."""
        _, _, block, size = numbered(spec.ggml_type)
        # Types without blocks move in groups, because copying single numbers is slow.
        group = block if block > 1 else math.gcd(spec.shape[0], 32)
        unit_bytes = group // block * size
        pool = self._pool(spec.ggml_type, scale, unit_bytes)
        row_units = spec.row_bytes // unit_bytes
        starts_at_most = len(pool) - row_units
        # One view, no copy: row i is the pool from unit i on.
        rows = np.lib.stride_tricks.as_strided(
            pool, (starts_at_most + 1, spec.row_bytes), (unit_bytes, 1), writeable=False
        )
        random = np.random.RandomState([self.seed, number])
        at_once = max(1, _CHUNK_BYTES // spec.row_bytes)
        for first in range(0, spec.rows, at_once):
            starts = random.randint(0, starts_at_most + 1, min(at_once, spec.rows - first))
            yield rows[starts].reshape(-1)

    def _pool(self, ggml_type: int, scale: float, unit_bytes: int) -> Bytes:
        """(units, unit_bytes)"""
        key = (ggml_type, scale, unit_bytes)
        if key not in self._pools:
            random = np.random.RandomState([self.seed, ggml_type, len(self._pools), 7])
            values = random.standard_normal((_POOL_ELEMENTS // 4096, 4096)).astype(np.float32)
            values *= np.float32(scale)
            self._pools[key] = quantize_rows(values, ggml_type).reshape(-1, unit_bytes)
        return self._pools[key]
