"""Which tensors llama.cpp wants for a model, in its own words: its loader run on the metadata alone.

``llama_model_init_from_user`` makes a model from keys and hands out every tensor it would read from a file. It is
asked in a process of its own, because the loader ends its process over numbers it did not expect.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestream.errors import ModelError, UsageError
from moestream.make.ggml import GgufParameters, ggml_base
from moestream.make.output import write_model
from moestream.model.ggml import read_header

if TYPE_CHECKING:
    import gguf

#: What says why, among everything llama.cpp and ggml say.
_REASON = re.compile(r"error loading model|GGML_ASSERT|failed|: fatal|invalid")


Tensors = list[tuple[str, tuple[int, ...]]]


def asked_tensors(arch: str, add_metadata: Callable[[gguf.GGUFWriter], None]) -> Tensors:
    """Every tensor that llama.cpp's loader of ``arch`` can use with this metadata, (name, extents with ne0 first).

    Also those it can do without: all optional tensors are there. Raises UsageError with llama.cpp's own words when it
    makes no model of the metadata.
    """
    found = tensors_or_reason(arch, add_metadata)
    if isinstance(found, str):
        raise UsageError(f"shape: llama.cpp makes no {arch} of it, as floats in memory: {found}")
    return found


def tensors_or_reason(arch: str, add_metadata: Callable[[gguf.GGUFWriter], None]) -> Tensors | str:
    """As ``asked_tensors``; in place of the error llama.cpp's own words alone."""
    with tempfile.TemporaryDirectory() as directory:
        keys, answer = Path(directory, "keys.gguf"), Path(directory, "tensors.gguf")
        write_model(keys, arch, add_metadata, [])
        command = [sys.executable, "-m", "moestream.make.ask", str(keys), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            return refusal(done.stderr)
        return [(tensor.name, tensor.shape) for tensor in read_header(answer).tensors]


def refusal(log: str) -> str:
    """The line of llama.cpp's log that says why it stopped."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if _REASON.search(line):
            return line
    return lines[-1] if lines else "it ended without a word"


def main(keys: str, answer: str) -> None:
    """Write the tensors of a model with these keys as a GGUF header without data."""
    from moestream.binding import low as lc

    lc.llama_backend_init()
    ggml = ggml_base()
    metadata = ggml.gguf_init_from_file(keys.encode(), GgufParameters(True, None))
    tensors = ggml.gguf_init_empty()
    seen: set[bytes] = set()

    def take(tensor: int, _user: Any) -> None:
        name = ggml.ggml_get_name(tensor)
        if name not in seen:  # an output matrix that is the embedding comes twice
            seen.add(name)
            ggml.gguf_add_tensor(tensors, tensor)

    params = lc.llama_model_default_params()
    params.load_mtp = True
    callback = lc.llama_model_set_tensor_data_t(take)
    if not lc.llama_model_init_from_user(metadata, callback, None, params):
        raise ModelError(f"{keys}: llama.cpp makes no model of it")
    if not ggml.gguf_write_to_file(tensors, answer.encode(), True):
        raise ModelError(f"{answer}: cannot be written")


if __name__ == "__main__":
    main(*sys.argv[1:])
