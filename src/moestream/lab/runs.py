"""Run one arm: prepare the page cache and verify it, start a fresh process under its cap, keep its record.

Every record is appended to ``runs.jsonl`` as soon as its run has ended, with where it came from: what failed
is a record too.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box import Cage, disk_rate
from moestream.box.page_cache import cached_bytes, drop, fill
from moestream.lab.bench_arms import PROMPTS, Arm
from moestream.model import Model

#: A run that takes longer is stuck: the slowest one known takes ten minutes.
TIMEOUT_S = 3600.0
_RATE_S = 1.0
_SAMPLE_S = 0.1


@dataclass(frozen=True)
class Setup:
    """What all runs of one benchmark share. ``batch``: most tokens of a prompt in one step, for every arm.
    ``trace``: each run of the engine leaves a trace beside its record."""

    model: Model
    threads: int
    ctx: int
    batch: int
    tokens: int
    caged: bool
    out: Path
    trace: bool = False


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


def run_arm(setup: Setup, arm: Arm, prompt: str) -> dict[str, Any]:
    """One run of ``arm`` on the prompt of that name; its record, already appended."""
    record = {
        **provenance(setup),
        "arm": arm.key,
        "asked": arm.label,
        "cap_bytes": arm.cap_bytes,
        "caged": arm.cap_bytes is not None and setup.caged,
        "prompt": prompt,
        "threads": setup.threads,
        "ctx": setup.ctx,
        "batch": setup.batch,
        "tokens": arm.tokens or setup.tokens,
        "cached_bytes_before": _prepare(setup, arm),
        "disk_bytes_per_s": _disk(setup),
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "document.json"
        words = command(setup, arm, PROMPTS[prompt], result)
        if setup.trace and not arm.is_stock:
            record["trace"] = f"{arm.key}-{prompt}.parquet"
            words += ["--trace", str(setup.out / record["trace"])]
        record |= _execute(setup, arm, words)
        record["document"] = _shareable(json.loads(result.read_text())) if result.exists() else None
    record["seconds"] = round(time.monotonic() - started, 1)
    with (setup.out / "runs.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    return record


def _shareable(document: dict[str, Any]) -> dict[str, Any]:
    """The document without where on this machine the model lies: results are read elsewhere."""
    model = document.get("model") or {}
    if "paths" in model:
        model["paths"] = [Path(path).name for path in model["paths"]]
    return document


def command(setup: Setup, arm: Arm, text: str, result: Path) -> list[str]:
    """The process of one run."""
    module = "stock" if arm.is_stock else "worker"
    words = [sys.executable, "-m", f"moestream.lab.{module}", str(setup.model.paths[0]), "-p", text]
    words += ["-n", str(arm.tokens or setup.tokens), "--threads", str(setup.threads), "--ctx", str(setup.ctx)]
    words += ["--batch", str(setup.batch), "--json", str(result)]
    if not arm.is_stock:
        ram = arm.cap_bytes or arm.ram_bytes
        words += ["--ram", str(ram)] if ram is not None else []
        words += ["--mechanism", arm.mechanism] if arm.mechanism is not None else []
    return words


def _prepare(setup: Setup, arm: Arm) -> int | None:
    """Bytes of the model in the page cache when the run begins; None when that is not known."""
    paths = list(setup.model.paths)
    drop(paths)
    if arm.warm:
        fill(paths)
    return cached_bytes(paths)


def _disk(setup: Setup) -> float | None:
    """The disk's rate now, past the page cache where that can be: it drifts by the minute."""
    rate = disk_rate(setup.model.paths[0], _RATE_S, max_age_s=0)
    return rate.bytes_per_s if rate is not None else None


def _execute(setup: Setup, arm: Arm, words: list[str]) -> dict[str, Any]:
    """How the process ended and what its cage says of it."""
    caged = arm.cap_bytes is not None and setup.caged
    with (
        Cage(arm.cap_bytes or 0) if caged else contextlib.nullcontext() as cage,
        tempfile.TemporaryFile() as errors,
    ):
        start = cage.popen if cage is not None else subprocess.Popen
        process = start(words, stdout=subprocess.DEVNULL, stderr=errors)
        anon = _watch(process, cage)
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip()[-2000:]
        return {
            "returncode": process.returncode,
            "error": said if process.returncode != 0 else "",
            "cage_peak_bytes": cage.peak_bytes() if cage is not None else None,
            "cage_anon_peak_bytes": anon,
            "oom_kills": cage.oom_kills() if cage is not None else None,
        }


def _watch(process: subprocess.Popen[bytes], cage: Cage | None) -> int | None:
    """Wait for the end; the most anonymous memory the cage was seen to hold. One that takes too long is killed.

    The cgroup's counter is read and not the process's page tables: walking those would hold up its page moves."""
    deadline = time.monotonic() + TIMEOUT_S
    peak = None
    try:
        while True:
            try:
                process.wait(_SAMPLE_S)
                return peak
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
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
