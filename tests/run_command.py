"""``moestream run`` as a user starts it, for a model that fits a test: its words, its caps, its refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typed import typed

#: A prompt that this random model goes on from for hundreds of tokens.
PROMPT = "Once upon a time"
CONTEXT = "512"


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "moestream", "run", *(str(word) for word in words)]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return typed("run", *words)


def refusal(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of a refusal that came before any text."""
    assert done.returncode == code, done
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("moestream: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def smallest_cap(path: Path) -> str:
    """The least cap, as the refusal of too small a one names it."""
    said = refusal(run(path, "-p", PROMPT, "--ram", "1MB", "--mechanism", "arena", "--ctx", CONTEXT), 3)
    found = re.search(r"the smallest cap that works is (\d+MB)", said)
    assert found is not None, said
    return found[1]


def evicting_cap(path: Path) -> str:
    """A cap that holds some of the experts."""
    return f"{int(smallest_cap(path).removesuffix('MB')) + 8}MB"
