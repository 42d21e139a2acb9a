"""``make demo``: the demo model streamed under a cap of a third of its size, and stock llama.cpp beside it.

Both run in a memory cgroup, so that the cap is the kernel's. Stock generates only ``STOCK_TOKENS`` tokens:
it would take minutes for more.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from moestream.box import Box, Cage
from moestream.box.page_cache import drop
from moestream.errors import MoestreamError
from moestream.lab.runs import end_on_sigterm
from moestream.make import demo_path, make_demo
from moestream.units import format_bytes

PROMPT = "Write a short story about a lighthouse keeper and a lost ship."
TOKENS = 96
STOCK_TOKENS = 8
CTX = 1024


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def model() -> Path:
    """The demo model, built when it is not there."""
    path = demo_path()
    if path.exists():
        return path
    say("building the demo model, 3.2 GB, from SmolLM2-135M: about 2 minutes, once")
    stages: set[str] = set()

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages.add(stage)
            say(f"  {stage}")

    return make_demo(progress=progress)


def run(command: list[str], cage: Cage | None, result: Path) -> dict[str, Any]:
    """Run an arm that writes its document to ``result``. Raises MoestreamError when it fails."""
    done = cage.run(command) if cage is not None else subprocess.run(command)
    if done.returncode != 0:
        raise MoestreamError(f"{' '.join(command[1:4])} ended with exit code {done.returncode}")
    document: dict[str, Any] = json.loads(result.read_text())
    return document


def stream(path: Path, cap: int, caged: bool, result: Path) -> dict[str, Any]:
    """The engine's own command; its text and its summary go to the terminal as they come."""
    command = [sys.executable, "-m", "moestream", "run", str(path), "--chat", "-p", PROMPT, "-n", str(TOKENS)]
    command += ["--ram", str(cap), "--ctx", str(CTX), "--json", str(result)]
    with Cage(cap) if caged else contextlib.nullcontext() as cage:
        return run(command, cage, result)


def stock(path: Path, cap: int, result: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "moestream.lab.stock", str(path), "-p", PROMPT, "-n", str(STOCK_TOKENS)]
    command += ["--ctx", str(CTX), "--threads", str(Box().compute_threads()), "--json", str(result)]
    with Cage(cap) as cage:
        return run(command, cage, result)


def comparison(ours: float, stock_rate: float, cap: int) -> str:
    return (
        f"stock llama.cpp under the same {format_bytes(cap)}: {stock_rate:.2f} tok/s (measured on {STOCK_TOKENS} "
        f"tokens); moestream: {ours:.2f} tok/s, {ours / stock_rate:.0f} times as fast"
    )


def demo() -> None:
    path = model()
    cap = path.stat().st_size // 3
    caged, reason = Cage.available()
    say(f"{path.name} is {format_bytes(path.stat().st_size)}; the cap is {format_bytes(cap)}, a third of it")
    if not caged:
        say(f"the cap is the engine's own, not the kernel's: {reason}")
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        drop([path])
        ours = stream(path, cap, caged, result)["decode"]["tok_per_s"]
        if not caged:
            say(
                "comparison with stock llama.cpp skipped: without a memory cgroup it would use all memory there is"
            )
            return
        say(f"\nnow stock llama.cpp, {STOCK_TOKENS} tokens under the same cap: about a minute")
        drop([path])
        theirs = stock(path, cap, result)["decode"]["tok_per_s"]
        say(comparison(ours, theirs, cap))


def main() -> int:
    end_on_sigterm()
    try:
        demo()
    except MoestreamError as error:
        say(f"demo: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
