"""Runs that need a process of their own: under a cap, without a system call, on another mount."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import answers


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
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    return child_result(done)
