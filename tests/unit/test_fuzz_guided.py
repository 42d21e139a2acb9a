"""Guided fuzzing: what counts as a find, what its seeds reach, and a few seconds of it where atheris is installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "fuzz_guided.py"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOL.parent)
    return importlib.import_module("fuzz_guided")


def test_seeds_are_models(fuzz: ModuleType, tmp_path: Path) -> None:
    from moestream.model import read_model

    headers, path = fuzz.seeds(tmp_path)
    shards = []
    for header in headers:
        assert len(header) * 3 < fuzz.MOST_BYTES
        assert fuzz.complaint(header, path) == ""
        shards.append(len(read_model(path).shards))
    assert sorted(shards) == [1, 1, 1, 3]
    assert {"general.alignment", "split.tensors.count", "blk.1.ffn_gate_up_exps.weight"} <= fuzz.words(
        headers
    )


def test_what_is_a_find(fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import moestream.model
    from moestream.errors import ModelError

    headers, path = fuzz.seeds(tmp_path)
    assert fuzz.complaint(headers[0][:100], path) == ""  # a ModelError
    fuzz.complaint(headers[0], path)
    model = moestream.model.read_model(path)
    lying = dataclasses.replace(model, shards=(dataclasses.replace(model.shards[0], bytes=1000),))

    def answered(answer: object) -> str:
        def read(path: Path) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer() if callable(answer) else answer

        with monkeypatch.context() as patched:
            patched.setattr(moestream.model, "read_model", read)
            return fuzz.complaint(headers[0], path)

    def slow() -> object:
        end = time.process_time() + 1.1
        while time.process_time() < end:
            pass
        return model

    assert answered(model) == ""
    assert answered(KeyError("arch")) == "KeyError: 'arch'"
    assert answered(ModelError("one\ntwo")) == "an error of several lines"
    assert answered(lying).endswith("lies outside its file")
    assert answered(slow).startswith("took 1.")


def test_without_atheris_it_says_how_to_get_it(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.modules['atheris'] = None; del sys.argv[0]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(TOOL)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"guided fuzzing needs atheris: \S+ -m pip install atheris\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_a_few_seconds(tmp_path: Path) -> None:
    words = [sys.executable, str(TOOL), "--seconds", "4"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(
        r"(\d+) headers in 4 s: branches (\d+) -> (\d+), .* (\d+) headers kept, 0 finds", done.stdout
    )
    assert counted, done.stdout
    headers, seeds, reached, kept = map(int, counted.groups())
    assert headers > kept >= 4
    assert reached >= seeds > 50
