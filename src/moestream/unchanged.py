"""Has somebody written into a model's files while they are in use? Bytes read then would be of two models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moestream.errors import ModelError, ReadError

#: (device, inode), size, nanoseconds of the last write.
Stamp = tuple[tuple[int, int], int, int]
_SAID = "{} was written to while it was in use: load the model again"


class Unchanged:
    """Files as they were when their headers were read, each with its ``stamp`` of then. One that is removed or replaced
    by another (a download, a rename) does no harm: what is open stays what it was."""

    def __init__(self, stamps: Mapping[Path, Stamp | None]) -> None:
        self._known = dict(stamps)

    def check_loaded(self) -> None:
        """Once llama.cpp has opened them, too: raises ModelError when one of the files is another by now, of which it
        may have read the header, or was written to. One that was removed is what it was, or was missed."""
        for path, before in self._known.items():
            now = stamp(path)
            if now is not None and now != before:
                raise ModelError(f"{path} was replaced or written to while it was loaded: load it again")

    def check(self) -> list[str]:
        """Names the files that are no longer where they were, each once. Raises ReadError when one of the others has
        another size or was written to."""
        said = []
        for path, before in list(self._known.items()):
            now = stamp(path)
            if now == before:
                continue
            if _same_file(before, now):
                raise ReadError(_SAID.format(path))
            del self._known[path]
            what = "was removed" if now is None else "is another file now"
            said.append(f"{path} {what}: the model goes on with the one it was loaded from")
        return said

    def check_step(self) -> None:
        """Raises ReadError when one of the files was written to since the call began. One that has only shrunk is left
        to the reads, which name what they miss of it."""
        for path, before in self._known.items():
            now = stamp(path)
            if now != before and _same_file(before, now) and _bytes(now) >= _bytes(before):
                raise ReadError(_SAID.format(path))


def stamp(path: Path) -> Stamp | None:
    """Which file it is, its size and when it was last written to; None where there is none to be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns


def _same_file(before: Stamp | None, now: Stamp | None) -> bool:
    return before is not None and now is not None and before[0] == now[0]


def _bytes(of: Stamp | None) -> int:
    return of[1] if of is not None else 0
