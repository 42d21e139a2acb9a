"""``moestream probe`` as it is typed: on a small model, on a directory, and with wrong words. No rate is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moestream.model import read_model
from moestream.probe import compute, disk, save_probe, saved_probe
from moestream.probe.run import run_probe
from typed import typed

SMALL = replace(disk.QUICK, rounds=1, case_bytes=1 << 20, case_s=0.02)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moestream"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes whose figures mean nothing, in a few seconds."""
    monkeypatch.setattr(disk, "QUICK", SMALL)
    monkeypatch.setattr(compute, "QUICK", replace(compute.QUICK, tokens=3, seconds=120.0))
    monkeypatch.setattr("moestream.probe.run.QUICK_S", 240.0)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return typed("probe", *words, timeout=600)


def test_a_probe_of_a_model_has_every_part_and_is_found_again(
    tiny: Callable[..., Path], cache: Path, small: None
) -> None:
    model = read_model(tiny("olmoe"))
    shares: list[float] = []
    found = run_probe(model, None, quick=True, progress=shares.append)
    assert found["disk_bytes_per_s"] == found["disk"]["random_bytes_per_s"] > 0
    assert found["disk"]["range_bytes"] >= model.banks[0].tensors[0].slab_bytes
    assert found["compute_s_per_token"] == found["compute"]["best"]["s_per_token"] > 0
    assert found["compute"]["best"]["prefill_tok_per_s"] > 0
    assert found["compute"]["model"] == "itself"
    assert set(found["counters"]["counted"]) >= {"buffered"}
    assert found["memory"]["limit_bytes"] > 0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    json.dumps(found)
    assert save_probe(found) is not None
    assert [path.name for path in cache.iterdir()] == [f"probe-{model.identity}.json"]
    assert saved_probe(model) == json.loads(json.dumps(found))


def test_a_probe_of_a_directory_leaves_nothing_and_serves_models_on_that_device(
    tiny: Callable[..., Path], tmp_path: Path, cache: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moestream.probe.sample.FILE_BYTES", 16 << 20)
    sizes: list[int] = []
    real = disk.Disk.measure
    monkeypatch.setattr(
        disk.Disk,
        "measure",
        lambda self, progress: sizes.append(self.sample.files[0].stat().st_size) or real(self, progress),
    )
    place = tmp_path / "place"
    place.mkdir()
    found = run_probe(None, place, quick=True)
    assert list(place.iterdir()) == []
    assert found["disk"]["what"] == "blocks"
    assert found["disk"]["sequential"]["start"]["read_bytes"] <= 4 << 20
    assert sizes == [16 << 20]
    assert found["compute_s_per_token"] is None
    assert found["model"] is None
    save_probe(found)
    model = read_model(tiny("olmoe"))
    if model.paths[0].stat().st_dev == place.stat().st_dev:
        again = saved_probe(model)
        assert again is not None
        assert again["disk_bytes_per_s"] == found["disk_bytes_per_s"]


def test_the_model_is_not_written_to(tiny: Callable[..., Path], cache: Path, small: None) -> None:
    path = tiny("olmoe")
    before = path.stat().st_mtime_ns, path.read_bytes()
    run_probe(read_model(path), None, quick=True)
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before


def test_the_command_prints_lines_writes_json_and_keeps_it(
    tiny: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    path, out = tiny("olmoe"), tmp_path / "out.json"
    done = run("--model", str(path), "--quick", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    names = [line.split("  ")[0].strip() for line in done.stdout.splitlines()]
    assert names[1:10] == [
        "sequential",
        "random",
        "page cache",
        "mapping",
        "device",
        "counters",
        "memory",
        "compute",
        "a token",
    ]
    assert all(name.startswith("doubt: ") for name in names[10:])
    document = json.loads(out.read_text())
    assert json.loads(next(cache.glob("probe-*.json")).read_text()) == document
    assert document["quick"] is True
    planned = typed("plan", path, "--ram", "1GiB", "--json")
    assert json.loads(planned.stdout)["probe"]["disk_bytes_per_s"] == document["disk_bytes_per_s"]


def refusals(path: Path, there: Path) -> Iterator[tuple[list[str], int, str]]:
    yield ["--model", str(path), "--dir", str(there)], 2, "one of the two"
    yield ["--model", str(there / "none.gguf")], 3, "none.gguf"
    yield ["--dir", str(there / "none")], 3, "no such directory"
    yield ["--model", str(path), "--json", str(there / "none" / "out.json")], 2, "there is no directory"
    yield ["--model", str(path), "--json", str(path)], 2, "that is a model"
    if os.path.ismount("/dev/shm"):
        yield ["--dir", "/dev/shm"], 3, "no disk to measure"


def test_wrong_words_are_one_line_and_write_nothing(
    tiny: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for words, code, text in refusals(tiny("olmoe"), there):
        done = run(*words)
        assert (done.returncode, done.stdout) == (code, ""), words
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    assert list(there.iterdir()) == []
    assert not cache.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(
    tiny: Callable[..., Path], tmp_path: Path, cache: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "moestream", "probe", "--model", str(tiny("olmoe")), "--quick"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_until(lambda: _maps_core(process.pid) or process.poll() is not None)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out == ""
    # Before it measures there is nothing to remove, and the signal's own way to end is the right one.
    assert process.returncode in (130, 143, -number)
    assert err in ("", "moestream: stopped\n")
    assert not cache.exists() or list(cache.iterdir()) == []


def _maps_core(pid: int) -> bool:
    """The process has come as far as reading files: the core opens the model it measures with."""
    try:
        handles = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(name.endswith(".gguf") for name in handles)


def _wait_until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.005)
