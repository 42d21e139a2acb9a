"""A GGUF header as ggml reads it: what llama.cpp will trust is what this program trusts.

The functions come from the ggml library that llama-cpp-python carries (or that ``LLAMA_CPP_LIB_PATH`` names,
as for the binding itself), loaded without importing ``llama_cpp``, which takes far longer than reading a
header.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moestream.errors import AbiError, ModelError
from moestream.model.types import Value
from moestream.version import INSTALL_TESTED

MAX_ARRAY_IN_METADATA = 4096

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, tuple[str, Any]] = {
    0: ("u8", ctypes.c_uint8), 1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16), 3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32), 5: ("i32", ctypes.c_int32), 6: ("f32", ctypes.c_float),
    7: ("bool", ctypes.c_bool),
    10: ("u64", ctypes.c_uint64), 11: ("i64", ctypes.c_int64), 12: ("f64", ctypes.c_double),
}  # fmt: skip
_UNKNOWN_TYPE = re.compile(r"tensor '(.*?)' (?:has invalid ggml type|of type) (-?\d+)\b")
_REMOVED_TYPE = "not a multiple of block size (0)"
_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
# ggml has one log callback for the whole process.
_log_lock = threading.Lock()


class _InitParams(ctypes.Structure):
    """``struct gguf_init_params``; a null ``ctx`` means that no tensors are made, let alone read."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@dataclass(frozen=True)
class TensorInfo:
    """A line of the tensor table; ``offset`` from the start of the file."""

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """One file's header. ``array_lengths`` has every array, also those that ``metadata`` leaves out; ``types`` what
    ggml calls the type of each key."""

    metadata: dict[str, Value]
    types: dict[str, str]
    array_lengths: dict[str, int]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    alignment: int


def library_directory() -> Path:
    """Where llama.cpp's libraries are. Raises AbiError when llama-cpp-python is not installed."""
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    if override is not None:
        return Path(override)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise AbiError(f"llama-cpp-python is not installed: {INSTALL_TESTED}")
    return Path(spec.submodule_search_locations[0]) / "lib"


def find_library(name: str) -> Path:
    """The file of llama.cpp's library ``name`` ("ggml-base", "llama"). Raises AbiError when there is none."""
    directory = library_directory()
    # A wheel has copies where a build has links, and libllama asks for lib*.so.N: loading the plain name
    # could put the library into the process twice, with two log callbacks.
    versioned = sorted(directory.glob(f"lib{name}.so.*"), key=lambda path: (len(path.name), path.name))
    for candidate in (*versioned, directory / f"lib{name}.so", directory / f"lib{name}.dylib"):
        if candidate.is_file():
            return candidate
    raise AbiError(
        f"no lib{name} in {directory}: unset LLAMA_CPP_LIB_PATH where it is set, or {INSTALL_TESTED}"
    )


def binding_version() -> str:
    """``llama-cpp-python 0.3.36``, for messages."""
    try:
        return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
    except importlib.metadata.PackageNotFoundError:
        return "llama.cpp"


def read_header(path: Path) -> Header:
    """The header of a file that ``header.check_file`` has passed. Raises ModelError when ggml refuses it."""
    lib = ggml_library()
    with _ggml_log(lib) as log:
        context = lib.gguf_init_from_file(os.fsencode(path), _InitParams(True, None))
    if not context:
        raise _refusal(path, "".join(log))
    try:
        metadata, types, array_lengths = _read_keys(lib, context)
        return Header(
            metadata=metadata,
            types=types,
            array_lengths=array_lengths,
            tensors=_read_tensors(lib, context),
            data_offset=lib.gguf_get_data_offset(context),
            alignment=lib.gguf_get_alignment(context),
        )
    finally:
        lib.gguf_free(context)


@cache
def ggml_library() -> ctypes.CDLL:
    """The ggml that reads headers, its functions typed. Raises AbiError when it is not one this version can use."""
    path = find_library("ggml-base")
    pointer, text, number, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_log_get": (None, [ctypes.POINTER(pointer), ctypes.POINTER(pointer)]),
        "ggml_log_set": (None, [pointer, pointer]),
        "ggml_type_name": (text, [ctypes.c_int]),
        "ggml_type_size": (size, [ctypes.c_int]),
        "ggml_validate_row_data": (ctypes.c_bool, [ctypes.c_int, pointer, size]),
        "gguf_init_from_file": (pointer, [text, _InitParams]),
        "gguf_free": (None, [pointer]),
        "gguf_get_alignment": (size, [pointer]),
        "gguf_get_data_offset": (size, [pointer]),
        "gguf_get_n_kv": (number, [pointer]),
        "gguf_get_key": (text, [pointer, number]),
        "gguf_type_name": (text, [ctypes.c_int]),
        "gguf_get_kv_type": (ctypes.c_int, [pointer, number]),
        "gguf_get_arr_type": (ctypes.c_int, [pointer, number]),
        "gguf_get_arr_n": (size, [pointer, number]),
        "gguf_get_arr_data": (pointer, [pointer, number]),
        "gguf_get_val_str": (text, [pointer, number]),
        "gguf_get_n_tensors": (number, [pointer]),
        "gguf_get_tensor_name": (text, [pointer, number]),
        "gguf_get_tensor_ne": (ctypes.POINTER(number), [pointer, number]),
        "gguf_get_tensor_type": (ctypes.c_int, [pointer, number]),
        "gguf_get_tensor_offset": (size, [pointer, number]),
        "gguf_get_tensor_size": (size, [pointer, number]),
    }
    for suffix, kind in _NUMBERS.values():
        signatures[f"gguf_get_val_{suffix}"] = (kind, [pointer, number])
    try:
        lib = ctypes.CDLL(str(path))
        for name, (result, arguments) in signatures.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise AbiError(f"{path}: not a ggml this version can use ({error}): {INSTALL_TESTED}") from None
    return lib


@contextlib.contextmanager
def _ggml_log(lib: ctypes.CDLL) -> Iterator[list[str]]:
    """Catches what ggml logs meanwhile in the yielded list, then restores the callback that was there."""
    lines: list[str] = []

    def keep(_level: int, message: bytes, _data: int | None) -> None:
        lines.append(message.decode("utf-8", "replace"))

    ours = _LogCallback(keep)
    with _log_lock:
        callback, data = ctypes.c_void_p(), ctypes.c_void_p()
        lib.ggml_log_get(ctypes.byref(callback), ctypes.byref(data))
        lib.ggml_log_set(ctypes.cast(ours, ctypes.c_void_p), None)
        try:
            yield lines
        finally:
            lib.ggml_log_set(callback, data)


def _refusal(path: Path, log: str) -> ModelError:
    """ggml's own complaint as one line; the one that users meet (a type from the future) in our words."""
    match = _UNKNOWN_TYPE.search(log)
    if match and ("invalid ggml type" in log or _REMOVED_TYPE in log):
        return ModelError(
            f"{path}: tensor {match[1]} has ggml type {match[2]}, which {binding_version()} does not know; "
            "install a newer moestream (and its llama-cpp-python) or take another quantization of the model"
        )
    first = next((line for line in log.splitlines() if line.strip()), "no reason given")
    reason = re.sub(r"^\w+: ", "", first.strip())
    return ModelError(
        f"{path}: {binding_version()} refuses its header: {reason}; download or convert it again"
    )


def _read_keys(lib: ctypes.CDLL, context: int) -> tuple[dict[str, Value], dict[str, str], dict[str, int]]:
    metadata: dict[str, Value] = {}
    types: dict[str, str] = {}
    lengths: dict[str, int] = {}
    for index in range(lib.gguf_get_n_kv(context)):
        key = lib.gguf_get_key(context, index).decode("utf-8", "replace")
        kind = lib.gguf_get_kv_type(context, index)
        types[key] = lib.gguf_type_name(kind).decode()
        if kind == _STRING:
            metadata[key] = lib.gguf_get_val_str(context, index).decode("utf-8", "replace")
        elif kind != _ARRAY:
            metadata[key] = getattr(lib, f"gguf_get_val_{_NUMBERS[kind][0]}")(context, index)
        else:
            lengths[key] = count = lib.gguf_get_arr_n(context, index)
            element = lib.gguf_get_arr_type(context, index)
            if element in _NUMBERS and count <= MAX_ARRAY_IN_METADATA and not key.startswith("tokenizer."):
                address = lib.gguf_get_arr_data(context, index)
                metadata[key] = tuple((_NUMBERS[element][1] * count).from_address(address)) if count else ()
    return metadata, types, lengths


def _read_tensors(lib: ctypes.CDLL, context: int) -> tuple[TensorInfo, ...]:
    tensors = []
    data_offset = lib.gguf_get_data_offset(context)
    for index in range(lib.gguf_get_n_tensors(context)):
        shape = lib.gguf_get_tensor_ne(context, index)[:4]
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        type_id = lib.gguf_get_tensor_type(context, index)
        tensors.append(
            TensorInfo(
                name=lib.gguf_get_tensor_name(context, index).decode("utf-8", "surrogateescape"),
                type_id=type_id,
                type_name=lib.ggml_type_name(type_id).decode(),
                shape=tuple(shape),
                offset=data_offset + lib.gguf_get_tensor_offset(context, index),
                nbytes=lib.gguf_get_tensor_size(context, index),
            )
        )
    return tuple(tensors)
