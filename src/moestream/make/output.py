"""A GGUF file that appears whole or not at all, its tensors streamed to disk one after another.

Nothing here holds a tensor: the header is written from names, shapes and types, then each tensor's bytes
arrive in chunks. This module knows nothing of architectures or of what the bytes mean.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moestream.box import cache_directory
from moestream.errors import MoestreamError, RefusedError
from moestream.files import check_directory, followed, lack_of_room
from moestream.units import format_bytes

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

#: ``progress(stage, done, total)``: what is being done in a few words, and how far it is in units of its own.
Progress = Callable[[str, int, int], None]

ALIGNMENT = 32
#: Room the header needs beside the tensors: the largest tokenizers are a few MB.
_HEADER_ROOM = 16 << 20


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file: ``shape`` is in GGUF's order (ne0 first), ``ggml_type`` is ggml's number of the
    type."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int

    @property
    def rows(self) -> int:
        """Number of rows of ne0 elements."""
        count = 1
        for extent in self.shape[1:]:
            count *= extent
        return count

    @property
    def row_bytes(self) -> int:
        """Bytes of one row. The type's block must divide ne0."""
        from moestream.make.kinds import numbered

        kind = numbered(self.ggml_type)
        return self.shape[0] // kind.values * kind.nbytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


#: What a tensor is and the chunks of its bytes, in order.
TensorSource = tuple[TensorSpec, Callable[[], Iterable["Bytes"]]]


def write_model(
    out: Path, arch: str, add_metadata: Callable[[gguf.GGUFWriter], None], tensors: Sequence[TensorSource],
    progress: Progress | None = None,
) -> Path:  # fmt: skip
    """Write ``out`` with the given metadata and tensors, in order, and return it.

    The file is written under another name in the same directory and renamed at the end, so that ``out`` is
    either the whole file or what it was before; its directory must be there (see ``new_file``).
    Tensors begin at multiples of 32 bytes, or of what ``add_metadata`` has
    set with ``add_custom_alignment``. Raises RefusedError when the disk has no room (found
    beforehand where it can be) and when the directory cannot be written.
    """
    import gguf
    import numpy as np

    total = sum(spec.nbytes for spec, _ in tensors)
    with new_file(out, total + _HEADER_ROOM) as temporary:
        writer = gguf.GGUFWriter(path=None, arch=arch, use_temp_file=False)
        writer.data_alignment = ALIGNMENT
        add_metadata(writer)
        for spec, _ in tensors:
            # Of the type only its number is written; the package need not know it.
            raw_type = cast("gguf.GGMLQuantizationType", spec.ggml_type)
            # A dtype that is not uint8 tells the writer that the shape counts elements, not bytes.
            writer.add_tensor_info(spec.name, spec.shape[::-1], np.dtype(np.float32), spec.nbytes, raw_type)
        writer.write_header_to_file(temporary)
        try:
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            _write_tensors(_only_file(writer), tensors, total, writer.data_alignment, progress)
        finally:
            writer.close()
    return out


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, change: Mapping[str, Any]) -> None:
    """Every key of a file, in its order, but those that the writer itself writes. ``change``: other values for keys
    that are there; with None, the key is left out."""
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = change[key] if key in change else field.contents()
        if value is not None:
            kind = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, value, field.types[0], kind)


def _only_file(writer: gguf.GGUFWriter) -> Any:
    files = writer.fout
    if files is None or len(files) != 1:
        raise MoestreamError(
            "the gguf package did not open exactly one file; install a tested version of gguf"
        )
    return files[0]


def _write_tensors(
    file: Any, tensors: Sequence[TensorSource], total: int, alignment: int, progress: Progress | None
) -> None:
    done = 0
    file.write(b"\0" * (-file.tell() % alignment))
    for spec, chunks in tensors:
        written = 0
        for chunk in chunks():
            file.write(chunk.data)
            written += chunk.nbytes
            if progress is not None:
                progress("writing", done + written, total)
        if written != spec.nbytes:
            raise MoestreamError(f"{spec.name}: {written} bytes were made where the type needs {spec.nbytes}")
        file.write(b"\0" * (-spec.nbytes % alignment))
        done += written
    file.flush()


@contextmanager
def new_file(out: Path, size_bytes: int, option: str = "--out") -> Iterator[Path]:
    """A temporary path beside ``out`` that becomes ``out`` when the block ends well and is removed when it
    does not. ``option`` names the place on the command line.

    A link is followed: what it leads to is replaced. Raises UsageError for a directory that is not there (only this
    program's own is made), and for what is no regular file.
    """
    ours = out.absolute().is_relative_to(cache_directory())
    out = followed(out, option)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    elsewhere = f"name another place with {option}"
    try:
        if ours:
            out.parent.mkdir(parents=True, exist_ok=True)
        check_directory(out, option)
        free = shutil.disk_usage(out.parent).free
        if free < size_bytes:
            raise RefusedError(
                f"{out} needs {format_bytes(size_bytes)} and {out.parent} has {format_bytes(free)} free: "
                f"free some space or {elsewhere}"
            )
        try:
            yield temporary
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        if lack := lack_of_room(error):
            raise RefusedError(
                f"{out} could not be written (no partial file is left), {lack} or {elsewhere}"
            ) from error
        raise RefusedError(f"cannot write {out}: {error.strerror or error}; {elsewhere}") from error
