"""Tiny GGUF files for tests, written with the ``gguf`` package: whole, split, cut short, and subtly wrong.

The weights are random but valid, never holes, so reading them is real input. The files have what a model
*reader* looks at; they lack what llama.cpp needs to run them (``make-model`` writes those).
"""

from __future__ import annotations

import glob
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from moestream.errors import ModelError
from moestream.make.output import ALIGNMENT, TensorSource, copy_metadata, write_model
from moestream.make.output import TensorSpec as Spec
from moestream.model import read_model

# What a test may say of a tensor: (name, shape with ne0 first, type).
TensorSpec = tuple[str, tuple[int, ...], Q]


def expert_tensors(
    layer: int,
    roles: Iterable[str] = ("gate", "up", "down"),
    *,
    n_embd: int = 64,
    n_ff: int = 96,
    n_experts: int = 8,
    quant: Q = Q.Q8_0,
    suffix: str = "exps",
) -> list[TensorSpec]:
    """The expert tensors of one layer. Roles: gate_up, gate, up, down; suffix ``exps`` or ``chexps``."""
    shapes = {
        "gate_up": (n_embd, 2 * n_ff),
        "gate": (n_embd, n_ff),
        "up": (n_embd, n_ff),
        "down": (n_ff, n_embd),
    }
    return [(f"blk.{layer}.ffn_{role}_{suffix}.weight", (*shapes[role], n_experts), quant) for role in roles]


def dense_tensors(n_layers: int, n_embd: int = 64, n_vocab: int = 300) -> list[TensorSpec]:
    """A few tensors that are not experts, router included."""
    tensors: list[TensorSpec] = [
        ("token_embd.weight", (n_embd, n_vocab), Q.Q8_0),
        ("output_norm.weight", (n_embd,), Q.F32),
    ]
    for layer in range(n_layers):
        tensors += [
            (f"blk.{layer}.attn_q.weight", (n_embd, n_embd), Q.Q4_0),
            (f"blk.{layer}.ffn_gate_inp.weight", (n_embd, 8), Q.F32),
        ]
    return tensors


def moe_tensors(n_layers: int = 2, **experts: Any) -> list[TensorSpec]:
    """A whole small mixture of experts; ``experts`` as for expert_tensors."""
    per_layer = [tensor for layer in range(n_layers) for tensor in expert_tensors(layer, **experts)]
    return dense_tensors(n_layers, experts.get("n_embd", 64)) + per_layer


def write_gguf(
    path: Path,
    tensors: list[TensorSpec] | None = None,
    *,
    arch: str = "olmoe",
    keys: dict[str, Any] | None = None,
    n_tokens: int = 300,
    seed: int = 1,
    quantize: Callable[[np.ndarray, Q], np.ndarray] = gguf.quants.quantize,
    **writer: Any,
) -> Path:
    """Writes a model and returns the path to read: ``path``, or its first shard when ``writer`` splits it.

    ``keys`` are set after the usual ones, with ``%s`` for the architecture; None removes a key. ``writer``
    goes to gguf.GGUFWriter: split_max_tensors, small_first_shard, endianess.
    """
    tensors = moe_tensors() if tensors is None else tensors
    metadata: dict[str, Any] = {
        "general.name": "Tiny",
        "%s.block_count": 2,
        "%s.context_length": 4096,
        "%s.embedding_length": 64,
        "%s.expert_count": 8,
        "%s.expert_used_count": 2,
        **(keys or {}),
    }
    out = gguf.GGUFWriter(path, arch, **writer)
    for key, value in metadata.items():
        if value is not None:
            _add_key(out, key.replace("%s", arch), value)
    if n_tokens:
        out.add_token_list([f"token {number}" for number in range(n_tokens)])
        out.add_token_scores([0.0] * n_tokens)
    rng = np.random.default_rng(seed)
    for name, shape, kind in tensors:
        values = rng.standard_normal(shape[::-1], dtype=np.float32)
        data = values if kind == Q.F32 else quantize(values, kind)
        out.add_tensor(name, data, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path if path.exists() else _shards(path)[0]


def _shards(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}-*-of-*.gguf"))


def _add_key(out: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        out.add_bool(key, value)
    elif isinstance(value, int):
        out.add_uint32(key, value)
    elif isinstance(value, float):
        out.add_float32(key, value)
    elif isinstance(value, str):
        out.add_string(key, value)
    else:
        out.add_array(key, value)


def split_gguf(path: Path, tensors_a_shard: int = 4, **options: Any) -> list[Path]:
    """Writes a split model named after ``path`` and returns its shards in order."""
    write_gguf(path, split_max_tensors=tensors_a_shard, **options)
    return _shards(path)


def write_split(whole: Path, out: Path, shards: int, *, metadata_first: bool = False) -> list[Path]:
    """Writes ``whole``, a model that runs, as ``shards`` files named after ``out``, tensors dealt out evenly; with
    ``metadata_first``, the first file has none of them."""
    reader = gguf.GGUFReader(whole)
    architecture = reader.fields["general.architecture"].contents()
    a_shard = -(-len(reader.tensors) // (shards - metadata_first))
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=a_shard, small_first_shard=metadata_first)
    copy_metadata(reader, writer, {})
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [out.with_name(f"{out.stem}-{n + 1:05}-of-{shards:05}.gguf") for n in range(shards)]


def tensor_sources(whole: Path) -> list[TensorSource]:
    """The tensors of a file as what ``write_model`` takes, in file order."""

    def source(tensor: gguf.ReaderTensor) -> TensorSource:
        shape = tuple(int(extent) for extent in tensor.shape)
        raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
        return Spec(tensor.name, shape, int(tensor.tensor_type)), lambda: [raw]

    return [source(tensor) for tensor in gguf.GGUFReader(whole).tensors]


def rewrite(
    whole: Path,
    out: Path,
    *,
    tensors: list[TensorSource] | None = None,
    alignment: int | None = None,
    **keys: Any,
) -> Path:
    """Writes a model that runs again, with other tensors (or an order of theirs), another alignment, and ``keys`` as
    for ``changed``. Returns ``out``."""
    architecture, add_metadata = changed(whole, **keys)

    def add_all(writer: gguf.GGUFWriter) -> None:
        add_metadata(writer)
        if alignment is not None:
            writer.add_custom_alignment(alignment)

    return write_model(out, architecture, add_all, tensors or tensor_sources(whole))


def changed(
    whole: Path, *, add: dict[str, Any] | None = None, change: dict[str, Any] | None = None
) -> tuple[str, Callable[[gguf.GGUFWriter], None]]:
    """The architecture of a file, and what gives a writer its keys: more of them, and others' values (None: without
    it)."""
    reader = gguf.GGUFReader(whole)

    def add_metadata(writer: gguf.GGUFWriter) -> None:
        copy_metadata(reader, writer, change or {})
        for key, value in (add or {}).items():
            _add_key(writer, key, value)

    return reader.fields["general.architecture"].contents(), add_metadata


def write_behind_holes(
    whole: Path, out: Path, holes: list[Spec], tensors: list[TensorSource], **keys: Any
) -> Path:
    """Like ``rewrite``, with tensors in front that take no room on the disk. Returns ``out``."""
    architecture, add_metadata = changed(whole, **keys)
    writer = gguf.GGUFWriter(out, architecture)
    add_metadata(writer)
    for spec in [*holes, *(spec for spec, _ in tensors)]:
        kind = gguf.GGMLQuantizationType(spec.ggml_type)
        writer.add_tensor_info(spec.name, spec.shape[::-1], np.dtype(np.float32), spec.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with out.open("r+b") as file:
        at = _padded(file.seek(0, 2)) + sum(_padded(spec.nbytes) for spec in holes)
        for spec, chunks in tensors:
            file.seek(at)
            file.writelines(chunk.data for chunk in chunks())
            at += _padded(spec.nbytes)
        file.truncate(at)
    return out


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def refused(path: Path, pattern: str) -> str:
    """Asserts that reading ``path`` is refused in one line that names it and matches; returns the line."""
    with pytest.raises(ModelError) as caught:
        read_model(path)
    text = str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in text
    assert str(path.parent) in text
    assert re.search(pattern, text), text
    return text


def cut(path: Path, size: int) -> Path:
    """Shortens a file to ``size`` bytes, or by ``-size`` when negative."""
    with path.open("r+b") as file:
        file.truncate(size if size >= 0 else path.stat().st_size + size)
    return path


def patch(path: Path, change: Callable[[bytearray], None]) -> Path:
    """Rewrites a file through ``change``."""
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def rename_bytes(old: bytes, new: bytes, *, same_length: bool = True) -> Callable[[bytearray], None]:
    """A change for ``patch``: every ``old`` becomes ``new``, which has the same length; if not, the tensors' data is
    where the header no longer says."""
    assert len(old) == len(new) or not same_length

    def change(data: bytearray) -> None:
        assert old in data
        data[:] = data.replace(old, new)

    return change


def set_tensor_type(name: str, type_id: int) -> Callable[[bytearray], None]:
    """A change for ``patch``: the type id of one 3-dimensional tensor in the tensor table."""

    def change(data: bytearray) -> None:
        needle = struct.pack("<Q", len(name)) + name.encode()
        at = data.index(needle) + len(needle)
        (dimensions,) = struct.unpack_from("<I", data, at)
        struct.pack_into("<i", data, at + 4 + 8 * dimensions, type_id)

    return change


def tensor_table_offset(path: Path) -> int:
    """Where the tensor table starts: the length field of the first tensor's name."""
    data = path.read_bytes()
    name = b"token_embd.weight"
    return data.index(struct.pack("<Q", len(name)) + name)
