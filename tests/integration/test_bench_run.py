"""``moestream bench`` as it is typed, on a small model: every arm really runs, and a kill loses one run at most.

No rate is asserted: a small model on a busy machine has none worth it.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moestream.box import Cage
from moestream.lab.bench_journal import read_runs
from moestream.trace import Trace
from moestream.trace.read import read_trace
from typed import typed

#: Larger than the cap by so much that experts leave.
_SHAPE = "tiny,layers=8,experts=32,embd=512,heads=8,kv_heads=8,ff=1024,used=4"
_CAP = "150MB"
#: Stock takes seconds for a token where it does not fit, also for one of a prompt.
_PROMPTS = "One.\n---\nTwo.\n---\nThree.\n"


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("olmoe", _SHAPE, "Q4_K")


def command(model: Path, out: Path, *words: str) -> list[str]:
    # Few tokens: stock takes seconds for each where it does not fit.
    start = [sys.executable, "-m", "moestream", "bench", str(model), "--ram", _CAP, "--out", str(out)]
    return [*start, "-n", "5", "--ctx", "512", "--repeats", "1", *words]


def run(*words: Any) -> subprocess.CompletedProcess[str]:
    return typed(*command(*words)[3:], timeout=600)


def caged() -> bool:
    return Cage.available()[0]


def test_killed_at_any_moment_it_goes_on_and_shares_no_path(model: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text(_PROMPTS)
    words = ("--mechanisms", "arena/fresh+sync+lru,default", "--prompts", str(prompts), "--trace")
    with subprocess.Popen(command(model, out, *words), stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        begun = 0
        while begun < 3:
            line = bench.stderr.readline()
            assert line, "it ended by itself"
            begun += "begins" in line
        children = _children(bench.pid)
        bench.send_signal(signal.SIGKILL)
    assert children
    assert _gone(children), "a run outlived the benchmark that started it"
    before = read_runs(out / "runs.jsonl")
    assert len(before) == 2
    with (out / "runs.jsonl").open("a") as file:
        file.write('{"arm": "torn')
    done = run(model, out, *words, "--resume", "--share")
    assert done.returncode == 0, done.stderr
    records = read_runs(out / "runs.jsonl")
    assert records[:2] == before
    expected = {
        "stock",
        "mapped+fault+none+none+mapped",
        "arena/fresh+sync+lru+none+anon",
        "default",
        "resident",
    }
    assert {record["arm"] for record in records} == expected
    assert {record["position"] for record in records} == set(range(3 * (len(expected) + 1)))
    assert [record["invalid"] for record in records if not record["valid"]] == []
    assert done.stdout.count("| `") == len(expected)
    assert str(tmp_path) not in done.stdout
    assert str(model.parent) not in done.stdout
    for record in records:
        assert str(model.parent) not in json.dumps(record)
        if record["cap_bytes"] is not None and caged():
            assert record["document"]["box"]["limit_bytes"] <= record["cap_bytes"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["valid_runs"] == len(records)
    assert (out / "report.md").read_text().startswith(f"# {model.name} within 150 MB")
    assert {record["arm"] for record in records if record.get("trace")} == expected - {"stock"}
    for record in records:
        if record["arm"] != "stock":
            _check_trace(read_trace(out / record["trace"]), record)


def _check_trace(trace: Trace, record: dict[str, Any]) -> None:
    """It is of the run's model and of the run's own steps."""
    document = record["document"]
    assert trace.identity == record["model"]["identity"]
    tokens = document["prefill"]["tokens"] + document["decode"]["tokens"]
    assert sum(trace.steps["tokens"].tolist()) == tokens > 5


def test_ended_by_a_signal_it_sums_up_what_there_is(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--mechanisms", "default", "--trace", "--threads", "1")
    with subprocess.Popen(command(model, out, *words), stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        said = []
        while sum("begins" in line for line in said) < 2:
            said.append(bench.stderr.readline())
            assert said[-1], "it ended by itself"
        bench.terminate()
        last = bench.stderr.read()
    assert bench.returncode == 128 + signal.SIGTERM
    assert re.search(r"\d+ runs of \d arms: about \d+", "".join(said))
    assert f"go on with: moestream bench {model} --ram {_CAP}" in last
    assert "--trace" in last
    assert json.loads((out / "summary.json").read_text())["runs"] == 1
    assert (out / "report.md").exists()


def test_what_would_be_run_is_told_and_nothing_made(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(model, out, "--mechanisms", "all", "--dry-run")
    assert done.returncode == 0, done.stderr
    *arms, total = done.stdout.splitlines()
    counts = [int(line.split()[0]) for line in arms if " x " in line]
    assert re.fullmatch(rf"{sum(counts)} runs of {len(counts)} arms: about .*", total)
    assert not out.exists()


def test_wrong_words_are_refused_before_anything_is_made(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words, code, says in (
        (("--resume", "--force"), 2, "say one of the two"),
        (("--mechanisms", "aren"), 3, "did you mean arena"),
        (("--ctx", "64"), 3, "say --ctx"),
        (("--prompts", str(tmp_path / "absent")), 3, "there is no file"),
        (("--ram", "1MB"), 3, "the smallest cap that works"),
    ):
        done = run(model, out, *words)
        assert done.returncode == code, done.stderr
        assert re.search(says, done.stderr)
        assert len(done.stderr.splitlines()) == 1
        assert not out.exists()


def _children(pid: int) -> list[int]:
    """The processes a process has started, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return [int(child) for child in found]
        time.sleep(0.02)
    return []


def _gone(pids: list[int]) -> bool:
    """Do they all end within a minute?"""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    """A process that has ended and that nobody has waited for is gone."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
