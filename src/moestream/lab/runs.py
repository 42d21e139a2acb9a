"""Run one arm: prepare the page cache and verify it, start a fresh process under its cap, keep its record.

Every record is appended to ``runs.jsonl`` as soon as its run has ended, with where it came from: what failed
is a record too.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moestream.box import Box, Cage, disk_rate
from moestream.box.page_cache import cached_bytes, drop, fill
from moestream.lab.bench_arms import FEWEST_TOKENS, PROMPTS, Arm
from moestream.lab.bench_paths import places, without_places
from moestream.lab.bench_reads import name_source
from moestream.lab.bench_watch import between, snapshot
from moestream.lab.validity import judge_all
from moestream.model import Model

#: Of a record; docs/formats/runs.md says what it holds.
SCHEMA = 1
RUNS = "runs.jsonl"

#: A run that takes longer is stuck: the slowest one known takes ten minutes.
TIMEOUT_S = 3600.0
_RATE_S = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.1


@dataclass(frozen=True)
class Setup:
    """What all runs of one benchmark share. ``batch``: most tokens of a prompt in one step, for every arm.
    ``trace``: each run of the engine leaves a trace beside its record. ``prompts``: texts by name. ``timeout_s``: a run
    that takes longer is stuck, and ended. ``limit_s``: a run that has made ``FEWEST_TOKENS`` ends after so
    long a decoding, its tokens all made or not."""

    model: Model
    threads: int
    ctx: int
    batch: int
    tokens: int
    caged: bool
    out: Path
    trace: bool = False
    prompts: Mapping[str, str] = field(default_factory=lambda: PROMPTS)
    timeout_s: float = TIMEOUT_S
    limit_s: float | None = None

    def tokens_of(self, arm: Arm) -> tuple[int, int]:
        """How many tokens a run must make, and how many at most."""
        most = arm.tokens or self.tokens
        return (most if self.limit_s is None else min(most, FEWEST_TOKENS)), most


class Executor(Protocol):
    """How a run is really made; a test's own makes none."""

    def clock(self) -> float:
        """Seconds from any moment on."""

    def prepare(self, setup: Setup, arm: Arm) -> dict[str, Any]:
        """Bring the page cache into the arm's state: ``cached_bytes_before`` (None: not known) and
        ``disk_bytes_per_s`` (None: could not be measured)."""

    def execute(self, setup: Setup, arm: Arm, words: list[str]) -> dict[str, Any]:
        """Start the process and wait for its end: ``returncode``, ``error``, ``cage_peak_bytes``,
        ``cage_anon_peak_bytes``, ``oom_kills`` and ``conditions``."""


def provenance(setup: Setup) -> dict[str, Any]:
    """Which code, on which versions, when."""
    names = ("moestream", "llama-cpp-python", "numpy")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "modified": _git("status", "--porcelain", "--untracked-files=no") not in ("", None),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "model": {
            "name": setup.model.paths[0].name,
            "bytes": setup.model.bytes,
            "identity": setup.model.identity,
        },
    }


def run_arm(
    setup: Setup,
    arm: Arm,
    prompt: str,
    *,
    round: int = 0,
    position: int = 0,
    again: bool = False,
    experiment: str | None = None,
    earlier: Sequence[dict[str, Any]] = (),
    executor: Executor | None = None,
) -> dict[str, Any]:
    """One run of ``arm`` on the prompt of that name; its record, already appended (docs/formats/runs.md).

    ``earlier``: the benchmark's records so far, which this one's tokens are compared with."""
    executor = executor or Processes()
    fewest, most = setup.tokens_of(arm)
    record = {
        "schema": SCHEMA,
        **provenance(setup),
        "experiment": experiment,
        "arm": arm.key,
        "kind": arm.kind,
        "asked": arm.label,
        "round": round,
        "position": position,
        "again": again,
        "cap_bytes": arm.cap_bytes,
        "caged": arm.cap_bytes is not None and setup.caged,
        "warm": arm.warm,
        "prompt": prompt,
        "threads": setup.threads,
        "ctx": setup.ctx,
        "batch": setup.batch,
        "tokens": fewest,
        "most_tokens": most,
        "limit_s": setup.limit_s,
        **executor.prepare(setup, arm),
    }
    started = executor.clock()
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "document.json"
        words = command(setup, arm, setup.prompts[prompt], result)
        if setup.trace and not arm.is_stock:
            record["trace"] = _trace_name(arm, prompt, round, position)
            words += ["--trace", str(setup.out / record["trace"])]
        record |= executor.execute(setup, arm, words)
        record["document"] = json.loads(result.read_text()) if result.exists() else None
    name_source(record)
    _make_shareable(record, places(setup.model.paths, setup.out))
    record["seconds"] = _tenths(executor.clock() - started)
    record["box"] = (record["document"] or {}).get("box")
    judged = judge_all([*earlier, record])[-1]
    append(setup.out / RUNS, judged)
    return judged


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a record's line to a file of them and have it on the disk: what is killed later cannot lose it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _tenths(seconds: float) -> float:
    return float(f"{seconds:.1f}")


def _trace_name(arm: Arm, prompt: str, round: int, position: int) -> str:
    """A name of its own for each run's trace, whatever its arm is called."""
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', arm.key)[:80]}-{prompt}-{round}.{position}.parquet"


def _make_shareable(record: dict[str, Any], directories: Sequence[str]) -> None:
    """Take out where on this machine the model lies: results are read elsewhere."""
    record["error"] = without_places(record["error"], directories)
    document = record["document"] or {}
    model, mechanism = document.get("model") or {}, document.get("mechanism") or {}
    if "paths" in model:
        model["paths"] = [Path(path).name for path in model["paths"]]
    if "fallbacks" in mechanism:
        mechanism["fallbacks"] = [without_places(text, directories) for text in mechanism["fallbacks"]]


def command(setup: Setup, arm: Arm, text: str, result: Path) -> list[str]:
    """The process of one run."""
    module = "stock" if arm.is_stock else "worker"
    words = [sys.executable, "-m", f"moestream.lab.{module}", str(setup.model.paths[0]), "-p", text]
    fewest, most = setup.tokens_of(arm)
    words += ["-n", str(most), "--threads", str(setup.threads), "--ctx", str(setup.ctx)]
    if setup.limit_s is not None:
        words += ["--seconds", str(setup.limit_s), "--fewest", str(fewest)]
    words += ["--batch", str(setup.batch), "--json", str(result)]
    if not arm.is_stock:
        # A cgroup's limit is whole pages: a cap that is not would be above it.
        ram = arm.cap_bytes // _PAGE * _PAGE if arm.cap_bytes is not None else arm.ram_bytes
        words += ["--ram", str(ram)] if ram is not None else []
        words += ["--mechanism", arm.mechanism] if arm.mechanism is not None else []
        words += ["--expert-bytes", str(arm.expert_bytes)] if arm.expert_bytes is not None else []
    return words


class Processes:
    """The executor that measures: a fresh process a run, in a memory cgroup where it has a cap."""

    def clock(self) -> float:
        return time.monotonic()

    def prepare(self, setup: Setup, arm: Arm) -> dict[str, Any]:
        paths = list(setup.model.paths)
        drop(paths)
        if arm.warm:
            fill(paths)
        # The disk's rate is taken now, past the page cache where that can be: it drifts by the minute.
        rate = disk_rate(paths[0], _RATE_S, max_age_s=0)
        return {
            "cached_bytes_before": cached_bytes(paths),
            "disk_bytes_per_s": rate.bytes_per_s if rate is not None else None,
        }

    def execute(self, setup: Setup, arm: Arm, words: list[str]) -> dict[str, Any]:
        mount = Box().filesystem(setup.model.paths[0])
        device = mount.device if mount is not None else ""
        caged = arm.cap_bytes is not None and setup.caged
        with (
            Cage(arm.cap_bytes or 0) if caged else contextlib.nullcontext() as cage,
            tempfile.TemporaryFile() as errors,
        ):
            start = cage.popen if cage is not None else subprocess.Popen
            before = snapshot(device)
            process = start(words, stdout=subprocess.DEVNULL, stderr=errors)
            anon, late = _watch(process, cage, setup.timeout_s)
            conditions = between(before, snapshot(device))
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip()[-2000:]
            if late:
                said = f"{said}\nit was stuck: ended after {setup.timeout_s:.0f} s".strip()
            return {
                "returncode": process.returncode,
                "error": said if process.returncode != 0 else "",
                "cage_peak_bytes": cage.peak_bytes() if cage is not None else None,
                "cage_anon_peak_bytes": anon,
                "oom_kills": cage.oom_kills() if cage is not None else None,
                "conditions": conditions,
            }


def _watch(
    process: subprocess.Popen[bytes], cage: Cage | None, timeout_s: float = TIMEOUT_S
) -> tuple[int | None, bool]:
    """Wait for the end: the most anonymous memory the cage was seen to hold, and whether it took too long and was
    killed.

    The cgroup's counter is read and not the process's page tables: walking those would hold up its page moves."""
    deadline = time.monotonic() + timeout_s
    peak, late = None, False
    try:
        while True:
            try:
                process.wait(_SAMPLE_S)
                return peak, late
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    late = True
                    process.kill()
                anon = cage.stat().get("anon") if cage is not None else None
                peak = anon if peak is None else max(peak, anon or 0)
    finally:
        # Whoever stops the benchmark stops its run: an orphan would disturb the next one.
        process.kill()
        process.wait()


def end_on_sigterm() -> None:
    """From now on SIGTERM ends this process as an exception does, so that no run and no cgroup is left behind."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _git(*words: str) -> str | None:
    """What git says of the checkout this code lies in; None where it is none."""
    try:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
