"""A share of ``make fuzz``: what is wrong with a header is a ModelError in one line, soon and in little memory."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ggufs import moe_tensors

TOOL = Path(__file__).parents[2] / "tools" / "fuzz_header.py"


def test_two_thousand_wrong_headers() -> None:
    seed = random.randrange(10**6)  # named in what is printed, so that it can be had again
    words = [sys.executable, str(TOOL), "--cases", "2000", "--seed", str(seed)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2000 headers, seed {seed}" in done.stdout


def test_what_is_no_model_error_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOL.parent)
    fuzz = importlib.import_module("fuzz_header")
    files = fuzz.bases(tmp_path)
    assert fuzz.run_case(3, 0, files, tmp_path / "case.gguf") == ""

    def broken(path: Path) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(fuzz, "read_model", broken)
    assert fuzz.run_case(3, 0, files, tmp_path / "case.gguf") == "ZeroDivisionError: by nothing"
    monkeypatch.setattr(fuzz, "read_model", lambda path: time.sleep(1.2 * fuzz.SECONDS))
    assert fuzz.run_case(3, 0, files, tmp_path / "case.gguf").startswith("took 1.")


def test_what_takes_more_memory_than_a_case_may_is_a_finding() -> None:
    script = """
import sys, tempfile
from pathlib import Path
import fuzz_header
with tempfile.TemporaryDirectory() as directory:
    files = fuzz_header.bases(Path(directory))
    fuzz_header._limit()
    for size in (fuzz_header.BYTES // 2, fuzz_header.BYTES * 5 // 4):
        fuzz_header.read_model = lambda path: bytearray(size)
        print(fuzz_header.run_case(3, 0, files, Path(directory, "case.gguf")))
"""
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.splitlines() == ["", "MemoryError: "], done.stderr


def test_every_number_of_a_header_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOL.parent)
    fuzz = importlib.import_module("fuzz_header")
    plain = fuzz.bases(tmp_path)[0]
    tensors = moe_tensors()
    # Four in front; of a key its length and its value's type; of a tensor its name's, its extents, type and offset.
    assert len(plain.fields) > 4 + 2 * 9 + sum(4 + len(shape) for _, shape, _ in tensors)
    assert plain.fields[0] == fuzz.Field(0, 4)
    assert all(field.at >= 0 and field.at + field.width <= plain.header for field in plain.fields)
