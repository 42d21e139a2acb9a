"""Has somebody written into a model's files while they are in use? Bytes read then would be of two models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moestream.errors import ReadError

#: (device, inode), size, nanoseconds of the last write.
Stamp = tuple[tuple[int, int], int, int]


class Unchanged:
    """The files as they are now. One that is replaced by another (a download, a rename) does no harm: what is open
    stays what it was."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._known = [(path, stamp(path)) for path in paths]

    def check(self) -> None:
        """Raises ReadError when one of the files has another size or was written to."""
        for path, before in self._known:
            now = stamp(path)
            if now is None or before is None or now[0] != before[0]:
                continue  # removed or replaced
            if now != before:
                raise ReadError(f"{path} was written to while it was in use: load the model again")


def stamp(path: Path) -> Stamp | None:
    """Which file it is, its size and when it was last written to; None where there is none to be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns
