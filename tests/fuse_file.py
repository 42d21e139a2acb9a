"""A file system in user space with one file in it, told how to behave: the kernel's own FUSE protocol, no library.

As a program: ``fuse_file.py FILE DIRECTORY HOW COMMAND...`` shows FILE at DIRECTORY/NAME while COMMAND runs, and exits
with its code. Where that cannot be, a file ``failed`` beside FILE says why, and COMMAND runs all the same. ``HOW`` is a
JSON object of ``Behaviour``'s fields.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

_IN, _OUT = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _OPENDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 25, 26, 27, 29, 36, 42
_SILENT = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_ROOT, _FILE = 1, 2
_ASYNC_READ, _MAX_PAGES, _PAGES = 1, 1 << 22, 256
_DIRECT_IO = 1
_REQUEST_BYTES = (1 << 20) + 8192


@dataclass(frozen=True)
class Behaviour:
    """``kind``: the name in mountinfo. ``direct_io``: the kernel caches nothing and shares no mapping. ``no_direct``:
    an error number for reads past the page cache. Of reads in ``watched`` (first byte, end) the first ``healthy`` work
    and then ``times`` fail, and the answer to every ``every``-th takes ``delay_s``, while others go past it. ``tally``:
    a file that holds how many there were; ``short_of`` such a file's number by ``healthy``: so many work.
    ``overtaken``: a file that holds how many answers went past one that took its time."""

    kind: str = "fuse.test"
    direct_io: bool = False
    no_direct: int = 0
    watched: tuple[int, int] | None = None
    healthy: int = 0
    times: int = 0
    delay_s: float = 0.0
    every: int = 1
    tally: str = ""
    overtaken: str = ""
    short_of: str = ""
    error: int = errno.EIO


class Served:
    """The requests for one file, answered one after another but for those that take their time."""

    def __init__(self, file: Path, how: Behaviour) -> None:
        self._name, self._how, self._met = file.name.encode(), how, 0
        self._late = False
        self._waiting: list[threading.Timer] = []
        self._overtaken = 0
        self._fd = os.open(file, os.O_RDONLY)
        self._answers = {
            _INIT: self._init,
            _LOOKUP: self._lookup,
            _GETATTR: self._getattr,
            _OPEN: lambda node, body: struct.pack("=QII", 0, _DIRECT_IO * self._how.direct_io, 0),
            _OPENDIR: lambda node, body: struct.pack("=QII", 0, 0, 0),
            _READ: self._read,
            _STATFS: lambda node, body: struct.pack("=5Q10I", 0, 0, 0, 2, 0, 4096, 255, 4096, *[0] * 7),
            _FLUSH: lambda node, body: b"",
            _RELEASE: lambda node, body: b"",
            _RELEASEDIR: lambda node, body: b"",
        }

    def serve(self, device: int) -> None:
        """Until the file system is unmounted."""
        while True:
            try:
                request = os.read(device, _REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return
            _, code, unique, node, *_ = _IN.unpack_from(request)
            if code in _SILENT:
                continue
            try:
                answer, failed = self._answers[code](node, request[_IN.size :]), 0
            except KeyError:
                answer, failed = b"", errno.ENOSYS
            except OSError as error:
                answer, failed = b"", error.errno or errno.EIO
            self._give(device, _OUT.pack(_OUT.size + len(answer), -failed, unique) + answer)

    def _give(self, device: int, answer: bytes) -> None:
        self._waiting = [timer for timer in self._waiting if timer.is_alive()]
        if self._late:
            self._late = False
            self._waiting.append(threading.Timer(self._how.delay_s, _send, (device, answer)))
            self._waiting[-1].start()
            return
        if self._waiting and self._how.overtaken:
            self._overtaken += 1
            _note(self._how.overtaken, self._overtaken)
        _send(device, answer)

    def _init(self, node: int, body: bytes) -> bytes:
        flags = _ASYNC_READ | _MAX_PAGES
        return struct.pack("=IIIIHHIIHHI", 7, 31, 1 << 20, flags, 12, 9, 1 << 20, 1, _PAGES, 0, 0) + bytes(28)

    def _attributes(self, node: int) -> bytes:
        found = os.fstat(self._fd)
        whole = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        seconds, rest = [time // 10**9 for time in whole], [time % 10**9 for time in whole]
        mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o444
        size = 0 if node == _ROOT else found.st_size
        return _ATTRIBUTES.pack(node, size, -(-size // 512), *seconds, *rest, mode, 1, 0, 0, 0, 4096, 0)

    def _lookup(self, node: int, body: bytes) -> bytes:
        if body.rstrip(b"\0") != self._name:
            raise OSError(errno.ENOENT, "no such file")
        return struct.pack("=QQQQII", _FILE, 0, 60, 60, 0, 0) + self._attributes(_FILE)

    def _getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("=QII", 60, 0, 0) + self._attributes(node)

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, size, _, _, flags = struct.unpack_from("=QQIIQI", body)
        if self._how.no_direct and flags & os.O_DIRECT:
            raise OSError(self._how.no_direct, "not past the page cache")
        begin, end = self._how.watched or (0, 0)
        if offset < end and begin < offset + size:
            self._meet()
        return os.pread(self._fd, size, offset)

    def _meet(self) -> None:
        """One more read of what is watched. Raises OSError for those that are to fail."""
        how = self._how
        self._met += 1
        if how.tally:
            _note(how.tally, self._met)
        healthy = int(Path(how.short_of).read_text()) - how.healthy if how.short_of else how.healthy
        if 0 < self._met - healthy <= how.times:
            raise OSError(how.error, "broken")
        self._late = how.delay_s > 0 and self._met % how.every == 0


def _note(path: str, number: int) -> None:
    """Whoever reads it meets one number or the next."""
    fresh = Path(f"{path}.new")
    fresh.write_text(str(number))
    fresh.replace(path)


def _send(device: int, answer: bytes) -> None:
    try:
        os.write(device, answer)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # nobody waits for it any more
            raise


def mounted(directory: Path, kind: bytes) -> int:
    """The descriptor the kernel asks through. Raises OSError."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(kind, os.fsencode(directory), kind, 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount of {kind.decode()} is refused")
    return device


def main(file: Path, directory: Path, how: Behaviour, command: list[str]) -> int:
    try:
        device = mounted(directory, how.kind.encode())
    except OSError as error:
        file.with_name("failed").write_text(str(error))
        return subprocess.run(command, check=False).returncode
    server = threading.Thread(target=Served(file, how).serve, args=(device,))
    server.start()
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        # MNT_DETACH: the server ends when nobody has it open.
        ctypes.CDLL(None).umount2(os.fsencode(directory), 2)
        server.join()


if __name__ == "__main__":
    _, source, at, behaviour, *rest = sys.argv
    wanted = json.loads(behaviour)
    if wanted.get("watched"):
        wanted["watched"] = tuple(wanted["watched"])
    sys.exit(main(Path(source), Path(at), Behaviour(**wanted), rest))
