"""Tables that name experts: a number in one that is no expert's ends llama.cpp's process where it computes."""

from __future__ import annotations

from moestream.errors import ModelError
from moestream.model.types import Model, Tensor

#: Which experts each token has, in layers that do not choose by a router.
_TABLE = ".ffn_gate_tid2eid.weight"


def check_tables(model: Model) -> None:
    """Raises ModelError for the first entry that is no expert of its layer. Reads the tables, which are megabytes."""
    counts: dict[int, int] = {}
    for bank in model.banks:
        counts.setdefault(bank.layer, bank.count)  # chunk experts, of which no table tells, come second
    for tensor in model.tensors:
        layer = tensor.name.removeprefix("blk.").removesuffix(_TABLE)
        if tensor.name == f"blk.{layer}{_TABLE}" and tensor.type_name == "i32" and layer.isdecimal():
            _check_table(model, tensor, int(layer), counts.get(int(layer), 0))


def _check_table(model: Model, tensor: Tensor, layer: int, count: int) -> None:
    import numpy as np

    path = model.shards[tensor.shard].path
    try:
        table = np.fromfile(path, "<i4", tensor.nbytes // 4, offset=tensor.offset)
    except OSError as error:
        raise ModelError(f"{path}: tensor {tensor.name} cannot be read: {error.strerror or error}") from None
    wrong = np.flatnonzero((table < 0) | (table >= count))
    if wrong.size:
        raise ModelError(
            f"{path}: tensor {tensor.name} names expert {table[wrong[0]]} for token {wrong[0] // tensor.shape[0]}, "
            f"and layer {layer} has {count}; the file is damaged or was made wrong: download it again"
        )
