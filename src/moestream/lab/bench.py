"""``make bench``: the speed table, measured side by side on this box.

Prompts of three kinds; for each, every arm in a fresh process, the arms of the second prompt in reversed
order, so that a disk that drifts favours none. Nothing is judged across benchmarks: ratios are of arms that
ran on the same prompt in this one.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

from moestream.box import Box, Cage
from moestream.errors import BudgetError, MoestreamError
from moestream.lab.bench_arms import PROMPTS, Arm, arms
from moestream.lab.bench_table import report
from moestream.lab.demo import model as demo_model
from moestream.lab.runs import Setup, end_on_sigterm, run_arm
from moestream.model import Model, read_model
from moestream.plan import Plan
from moestream.units import format_bytes, parse_size

SMALL, LARGE = "1.1GB", "1.7GB"
CTX = 512
THREADS = 2
#: Where nothing may be kept out for lack of room: the model and what llama.cpp and Python take beside it.
_EVERYTHING_SHARE, _EVERYTHING_BESIDE = 1.05, 1_000_000_000


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def plan_of(model: Model, cap: int) -> Plan:
    """The default plan under a cap: it says what batch fits."""
    from moestream.dryrun import COMPUTE_SHARE, plan_context

    return plan_context(model, Box(), cap, None, n_ctx=CTX, compute_share=COMPUTE_SHARE, n_outputs_max=1)


def smallest_cap(model: Model) -> int:
    """The least cap that the plan accepts, as its refusal of next to nothing names it."""
    try:
        return plan_of(model, 1).smallest_cap_bytes
    except BudgetError as error:
        if error.smallest_bytes is None:
            raise
        return error.smallest_bytes


def todo(all_arms: list[Arm], prompts: list[str]) -> list[tuple[str, Arm]]:
    """Every (prompt, arm) in the order it runs."""
    order = []
    for number, prompt in enumerate(prompts):
        mine = [arm for arm in all_arms if arm.prompts is None or prompt in arm.prompts]
        order += [(prompt, arm) for arm in (mine[::-1] if number % 2 else mine)]
    return order


def left_out(arm: Arm, setup: Setup, available: int, reason: str) -> str:
    """Why an arm cannot run here, or ''."""
    if arm.needs_cage and not setup.caged:
        return f"only a memory cgroup caps it: {reason}"
    if arm.cap_bytes is None and available < setup.model.bytes * _EVERYTHING_SHARE + _EVERYTHING_BESIDE:
        return f"the model does not fit into the {format_bytes(available)} that are free"
    return ""


def measure(setup: Setup, order: list[tuple[str, Arm]], reason: str) -> list[dict[str, Any]]:
    """Run everything; the records. What could not run is said."""
    records = []
    for number, (prompt, arm) in enumerate(order, 1):
        cap = format_bytes(arm.cap_bytes) if arm.cap_bytes is not None else "no cap"
        title = f"[{number}/{len(order)}] {prompt}, {cap}, {arm.label}"
        excuse = left_out(arm, setup, Box().available_memory(), reason)
        if excuse:
            say(f"{title}: left out, {excuse}")
            continue
        record = run_arm(setup, arm, prompt)
        records.append(record)
        document = record["document"]
        done = (
            f"{document['decode']['tok_per_s']:.2f} tok/s"
            if document
            else f"FAILED: {record['error'][-300:]}"
        )
        say(f"{title}: {done} ({record['seconds']:.0f} s)")
    return records


def bench(options: argparse.Namespace) -> bool:
    """Measure and report; whether every run was valid."""
    path = options.model or demo_model()
    model = read_model(path)
    small, large = parse_size(options.small), parse_size(options.large)
    plan = plan_of(model, small)
    caged, reason = Cage.available()
    out = options.out or Path("results/scratch") / f"bench-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    out.mkdir(parents=True, exist_ok=True)
    setup = Setup(model, THREADS, CTX, plan.n_batch, options.tokens, caged, out, options.trace)
    everything = int(model.bytes * _EVERYTHING_SHARE) + _EVERYTHING_BESIDE
    all_arms = arms(small, large, everything, smallest_cap(model), options.stock_tokens)
    prompts = list(PROMPTS)[:1] if options.quick else list(PROMPTS)
    if not caged:
        say(f"caps are the engine's own, not the kernel's: {reason}")
    records = measure(setup, todo(all_arms, prompts), reason)
    text, valid = report(all_arms, records)
    (out / "report.md").write_text(text)
    print(text)
    say(f"records: {out / 'runs.jsonl'}, report: {out / 'report.md'}")
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
