"""llama.cpp while it loads a model or makes a context: what it logs is kept, and what it refuses is one line.

ggml's assertions end the process. Inside ``loading`` one that fails is a failed load like any other (see
core/include/moestream/assert_guard.h), so a header with odd numbers costs its caller an error and nothing more.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moestream.binding import binding_version, libllama_path, llama_cpp, low
from moestream.core import _core
from moestream.errors import AbiError, ModelError
from moestream.templates import templates_read_late
from moestream.version import INSTALL_TESTED

_UNKNOWN_ARCHITECTURE = re.compile(r"unknown model architecture: '([^']*)'")
_ERROR_LEVEL, _CONTINUED = 4, 5
#: One log callback serves the whole process.
_log_lock = threading.Lock()


class Log:
    """llama.cpp's log lines as they come, all of them and those of its errors. ``echo``: the binding gets them too."""

    def __init__(self, echo: bool = False) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.echo = echo
        self._begun = ""
        self._error = False

    def take(self, level: int, text: bytes, data: Any = None) -> None:
        """One call of llama.cpp's: whole lines, or a piece of one that a later call continues."""
        if level != _CONTINUED:
            self._error = level == _ERROR_LEVEL
        self._begun += text.decode("utf-8", "replace")
        *whole, self._begun = self._begun.split("\n")
        self.lines += whole
        if self._error:
            self.errors += whole

    def reason(self) -> str:
        """The first error, which is the cause; the later ones say who gave up because of it."""
        for line in self.errors:
            text = re.sub(r"^\w+: ", "", line).removeprefix("error loading model: ").strip()
            if text:
                return text
        return ""


#: The logs being kept, by the thread that runs inside llama.cpp.
_logs: dict[int, Log] = {}


def _dispatch(level: int, text: bytes, data: Any) -> None:
    log = _logs.get(threading.get_ident())
    if log is not None:
        log.take(level, text)
    if log is None or log.echo:
        llama_cpp._logger.llama_log_callback(level, text, data)


#: Never freed: llama.cpp may be inside it on one thread while another ends its capture.
_CALLBACK = low.llama_log_callback(_dispatch)


@contextmanager
def captured_log(echo: bool = False) -> Iterator[Log]:
    """What llama.cpp logs on this thread goes to the value while inside; other threads' lines to the binding."""
    log = Log(echo)
    with _log_lock:
        _logs[threading.get_ident()] = log
        low.llama_log_set(_CALLBACK, ctypes.c_void_p(0))
        try:
            yield log
        finally:
            low.llama_log_set(llama_cpp._logger.llama_log_callback, ctypes.c_void_p(0))
            del _logs[threading.get_ident()]


@contextmanager
def loading(path: str | Path, echo: bool = False) -> Iterator[Log]:
    """Around llama.cpp's load of a model, and around what makes a context of it. A ValueError, which is how the binding
    and callers inside say that llama.cpp gave nothing back, becomes a ModelError that names the file and the cause.
    """
    try:
        asserts = _core.GuardedAsserts(libllama_path())
    except _core.CoreError as error:
        raise AbiError(f"{error.args[1]}: {INSTALL_TESTED}") from None
    # One load at a time holds the log, and so what the binding reads templates with.
    with asserts, captured_log(echo) as log, templates_read_late(path):
        try:
            yield log
        except ValueError as error:
            raise ModelError(f"{path}: {_complaint(log, str(error))}") from None


def failed_assertion() -> str:
    """What made the load that this thread is in, or was in last, fail; "" where it was no assertion."""
    return _core.failed_assertion()


def _complaint(log: Log, error: str) -> str:
    if failed_assertion():
        return (
            f"llama.cpp asserts on the numbers of its header: {failed_assertion()}; "
            "the file is damaged or was made wrong: download it again, or make it anew"
        )
    unknown = next((m for line in log.errors if (m := _UNKNOWN_ARCHITECTURE.search(line))), None)
    if unknown:
        return (
            f"this llama.cpp (llama-cpp-python {binding_version()}) does not know architecture "
            f"{unknown[1]}: install a newer moestream"
        )
    reason = log.reason() or error or "it gives no reason"
    remedy = ": raise `ulimit -n`" if os.strerror(errno.EMFILE) in reason else ""
    return f"llama.cpp cannot load it: {reason}{remedy}"
