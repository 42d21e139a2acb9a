"""Runs that need a process of their own: under a cap, without a system call, on another mount."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import answers

#: prctl of a seccomp filter that answers calls with an error and allows the rest: those of a number, or, where bits are
#: given, those of them that have one of the bits in an argument (its lower half, first in memory).
_REFUSING = """
import ctypes, struct
calls, error = {calls}, {error}
code = [(0x20, 0, 0, 0)]
for number, argument, bits in calls:
    look = [(0x20, 0, 0, 16 + 8 * argument), (0x45, 0, 1, bits)] if bits else []
    code += [(0x15, 0, len(look) + 1, number), *look, (0x06, 0, 0, 0x00050000 | error), (0x20, 0, 0, 0)]
code.append((0x06, 0, 0, 0x7FFF0000))
filter_ = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(code), ctypes.addressof(filter_))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program)) == 0, ctypes.get_errno()
"""


def refusing(calls: Sequence[int | tuple[int, int, int]], error: int) -> str:
    """Python for a child's ``first``: from then on the kernel answers these system calls with ``error``. A call is a
    number, or ``(number, argument, bits)``: only where the argument has one of the bits."""
    whole = [call if isinstance(call, tuple) else (call, 0, 0) for call in calls]
    return _REFUSING.format(calls=whole, error=error)


def child_command(path: Path, ram: int | str, mechanism: str, **question: Any) -> list[str]:
    """The command of a fresh process that loads a model, answers and prints what happened.

    ``first`` is Python that it runs before anything else is imported; ``length`` and ``steps`` are the
    prompt's and the answer's. ``child_result`` reads what it prints.
    """
    asked = {
        "first": "",
        "strict": False,
        "i_know": False,
        "length": 7,
        "steps": 6,
        "governor": False,
        **question,
    }
    asked |= {"path": str(path), "ram": ram, "mechanism": mechanism}
    return [sys.executable, answers.__file__, json.dumps(asked)]


def child_result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_child(
    path: Path, ram: int | str, mechanism: str, prefix: tuple[str, ...] = (), **question: Any
) -> dict[str, Any]:
    command = [*prefix, *child_command(path, ram, mechanism, **question)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), timeout=600, check=False
    )
    return child_result(done)


def python(program: str, *words: object, prefix: tuple[str, ...] = ()) -> str:
    """What a program in a fresh process prints."""
    command = [*prefix, sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
