"""What a user names: only regular files are opened, and any name a file can have is one that can be shown."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError, UsageError
from moestream.nearest import nearest_file
from moestream.values import parse_json, without_controls

#: Of a name's length: what is put behind or before a file's name while it is written.
_ADDED = 24
#: No document that one of these commands reads is larger.
MOST_BYTES = 64 << 20


def exists(path: Path) -> bool:
    """Is something there? A name that no file can have is no file; ``Path.exists`` raises for some of them."""
    return os.path.exists(path)  # noqa: PTH110


def open_file(path: Path, remedy: str) -> BufferedReader:
    """``path`` opened for reading. Raises RefusedError when there is no such file (with the nearest name), for a
    directory, a pipe or a device (nobody waits for a pipe's writer) and for what cannot be read; the text ends in
    ``remedy``."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise RefusedError(f"{path} is not a regular file: {remedy}")
        return path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise RefusedError(f"there is no file {path}{nearest_file(path)}: {remedy}") from None
    except OSError as error:
        raise RefusedError(f"{path} cannot be read ({error.strerror or error}): {remedy}") from None


def check_listable(directory: Path, remedy: str) -> None:
    """Raises RefusedError where ``directory`` is none or nobody may list what is in it; the text ends in ``remedy``."""
    try:
        os.scandir(directory).close()
    except FileNotFoundError:
        raise RefusedError(f"{directory}: no such directory{nearest_file(directory)}; {remedy}") from None
    except NotADirectoryError:
        raise RefusedError(f"{directory} is not a directory; {remedy}") from None
    except OSError as error:
        raise RefusedError(f"{directory} cannot be read ({error.strerror or error}); {remedy}") from None


def read_bytes(path: Path, remedy: str, most_bytes: int = MOST_BYTES) -> bytes:
    """The whole file. Raises what ``open_file`` does, and RefusedError for a file larger than ``most_bytes``."""
    try:
        with open_file(path, remedy) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise RefusedError(f"{path} cannot be read ({error.strerror or error}): {remedy}") from None
    if len(content) > most_bytes:
        raise RefusedError(f"{path} is larger than the {most_bytes >> 20} MiB that are read: {remedy}")
    return content


def read_json(path: Path, remedy: str) -> Any:
    """The document of a file, its texts such as can be shown. Raises what ``read_bytes`` does, and RefusedError for
    what is no JSON."""
    try:
        return without_controls(parse_json(read_bytes(path, remedy)))
    except ValueError as error:
        raise RefusedError(f"{path}: {error}: {remedy}") from None


def followed(path: Path, option: str) -> Path:
    """What is to be replaced where ``option`` names ``path``: a link's target, never the link. Raises UsageError for a
    link that leads nowhere but to itself, a device or a pipe, and the file that this program's own output goes to."""
    real = Path(os.path.realpath(path))
    if os.path.islink(real):  # noqa: PTH114
        raise UsageError(f"{option} {path}: that link leads round in a circle, name a file")
    if exists(real) and not (real.is_file() or real.is_dir()):
        raise UsageError(f"{option} {path}: that is not a regular file, name one that may be replaced")
    if any(_is_open(real, descriptor) for descriptor in (0, 1, 2)):
        raise UsageError(f"{option} {path}: input or output of this command is that file, name another")
    return real


def _is_open(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def check_directory(path: Path, option: str) -> None:
    """Raises UsageError unless the file that ``option`` names lies in a directory that is there (a link's target): to
    be asked before any work is done."""
    real = Path(os.path.realpath(path))
    if not os.path.isdir(real.parent):  # noqa: PTH112
        raise UsageError(f"{option} {path}: there is no directory {path.parent}: make it first")
    most = os.pathconf(real.parent, "PC_NAME_MAX") - _ADDED
    if len(os.fsencode(real.name)) > most:
        raise UsageError(f"{option}: a name of at most {most} bytes is needed there, not {real.name[:40]}...")


def lack_of_room(error: OSError) -> str | None:
    """What is lacking where a file did not get all its bytes, with the remedy; None for any other error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk filled up: free some space"
    return "a file may not be that large: raise `ulimit -f`" if error.errno == errno.EFBIG else None


def advise(descriptor: int, advice: int, offset: int = 0, length: int = 0) -> None:
    """Tell the kernel how a file will be read. A system that takes no advice reads as well."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, offset, length, advice)


def printable(name: str) -> str:
    """A name as text that every font and file takes: what cannot be shown is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
