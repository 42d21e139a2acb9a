"""Are a model's weights whole? Every tensor is read once and its values are tried by ggml itself: no scale that is
infinite or no number, no block that its quantization cannot have. A file that passes can still be another model than
its name says.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from moestream.errors import ModelError
from moestream.files import advise
from moestream.model.ggml import ggml_library
from moestream.model.types import Model, Tensor

#: Bytes read and tried at once, about: whole blocks of the tensor's type.
PIECE_BYTES = 4 << 20
#: Tokens: enough for llama.cpp to build a context.
_CONTEXT = 32
_REASON = re.compile(rb"ggml_validate_row_data: (.*?)(?: at block 0)?$", re.MULTILINE)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Checked:
    """What was read. ``untested``: tensors of types that ggml has no test for."""

    tensors: int
    bytes: int
    untested: int


@dataclass(frozen=True)
class _Piece:
    tensor: Tensor
    start: int  # within the tensor
    bytes: int
    tested: bool


def check_weights(model: Model, progress: Progress | None = None, threads: int | None = None) -> Checked:
    """Read all tensors of all shards, in file order, and try every value. ``progress(done, total)`` in bytes.

    Raises ModelError that names the first bad tensor, its expert, the place and what is wrong there, or the read that
    failed. Descriptor 2 leads elsewhere meanwhile, for that is where ggml says what it finds.
    """
    total = sum(tensor.nbytes for tensor in model.tensors)
    done = 0
    reader = _Reader(model)
    with reader, _ggml_silent(), ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        known = _tested_types(model)
        pieces = list(_pieces(model, known))
        try:
            for piece, good in zip(pieces, pool.map(reader.is_good, pieces), strict=True):
                if not good:
                    raise ModelError(_complaint(model, *reader.first_bad(piece)))
                done += piece.bytes
                if progress is not None:
                    progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    for tensor in model.tensors:
        if len(tensor.shape) > 1 and tensor.name not in reader.written:
            raise ModelError(
                f"{model.shards[tensor.shard].path}: tensor {tensor.name} holds only zeros, as where a download broke "
                "off in a file that had its size already; download it again"
            )
    untested = sum(tensor.type_id not in known for tensor in model.tensors)
    return Checked(len(model.tensors), total, untested)


def check_loads(model: Model) -> None:
    """Raises ModelError, with llama.cpp's own words, where it makes no model or no context of the header. It is asked
    in a process of its own, which a division by zero ends."""
    asked = f"measure_context(sys.argv[1], n_ctx={_CONTEXT}, n_batch=1, n_ubatch=1)"
    script = f"import sys; from moestream.dryrun import measure_context; {asked}"
    command = [sys.executable, "-c", script, str(model.paths[0])]
    # Else an assertion that no load can fail of starts a debugger, which prints pages.
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=environment
    )
    if done.returncode == 0:
        return
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0 or not words:
        said = f" ({words[0].rpartition('/')[2]})" if words else ""
        raise ModelError(
            f"{model.paths[0]}: llama.cpp's process ends with signal {-done.returncode} over its numbers{said}; "
            "download it again"
        )
    reason = words[-1].partition("Error: ")[2] or words[-1]
    raise ModelError(reason if reason.startswith(str(model.paths[0])) else f"{model.paths[0]}: {reason}")


class _Reader:
    """Reads pieces, each thread into memory of its own, and has ggml look at them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._files = contextlib.ExitStack()
        self._descriptors: list[int] = []
        self._mine = threading.local()
        self.written: set[str] = set()  # tensors with a byte that is not 0

    def __enter__(self) -> _Reader:
        for shard in self._model.shards:
            file = self._files.enter_context(shard.path.open("rb", buffering=0))
            advise(file.fileno(), os.POSIX_FADV_SEQUENTIAL)
            self._descriptors.append(file.fileno())
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def is_good(self, piece: _Piece) -> bool:
        if not hasattr(self._mine, "memory"):
            self._mine.memory = mmap.mmap(-1, PIECE_BYTES)
        memory = memoryview(self._mine.memory)[: piece.bytes]
        file, at = self._descriptors[piece.tensor.shard], piece.tensor.offset + piece.start
        got = 0
        while got < piece.bytes:
            try:
                count = os.preadv(file, [memory[got:]], at + got)
            except OSError as error:
                raise ModelError(_complaint(self._model, piece, error.strerror or str(error))) from None
            if count == 0:
                raise ModelError(_complaint(self._model, piece, "the file ends early"))
            got += count
        # Else the whole file would push everything out of the page cache.
        advise(file, os.POSIX_FADV_DONTNEED, at, piece.bytes)
        if piece.tensor.name not in self.written and np.frombuffer(memory, np.uint8).any():
            self.written.add(piece.tensor.name)
        if not piece.tested:
            return True
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return bool(ggml_library().ggml_validate_row_data(piece.tensor.type_id, address, piece.bytes))

    def first_bad(self, piece: _Piece) -> tuple[_Piece, str]:
        """The first bad block of a bad piece, which is read again, and ggml's words for it. Its words for a whole piece
        do not say where with every type."""
        size = ggml_library().ggml_type_size(piece.tensor.type_id)
        good, bad = 0, piece.bytes // size  # blocks in front of it
        while bad - good > 1:
            middle = (good + bad) // 2
            if self.is_good(replace(piece, bytes=middle * size)):
                good = middle
            else:
                bad = middle
        block = replace(piece, start=piece.start + good * size, bytes=size)
        with _ggml_silent() as said:
            self.is_good(block)
            said.seek(0)
            found = _REASON.search(said.read())
        return block, found[1].decode(errors="replace").strip() if found else "ggml refuses its values"


def _pieces(model: Model, tested: set[int]) -> Iterator[_Piece]:
    for tensor in model.tensors:
        block = ggml_library().ggml_type_size(tensor.type_id)
        step = PIECE_BYTES // block * block
        for start in range(0, tensor.nbytes, step):
            yield _Piece(tensor, start, min(step, tensor.nbytes - start), tensor.type_id in tested)


def _tested_types(model: Model) -> set[int]:
    """The types of the model that ggml can tell good values of: zeros are good in all of them."""
    library, types = ggml_library(), {tensor.type_id for tensor in model.tensors}
    return {
        number
        for number in types
        if library.ggml_validate_row_data(
            number, ctypes.create_string_buffer(size := library.ggml_type_size(number)), size
        )
    }


def _complaint(model: Model, piece: _Piece, reason: str) -> str:
    tensor = piece.tensor
    slabs = (slab for bank in model.banks for slab in bank.tensors if slab.name == tensor.name)
    expert = next((f", expert {piece.start // slab.slab_bytes}" for slab in slabs), "")
    return (
        f"{model.shards[tensor.shard].path}: tensor {tensor.name} ({tensor.type_name}){expert}, at byte "
        f"{tensor.offset + piece.start}: {reason}; download it again"
    )


@contextlib.contextmanager
def _ggml_silent() -> Iterator[tempfile._TemporaryFileWrapper[bytes]]:
    """What ggml prints to descriptor 2 meanwhile is in the file yielded."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield said  # type: ignore[misc]
        finally:
            os.dup2(kept, 2)
            os.close(kept)
