"""Traces of a running engine as files: the file is what was recorded, and a killed process loses little of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moestream
from answers import answer, prompt_tokens
from conftest import load, same_answer
from moestream.errors import RefusedError, UsageError
from moestream.stats import Step
from moestream.trace import TraceBuilder
from moestream.trace.read import read_trace
from moestream.trace.write import FLUSH_STEPS, TraceWriter, recover
from trace_steps import names_in, same, silent
from typed import typed

MECHANISM = "arena+uring:8+lru+gate:1"


class Both:
    """A file's writer, and beside it the same in memory."""

    def __init__(self, path: Path) -> None:
        self.sinks = TraceWriter(path), TraceBuilder()

    def begin(self, meta: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.begin(meta)

    def step(self, index: int, phase: str, step: Step, events: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.step(index, phase, step, events)

    def close(self, events: Mapping[str, Any] | None = None) -> None:
        for sink in self.sinks:
            sink.close(events)

    def discard(self) -> None:
        for sink in self.sinks:
            sink.discard()


@pytest.mark.parametrize("mechanism", [MECHANISM, "mapped+willneed"])
def test_the_file_is_what_was_recorded(mechanism: str, tiny, tmp_path: Path) -> None:
    both = Both(tmp_path / "t.parquet")
    with load(tiny("olmoe"), mechanism, trace=both) as llama:
        answer(llama, prompt_tokens(20, llama.n_vocab()), FLUSH_STEPS)
    found = read_trace(tmp_path / "t.parquet", silent)
    same(both.sinks[1].build(), found)
    assert found.identity == llama.model_info.identity
    assert len(found.slabs) > 0
    assert names_in(tmp_path) == ["t.parquet"]


def test_writing_changes_no_bit(tiny, stock, tmp_path: Path) -> None:
    with load(tiny("olmoe"), MECHANISM, trace=tmp_path / "t.parquet") as llama:
        same_answer(llama, stock, 20)
    steps, counted = read_trace(tmp_path / "t.parquet", silent).steps, llama.stats()["since_load"]
    for number, phase in enumerate(("prefill", "decode")):
        assert steps["seconds"][steps["phase"] == number].sum() == pytest.approx(counted[phase]["seconds"])


def wait_for(done: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_run_loses_at_most_its_last_batch(tiny, tmp_path: Path) -> None:
    path, progress = tmp_path / "t.parquet", tmp_path / "steps"
    script = (
        "import sys, moestream\n"
        "llama = moestream.Llama(sys.argv[1], mechanism='arena+lru', trace=sys.argv[2], n_ctx=2048)\n"
        "steps = open(sys.argv[3], 'w')\n"
        "for number, token in enumerate(llama.generate([1, 2, 3], temp=0.0)):\n"
        "    print(number, file=steps, flush=True)\n"
    )
    words = [sys.executable, "-c", script, str(tiny("olmoe")), str(path), str(progress)]
    with subprocess.Popen(words) as process:
        wait_for(lambda: progress.exists() and progress.read_text().count("\n") > 3 * FLUSH_STEPS)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    done = progress.read_text().count("\n")
    assert names_in(tmp_path) == ["steps", "t.parquet.partial"]
    said: list[str] = []
    found = read_trace(path, said.append)
    assert len(said) == 1
    steps = found.steps["step"].tolist()
    assert steps == list(range(len(steps)))
    assert done - FLUSH_STEPS <= len(steps) <= done + 1
    assert np.unique(found.routes.step).tolist() == steps
    assert recover(path) == len(steps)
    same(found, read_trace(path, silent))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_run_that_is_ended_while_it_loads_leaves_nothing(number: int, tiny, tmp_path: Path) -> None:
    script = (
        "import os, sys, threading, moestream\n"
        "def end(done, total):\n"
        "    os.kill(os.getpid(), int(sys.argv[3]))\n"
        "    threading.Event().wait()\n"
        "def work():\n"
        "    moestream.Llama(sys.argv[1], mechanism='arena+lru', trace=sys.argv[2], n_ctx=512, on_progress=end)\n"
        "thread = threading.Thread(target=work, daemon=True)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    words = [sys.executable, "-c", script, str(tiny("olmoe")), str(tmp_path / "t.parquet"), str(int(number))]
    done = subprocess.run(words, capture_output=True, timeout=60)
    assert done.returncode == -number
    assert names_in(tmp_path) == []


def test_a_model_that_does_not_load_leaves_nothing(tiny, tmp_path: Path) -> None:
    with pytest.raises(moestream.errors.BudgetError):
        moestream.Llama(tiny("olmoe"), ram=1, trace=tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="a trace is a Parquet file"):
        moestream.Llama(tiny("olmoe"), trace=tmp_path / "t.csv")
    model = tmp_path / "model.parquet"
    model.hardlink_to(tiny("olmoe"))
    with pytest.raises(UsageError, match="this is the model"):
        moestream.Llama(tiny("olmoe"), trace=model)
    assert names_in(tmp_path) == ["model.parquet"]


@pytest.mark.parametrize("room", [1000, 12_000])  # not even the schema fits; nor the first batch
def test_a_disk_that_fills_up_ends_the_run_with_one_line(room: int, tiny, tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from moestream.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
        "main(sys.argv[2:])\n"
    )
    path = tmp_path / "t.parquet"
    words = [
        "run",
        str(tiny("olmoe")),
        "-p",
        "hello",
        "-n",
        "60",
        "--mechanism",
        MECHANISM,
        "--trace",
        str(path),
    ]
    done = subprocess.run([sys.executable, "-c", script, str(room), *words], capture_output=True)
    assert done.returncode == RefusedError.exit_code
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(f"moestream: {path} could not be written, a file may not be that large: raise")
    assert names_in(tmp_path) == []


def test_run_writes_what_trace_shows(tiny, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    words = [
        "run",
        str(tiny("olmoe")),
        "-p",
        "hello",
        "-n",
        "8",
        "--mechanism",
        MECHANISM,
        "--trace",
        str(path),
    ]
    assert typed(*words).returncode == 0
    said = json.loads(typed("trace", "show", path, "--json").stdout)
    assert said["meta"]["mechanism"] == f"{MECHANISM}+anon"
    assert said["meta"]["command"][1:] == words
    assert said["decode"]["tokens"] == 7
    assert said["reads"]["demand"]["bytes"] > 0


def test_a_dense_model_has_no_trace_and_says_so(tmp_path: Path) -> None:
    from moestream.make.demo import dense_model_path

    with moestream.Llama(dense_model_path(), trace=tmp_path / "t.parquet", n_ctx=64) as llama:
        assert any("no trace is written" in line for line in llama.fallbacks)
        llama.eval([1, 2, 3])
    assert names_in(tmp_path) == []
