"""``moestream`` as it is typed, in a process of its own that need not import anything first: it is forked from one that
has. Importing takes longer than most of what is asked of a command.

How a process begins (``cli/start.py``), and what is set up for it beforehand (limits, an environment), is asked of a
real one.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import NoReturn, TextIO

_MOST_BYTES = 1 << 20
_LOCK = threading.Lock()


def typed(*words: object, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run([python, "-m", "moestream", *words], capture_output=True, text=True)`` would give."""
    line = [str(word) for word in words]
    with _saying() as stdout, _saying() as stderr, _LOCK:
        asked = json.dumps([str(cwd or Path.cwd()), dict(os.environ), *line]).encode()
        channel = _forking()
        socket.send_fds(channel, [asked], [0, stdout.fileno(), stderr.fileno()])
        process = int(channel.recv(_MOST_BYTES))
        channel.settimeout(timeout)
        try:
            code = int(channel.recv(_MOST_BYTES))
        except TimeoutError:
            os.kill(process, signal.SIGKILL)
            channel.settimeout(None)
            channel.recv(_MOST_BYTES)
            raise subprocess.TimeoutExpired(line, timeout) from None
        finally:
            channel.settimeout(None)
        for file in (stdout, stderr):
            file.seek(0)
        said = stdout.read(), stderr.read()
    return subprocess.CompletedProcess(["moestream", *line], code, *said)


def _saying() -> TextIO:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


@cache
def _forking() -> socket.socket:
    """The channel to a process that has imported everything; it ends with the channel."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()])
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _fork_for_each(channel: socket.socket) -> list[str]:
    """Returns the words of a command in a process of its own."""
    while True:
        asked, descriptors, *_ = socket.recv_fds(channel, _MOST_BYTES, 3)
        if not asked:
            sys.exit()
        process = os.fork()
        if process == 0:
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            channel.close()
            there, environment, *words = json.loads(asked)
            os.chdir(there)
            os.environ.clear()
            os.environ.update(environment)
            return words
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(str(process).encode())
        channel.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())


def _main() -> NoReturn:
    from moestream.cli.main import COMMANDS, main

    for name in COMMANDS:
        importlib.import_module(f"moestream.cli.{name.replace('-', '_')}")
    for module in ("moestream.engine", "moestream.assembly"):
        importlib.import_module(module)
    channel = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[1:] = _fork_for_each(channel)
    main()


if __name__ == "__main__":
    _main()
