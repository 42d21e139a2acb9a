"""Where the command begins: Ctrl-C ends it in one line even while it is still being imported."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, NoReturn

#: A shell's exit code for a program that Ctrl-C ended before it had anything to show.
INTERRUPTED = 130


def main() -> NoReturn:
    """``moestream.cli.main.main`` of the process's own command line."""
    # Not where it was started to be ignored.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, _leave)
    from moestream.cli.main import main

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def _leave(number: int, frame: Any) -> NoReturn:
    """Nothing is open yet. An exception would be a traceback, or lost in whatever is imported just then."""
    with contextlib.suppress(OSError):
        os.write(2, b"moestream: stopped\n")
    os._exit(INTERRUPTED)
