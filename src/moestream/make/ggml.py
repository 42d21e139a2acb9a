"""ggml's own functions, bound once: names of tensors, its quantizer, and headers of GGUF files.

The library is the one llama-cpp-python carries and has loaded; nothing is built or copied here.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


class GgufParameters(ctypes.Structure):
    """``struct gguf_init_params``; with a null ``ctx`` no tensors are made."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_get_data": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_nelements": (ctypes.c_int64, [ctypes.c_void_p]),
    "ggml_nrows": (ctypes.c_int64, [ctypes.c_void_p]),
    "ggml_quantize_init": (None, [ctypes.c_int]),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, [ctypes.c_int]),
    "ggml_quantize_chunk": (
        ctypes.c_size_t,
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p],
    ),
    "gguf_init_from_file": (ctypes.c_void_p, [ctypes.c_char_p, GgufParameters]),
    "gguf_init_empty": (ctypes.c_void_p, []),
    "gguf_add_tensor": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "gguf_write_to_file": (ctypes.c_bool, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool]),
}  # fmt: skip


@cache
def ggml_base() -> ctypes.CDLL:
    """The ggml library of this process with the functions above typed."""
    from moestream.binding import libllama_path

    # dlsym on libllama also searches the ggml it depends on; a handle of our own leaves the binding's types alone.
    library = ctypes.CDLL(libllama_path())
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
