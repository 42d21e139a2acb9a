"""The processor's side of a probe: a token's time when no byte is missing, by threads, each in a fresh process."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box import Box, cache_directory
from moestream.errors import RefusedError
from moestream.model import Model
from moestream.probe.schedule import spread
from moestream.probe.shrink import shrunk_bytes, write_shrunk
from moestream.units import format_bytes

#: Memory a worker needs beside the model, and what is left to the rest of the box.
_BESIDE_BYTES = 1 << 30
_REFUSED = RefusedError.exit_code

#: Runs a command for at most so many seconds: its exit code (None: stopped, the time was up), stdout and stderr.
Runner = Callable[[Sequence[str], float], tuple[int | None, str, str]]


@dataclass(frozen=True)
class ComputeScope:
    """``seconds``: of all; ``phase_s``: about, for each of decoding and prompt; ``tokens``: decoded at most."""

    every_count: bool
    tokens: int
    phase_s: float
    seconds: float


FULL = ComputeScope(True, 48, 4.0, 70.0)
QUICK = ComputeScope(False, 16, 1.0, 12.0)


def thread_counts(cpus: int, every: bool) -> list[int]:
    """All processors first, then one, the powers of two between, and the rest: where time is up, the shape is there."""
    return list(dict.fromkeys([*doublings(cpus), *range(2, cpus)])) if every else [cpus]


def doublings(cpus: int) -> list[int]:
    """All processors, one, and the powers of two between."""
    return list(
        dict.fromkeys([cpus, 1, *(1 << bit for bit in range(1, cpus.bit_length()) if 1 << bit < cpus)])
    )


def run_worker(command: Sequence[str], seconds: float) -> tuple[int | None, str, str]:
    """``Runner`` with a real process; nothing of it is left however this ends."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return None, out, err
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process.returncode, out, err


def measure_compute(
    model: Model,
    scope: ComputeScope,
    *,
    run: Runner = run_worker,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """By threads: ``s_per_token`` as ``spread`` has it and ``prefill_tok_per_s``. ``model`` says whether the model
    itself was run or a smaller one of the same work. ``best``: the fewest seconds a token, and at which count.
    Where nothing was measured ``reason`` says why. Never raises for want of room or time."""
    end = clock() + scope.seconds
    counts = thread_counts(Box().cpus(), scope.every_count)
    result: dict[str, Any] = {
        "model": None,
        "by_threads": {},
        "best": None,
        "reason": None,
        "not_measured": {},
    }
    for own in (True, False):
        try:
            with _resident_model(model, own) as path:
                result["model"] = "itself" if own else "a smaller one of the same work"
                refused = _measure_counts(path, counts, scope, end, result, run, clock, progress)
        except RefusedError as error:
            refused = str(error)
        result["reason"] = refused
        if refused is None:
            break
    rates = {int(count): row["s_per_token"]["median"] for count, row in result["by_threads"].items()}
    if rates:
        at = min(rates, key=lambda count: rates[count])
        prefill = result["by_threads"][str(at)]["prefill_tok_per_s"]
        result["best"] = {"threads": at, "s_per_token": rates[at], "prefill_tok_per_s": prefill}
    elif result["reason"] is None:
        result["reason"] = next(iter(result["not_measured"].values()), None)
    if not rates:
        result["model"] = None
    return result


@contextlib.contextmanager
def _resident_model(model: Model, own: bool) -> Iterator[Path]:
    """The model, or a smaller one that is gone with the block. Raises RefusedError where it does not fit in memory."""
    available = Box().available_memory()
    need = (model.bytes if own else shrunk_bytes(model)) + _BESIDE_BYTES
    if need > available:
        what = "the model" if own else "even a smaller model of the same work"
        raise RefusedError(
            f"{what} needs {format_bytes(need)} of memory and {format_bytes(available)} are free"
        )
    if own:
        yield model.paths[0]
        return
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="probe-") as directory:
        yield write_shrunk(model, Path(directory) / "smaller.gguf")


def _measure_counts(
    path: Path,
    counts: Sequence[int],
    scope: ComputeScope,
    end: float,
    result: dict[str, Any],
    run: Runner,
    clock: Callable[[], float],
    progress: Callable[[int, int], None] | None,
) -> str | None:
    """Fills ``by_threads``; the reason when the engine refuses the model."""
    took = 0.0
    for number, count in enumerate(counts):
        left = end - clock()
        # The next one will take about as long as the last; without an answer at its end it would be for nothing.
        if left <= 0 or (took and took > left):
            result["not_measured"][str(count)] = "the time was up before its turn"
            continue
        begun = clock()
        command = [sys.executable, "-m", "moestream.probe.worker", str(path), "--threads", str(count)]
        command += ["--tokens", str(scope.tokens), "--seconds", str(scope.phase_s)]
        code, out, err = run(command, left)
        took = clock() - begun
        row = _row(out)
        if row is not None:
            result["by_threads"][str(count)] = row
        elif code is None:
            result["not_measured"][str(count)] = f"loading and a first token took longer than {left:.0f} s"
        else:
            reason = (err.strip().splitlines() or ["no answer"])[-1]
            if code == _REFUSED and not result["by_threads"]:
                return reason
            result["not_measured"][str(count)] = reason
        if progress is not None:
            progress(number + 1, len(counts))
    return None


def _row(out: str) -> dict[str, Any] | None:
    """What the last whole line of a worker says; None without one."""
    for line in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            # Short prompts share less of the reading of weights: only the longest are alike.
            longest = max((tokens for tokens, _ in found["prefill"]), default=None)
            prefill = [tokens / seconds for tokens, seconds in found["prefill"] if tokens == longest]
            return {
                "s_per_token": spread(found["decode_s"]),
                "prefill_tok_per_s": statistics.median(prefill) if prefill else None,
                "prefill_tokens": longest,
                "load_s": found["load_s"],
            }
    return None
