"""The cheap checks a file gets before ggml sees it: whatever goes wrong with a download has its own sentence.

This walks the header without keeping any of it. What the header *means* is ggml's word (``ggml.py``); this
module only makes sure that ggml is given a GGUF whose header is whole, and whose counts make nobody allocate
for nothing.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path
from typing import BinaryIO

from moestream.errors import ModelError
from moestream.files import advise
from moestream.model.locate import DEMO
from moestream.nearest import nearest_file

# Real models have some 50 keys, at most 50,000 tensors (one an expert), 300,000 tokens and 30 MB of header: room above
# that, but none for a count that is really eight bytes of something else, or whose walk would take seconds.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_STRING = 1 << 27
MAX_ARRAY = 1 << 26
MAX_HEADER = 1 << 30

_CHUNK = 1 << 18
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PIECE = re.compile(r"[.-](part-?\d+of\d+|part-?(?:\d+|[a-z]{1,2})|split-[a-z]+)$")


class _PastEndError(Exception):
    """The walk ran out of file."""


class _Cursor:
    """Little-endian reads from the front of a file; holds one chunk, whatever the header's size."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._chunk = b""
        self._base = 0  # file offset of the chunk's first byte
        self._at = 0  # position in the chunk

    @property
    def position(self) -> int:
        return self._base + self._at

    @property
    def remaining(self) -> int:
        return self._size - self.position

    def _need(self, count: int) -> None:
        if self._at + count <= len(self._chunk):
            return
        self._base, self._at = self.position, 0
        self._file.seek(self._base)
        self._chunk = self._file.read(max(count, _CHUNK))
        if len(self._chunk) < count:
            raise _PastEndError

    def take(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return self._chunk[self._at - count : self._at]

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def skip(self, count: int) -> None:
        if count > self.remaining:
            raise _PastEndError
        self._at += count

    def skip_strings(self, count: int) -> None:
        """Skips ``count`` strings. The one loop here that runs 300,000 times, hence the local names."""
        chunk, at, last = self._chunk, self._at, len(self._chunk) - 8
        length = _U64.unpack_from
        for _ in range(count):
            if at > last:
                self._at = at
                if self.remaining < 8:
                    raise _PastEndError
                self._need(8)
                chunk, at, last = self._chunk, self._at, len(self._chunk) - 8
            at += 8 + length(chunk, at)[0]
        self._at = at
        if self.remaining < 0:
            raise _PastEndError


def check_file(path: Path) -> None:
    """Raises ModelError unless ``path`` is a readable file with a whole little-endian GGUF header.

    Whether the tensor data behind the header is complete needs the tensors' sizes and is not known here.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            found = sorted(path.glob("*.gguf"))
            remedy = f"name the file, such as {found[0]}" if found else "name a .gguf file"
            raise ModelError(f"{path}: is a directory; {remedy}")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path}: is not a regular file; name a .gguf file on disk")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # No read-ahead: some disks' reaches megabytes into the data behind the header. What is walked here is in
            # the page cache for the readers after us.
            advise(file.fileno(), os.POSIX_FADV_RANDOM)
            _check_kind(path, size, file.read(512))
            _walk(path, _Cursor(file, size), size)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file{nearest_file(path, [DEMO])}") from None
    except PermissionError:
        raise ModelError(f"{path}: permission denied; the file must be readable by this user") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None


def _check_kind(path: Path, size: int, head: bytes) -> None:
    """Refuses what is not a GGUF from its first bytes, and says what it is instead where that is known."""
    if size == 0:
        raise ModelError(f"{path}: is empty (0 bytes); download it again")
    if _PIECE.search(path.name):
        raise ModelError(
            f"{path}: is one piece of a file that was cut up; join the pieces in order: "
            f"cat {_PIECE.sub('', path.name)}* > model.gguf"
        )
    if not b"GGUF".startswith(head[:4]):
        raise ModelError(f"{path}: is not a GGUF file{_what_it_is(head)}")
    if len(head) < 8:
        raise _truncated(path, "the header", size)
    version = _U32.unpack_from(head, 4)[0]
    if version & 0xFFFF == 0 and version != 0:
        raise ModelError(f"{path}: is a big-endian GGUF; get the little-endian file of this model")
    if version not in _VERSIONS:
        raise ModelError(
            f"{path}: is GGUF version {version}, this program reads versions 2 and 3; convert the model again"
        )


def _what_it_is(head: bytes) -> str:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<!--", b"<head")):
        return " but a web page (HTML: a login or error page) saved under this name; download it again"
    if text.startswith(b"version https://git-lfs"):
        return " but a Git LFS pointer; run git lfs pull"
    if text.startswith(b"pk\x03\x04"):
        return " but a zip archive"
    if head[8:10] == b'{"':
        return " but a safetensors file; convert it to GGUF"
    return f" (it starts with {head[:4]!r}, not b'GGUF')"


def _truncated(path: Path, where: str, size: int) -> ModelError:
    return ModelError(f"{path}: is truncated in {where} (the file ends at byte {size}); download it again")


def _implausible(path: Path, what: str) -> ModelError:
    return ModelError(f"{path}: is corrupt: implausible {what} in the header; download it again")


def _walk(path: Path, cursor: _Cursor, size: int) -> None:
    """Walks the keys and the tensor table to their end; raises ModelError where they do not fit the file."""
    where = "the header"
    try:
        cursor.skip(8)
        n_tensors, n_keys = cursor.u64(), cursor.u64()
        if n_keys > MAX_KEYS:
            raise _implausible(path, f"number of metadata keys {n_keys}")
        if n_tensors > MAX_TENSORS:
            raise _implausible(path, f"number of tensors {n_tensors}")
        for number in range(n_keys):
            where = f"the header (metadata key {number + 1} of {n_keys})"
            _skip_key(path, cursor)
            if cursor.position > MAX_HEADER:
                raise _implausible(path, f"metadata of more than {MAX_HEADER} bytes")
        for number in range(n_tensors):
            where = f"the tensor table (tensor {number + 1} of {n_tensors})"
            if _skip_length(path, cursor, f"name of tensor {number + 1}") == 0:
                raise _implausible(path, f"empty name of tensor {number + 1}")
            dimensions = cursor.u32()
            if dimensions > 8:
                raise _implausible(path, f"number of dimensions {dimensions} of tensor {number + 1}")
            cursor.skip(8 * dimensions + 4 + 8)
    except _PastEndError:
        raise _truncated(path, where, size) from None


def _skip_length(path: Path, cursor: _Cursor, what: str) -> int:
    """Skips one string and returns its length."""
    length = cursor.u64()
    if length > MAX_STRING:
        raise _implausible(path, f"length {length} of the {what}")
    cursor.skip(length)
    return length


def _skip_key(path: Path, cursor: _Cursor) -> None:
    """Skips one key and its value."""
    length = cursor.u64()
    if not 0 < length <= 0xFFFF:
        raise _implausible(path, f"length {length} of a metadata key")
    key = cursor.take(length).decode("utf-8", "replace")
    kind, count = cursor.u32(), 1
    if kind == _ARRAY:
        kind, count = cursor.u32(), cursor.u64()
        if count > MAX_ARRAY:
            raise _implausible(path, f"length {count} of the array {key!r}")
        if kind == _STRING:
            cursor.skip_strings(count)
            return
    if kind == _STRING:
        _skip_length(path, cursor, f"value of {key!r}")
    elif kind in _VALUE_BYTES:
        cursor.skip(_VALUE_BYTES[kind] * count)
    else:
        raise _implausible(path, f"type {kind} of the metadata key {key!r}")
