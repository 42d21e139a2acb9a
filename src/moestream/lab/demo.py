"""``make demo``: the demo model under a cap of a third of its size, beside stock llama.cpp under the same cap.

python -m moestream.lab.demo
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from moestream.box import Box, Cage
from moestream.errors import MoestreamError
from moestream.lab.child import Outcome, drop_from_cache, run_child
from moestream.make import demo_path
from moestream.units import format_bytes

PROMPT = "The old lighthouse keeper had not spoken to anyone for a year. One morning"
TOKENS = 96
#: Stock llama.cpp does less than a token a second here.
STOCK_TOKENS = 8
CONTEXT = 1024
BATCH = 64


def model() -> Path:
    """The demo model, made now if it is not there."""
    path = demo_path()
    if not path.exists():
        print("building the demo model from SmolLM2-135M: 3.2 GB, about two minutes, once", flush=True)
        done = subprocess.run([sys.executable, "-m", "moestream", "demo-model"], check=False)
        if done.returncode:
            raise MoestreamError(f"the demo model could not be built: {path} is not there")
    return path


def shared_arguments(threads: int) -> list[str]:
    return ["-p", PROMPT, "--ctx", str(CONTEXT), "--batch", str(BATCH), "--threads", str(threads)]


def stream(path: Path, cap: int, caged: bool, threads: int) -> dict[str, Any]:
    """Run ``moestream run`` with its text, banner and summary on this terminal."""
    words = ["moestream", "run", str(path), "-n", str(TOKENS), "--ram", str(cap), *shared_arguments(threads)]
    shown = f"moestream run demo -p {PROMPT!r} -n {TOKENS} --ram {cap // 10**6}MB"
    print(f"\n$ {shown}", flush=True)
    outcome = run_child(words, cap if caged else None, stdout=None, stderr=None)
    return finished("moestream run", outcome)


def stock(path: Path, cap: int, threads: int) -> dict[str, Any]:
    words = ["moestream.lab.stock", str(path), "-n", str(STOCK_TOKENS), *shared_arguments(threads)]
    return finished("stock llama.cpp", run_child(words, cap))


def finished(name: str, outcome: Outcome) -> dict[str, Any]:
    """The document of a run; MoestreamError when there is none."""
    if outcome.document is None:
        killed = " (the kernel killed it for memory)" if outcome.oom_kills else ""
        said = " ".join(outcome.said.split()) or "it said why above"
        raise MoestreamError(f"{name} ended with code {outcome.returncode}{killed}: {said}")
    return outcome.document


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """One line: both rates, their ratio, and whether the texts agree as far as both go."""
    mine, stocks = ours["decode"]["tok_per_s"], theirs["decode"]["tok_per_s"]
    if not mine or not stocks:
        return "one of the two ended before its second token: no rates to compare"
    length = min(len(ours["tokens"]), len(theirs["tokens"]))
    same = ours["tokens"][:length] == theirs["tokens"][:length]
    return (
        f"stock llama.cpp under the same cap: {stocks:.2f} tok/s over {theirs['decode']['tokens']} tokens; "
        f"moestream: {mine:.2f} tok/s, {mine / stocks:.0f} times as fast, "
        f"{'the same' if same else 'NOT THE SAME'} first {length} tokens"
    )


def demo() -> None:
    path = model()
    cap = path.stat().st_size // 3
    threads = Box().cpus()
    caged, how = Cage.available()
    print(
        f"the model is {format_bytes(path.stat().st_size)}; the cap is a third of it, {format_bytes(cap)}",
        end="",
    )
    print(f", held by the kernel ({how})" if caged else ", held by the engine's own budget alone", flush=True)
    drop_from_cache(path)
    ours = stream(path, cap, caged, threads)
    if not caged:
        print(f"\nno comparison with stock llama.cpp: {how}")
        return
    print(
        f"\nnow stock llama.cpp in the same {format_bytes(cap)}, only {STOCK_TOKENS} tokens: it takes a minute or two"
    )
    drop_from_cache(path)
    print(compare(ours, stock(path, cap, threads)))


def main() -> int:
    try:
        demo()
    except MoestreamError as error:
        print(f"moestream: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
