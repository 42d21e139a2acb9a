"""``make bench``: the README's speed table, a preset of ``moestream bench`` at two caps, with the requirements it is
held to.

One round over prompts of three kinds; for each, every arm in a fresh process, the arms of the second prompt in reversed
order, so that a disk that drifts favours none. Nothing is judged across benchmarks: ratios are of arms that
ran on the same prompt in this one. Given a directory that holds a part of it, it goes on there.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from moestream.box import Box, Cage
from moestream.errors import MoestreamError
from moestream.lab.bench_arms import PROMPTS, Arm, arms
from moestream.lab.bench_ask import (
    FITS_BESIDE,
    FITS_SHARE,
    able_arms,
    fits_in_memory,
    plan_of,
    smallest_cap,
)
from moestream.lab.bench_journal import drop_torn_line
from moestream.lab.bench_progress import display
from moestream.lab.bench_session import make_runs
from moestream.lab.bench_table import report
from moestream.lab.demo import model as demo_model
from moestream.lab.runs import RUNS, Setup, end_on_sigterm
from moestream.lab.schedule import Slot, schedule
from moestream.model import read_model
from moestream.units import format_bytes, parse_size

SMALL, LARGE = "1.1GB", "1.7GB"
CTX = 512
THREADS = 2


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def todo(all_arms: list[Arm], setup: Setup, available: int, reason: str) -> tuple[list[Slot], list[str]]:
    """Every run in its order, and a line for each arm that cannot run here. ``available``: bytes of free memory;
    ``reason``: why there is no cgroup."""
    able, left_out = able_arms(all_arms, setup.caged, reason)
    if not fits_in_memory(setup.model, available):
        gone = [arm for arm in able if arm.cap_bytes is None]
        able = [arm for arm in able if arm not in gone]
        free = f"the model does not fit into the {format_bytes(available)} that are free"
        left_out += [f"{arm.key}: {free}" for arm in gone]
    return schedule(able, list(setup.prompts), repeats=1, sentinel=None), left_out


def bench(options: argparse.Namespace) -> bool:
    """Measure and report; whether every run was valid."""
    path = options.model or demo_model()
    model = read_model(path)
    small, large = parse_size(options.small), parse_size(options.large)
    plan = plan_of(model, small, CTX)
    caged, reason = Cage.available()
    out = options.out or Path("results/scratch") / f"bench-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    out.mkdir(parents=True, exist_ok=True)
    prompts = dict(list(PROMPTS.items())[:1]) if options.quick else PROMPTS
    setup = Setup(model, THREADS, CTX, plan.n_batch, options.tokens, caged, out, options.trace, prompts)
    everything = int(model.bytes * FITS_SHARE) + FITS_BESIDE
    all_arms = arms(small, large, everything, smallest_cap(model, CTX), options.stock_tokens)
    if not caged:
        say(f"caps are the engine's own, not the kernel's: {reason}")
    slots, left_out = todo(all_arms, setup, Box().available_memory(), reason)
    with display(sys.stderr) as show:
        for text in left_out:
            show.note(f"left out: {text}")
        records = make_runs(setup, slots, drop_torn_line(out / RUNS), show)
    text, valid = report(all_arms, records)
    (out / "report.md").write_text(text)
    print(text)
    say(f"records: {out / RUNS}, report: {out / 'report.md'}")
    return valid


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the speed table on this box.")
    parser.add_argument("--model", type=Path, help="a GGUF file; left out: the demo model")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a run generates (256)")
    parser.add_argument("--stock-tokens", type=int, default=16, help="tokens of capped stock llama.cpp (16)")
    parser.add_argument("--small", default=SMALL, help=f"the smaller cap ({SMALL})")
    parser.add_argument("--large", default=LARGE, help=f"the larger cap ({LARGE})")
    parser.add_argument("--out", type=Path, help="directory for runs.jsonl and report.md")
    parser.add_argument(
        "--trace", action="store_true", help="a trace of each run of the engine beside its record"
    )
    parser.add_argument("--quick", action="store_true", help="one prompt only")
    options = parser.parse_args()
    if min(options.tokens, options.stock_tokens) < 2:
        parser.error("a rate takes two tokens or more")
    end_on_sigterm()
    try:
        return 0 if bench(options) else 4
    except KeyboardInterrupt:
        return 130
    except MoestreamError as error:
        say(f"bench: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
