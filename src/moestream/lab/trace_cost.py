"""What recording a trace costs: ``python -m moestream.lab.trace_cost``.

The same prompt and tokens in fresh processes: without a trace, the same again (what two equal runs differ by), with a
trace that goes nowhere, and with one that goes to a file. The order turns round every round. A token's time is taken
from one token to the next, so that it holds what recording does between steps; the sink's own seconds are exact.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moestream.box import Cage
from moestream.engine import Llama
from moestream.errors import MoestreamError
from moestream.lab.bench_arms import PROMPTS
from moestream.lab.demo import model as demo_model
from moestream.lab.demo import run, say
from moestream.lab.runs import Setup, end_on_sigterm, provenance
from moestream.model import read_model
from moestream.report import write_json
from moestream.stats import Step
from moestream.trace.sink import TraceSink
from moestream.trace.write import TraceWriter
from moestream.units import parse_size

PLAIN, AGAIN, NULL, FILE = "no trace", "no trace, again", "recorded, not written", "written"
ARMS = (PLAIN, AGAIN, NULL, FILE)
#: Recording may take this share of decode time.
LIMIT = 0.02
_RESAMPLES = 2000
_THREADS = 2
_CTX = 1024


class Null:
    """A TraceSink that lets go of everything."""

    def begin(self, meta: dict[str, Any]) -> None:
        return

    def step(self, index: int, phase: str, step: Step, events: Mapping[str, Any]) -> None:
        return

    def close(self, events: Mapping[str, Any] | None = None) -> None:
        return

    def discard(self) -> None:
        return


class Timed:
    """Another sink, and the seconds its ``step`` took while decoding."""

    def __init__(self, sink: TraceSink) -> None:
        self._sink = sink
        self.decode_s = 0.0

    def begin(self, meta: dict[str, Any]) -> None:
        self._sink.begin(meta)

    def step(self, index: int, phase: str, step: Step, events: Mapping[str, Any]) -> None:
        begun = time.perf_counter()
        self._sink.step(index, phase, step, events)
        if phase == "decode":
            self.decode_s += time.perf_counter() - begun

    def close(self, events: Mapping[str, Any] | None = None) -> None:
        self._sink.close(events)

    def discard(self) -> None:
        self._sink.discard()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One run of one arm, in this process: seconds a token, seconds in the sink, the tokens."""
    sink: Timed | None = None
    if options.arm == NULL:
        sink = Timed(Null())
    elif options.arm == FILE:
        sink = Timed(TraceWriter(options.trace, [options.model]))
    with Llama(
        options.model,
        ram=options.ram,
        mechanism=options.mechanism,
        strict=options.mechanism is not None,
        trace=sink,
        governor=False,
        n_ctx=_CTX,
        n_threads=_THREADS,
        n_threads_batch=_THREADS,
    ) as llama:
        prompt = llama.tokenize(PROMPTS[options.prompt].encode(), add_bos=True, special=True)
        tokens, times = [], []
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            times.append(time.perf_counter())
            if len(tokens) == options.tokens:
                break
        mechanism = str(llama.mechanism)
    return {
        "arm": options.arm,
        "mechanism": mechanism,
        "token_s": [after - before for before, after in itertools.pairwise(times)],
        "sink_s": sink.decode_s if sink is not None else 0.0,
        "file_bytes": options.trace.stat().st_size if options.arm == FILE else 0,
        "tokens": tokens,
    }


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """The geometric mean of ``ours[r] / theirs[r]`` over the rounds and its 95 % interval, by bootstrap of rounds."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    low, high = means[int(0.025 * _RESAMPLES)], means[int(0.975 * _RESAMPLES) - 1]
    return math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high)


def report(records: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """The table, and whether recording stayed within its limit. ``records``: every arm once a round."""
    if len({tuple(record["tokens"]) for record in records}) != 1:
        return "the runs differ in their tokens: their times are not of the same work", False

    def of(arm: str, figure: Any) -> list[float]:
        return [float(figure(record)) for record in records if record["arm"] == arm]

    lines = [
        f"{records[0]['mechanism']}, {len(of(PLAIN, len))} rounds of {len(records[0]['tokens'])} tokens; ratios to "
        f"'{PLAIN}' with their 95 % interval",
        "",
        "| arm | median ms a token | median, ratio | mean, ratio | in the sink |",
        "|---|---:|---:|---:|---:|",
    ]
    for arm in ARMS:
        cells = [f"{statistics.median(of(arm, _median)) * 1e3:.1f}"]
        for figure in (_median, _mean):
            middle, low, high = ratio(of(arm, figure), of(PLAIN, figure))
            cells.append("1" if arm == PLAIN else f"{middle:.3f} ({low:.3f}-{high:.3f})")
        shares = of(arm, _sink_share)
        lines.append(f"| {arm} | {' | '.join(cells)} | {statistics.fmean(shares):.2%} |")
    share = max(of(FILE, _sink_share))
    # The sink's share is known to microseconds; what the core adds shows only in the ratio of medians, to both runs
    # without a trace of the same round.
    without = [math.sqrt(a * b) for a, b in zip(of(PLAIN, _median), of(AGAIN, _median), strict=True)]
    middle, low, high = ratio(of(FILE, _median), without)
    if share >= LIMIT or low > 1 + LIMIT:
        verdict = "ABOVE"
    else:
        verdict = "within" if high < 1 + LIMIT else "CANNOT TELL whether within"
    size = statistics.fmean(of(FILE, lambda record: record["file_bytes"] / len(record["token_s"])))
    lines += [
        "",
        f"The sink takes at most {share:.2%} of decode time, and the median token {middle - 1:+.1%} (95 % interval "
        f"{low - 1:+.1%} to {high - 1:+.1%}) against both runs without a trace: {verdict} {LIMIT:.0%}. "
        f"The file has {size:.0f} bytes a step.",
    ]
    return "\n".join(lines), verdict == "within"


def _median(record: dict[str, Any]) -> float:
    return float(statistics.median(record["token_s"]))


def _mean(record: dict[str, Any]) -> float:
    return float(statistics.fmean(record["token_s"]))


def _sink_share(record: dict[str, Any]) -> float:
    return float(record["sink_s"] / sum(record["token_s"]))


def compare(options: argparse.Namespace) -> bool:
    """Run all arms, round by round, and report; whether recording stayed within its limit."""
    path = options.model or demo_model()
    model, cap = read_model(path), parse_size(options.ram)
    caged, reason = Cage.available()
    if not caged:
        say(f"the cap is the engine's own, not the kernel's: {reason}")
    options.out.mkdir(parents=True, exist_ok=True)
    setup = Setup(model, _THREADS, _CTX, 0, options.tokens, caged, options.out)
    records = []
    for number in range(options.rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            with tempfile.TemporaryDirectory(dir=options.out) as directory:
                result = Path(directory) / "record.json"
                words = [sys.executable, "-m", "moestream.lab.trace_cost", "--model", str(path)]
                words += ["--ram", options.ram, "--tokens", str(options.tokens), "--prompt", options.prompt]
                words += ["--mechanism", options.mechanism] if options.mechanism else []
                words += ["--arm", arm, "--trace", str(Path(directory) / "t.parquet"), "--json", str(result)]
                with Cage(cap) if caged else contextlib.nullcontext() as cage:
                    record = {"round": number, "cap_bytes": cap, **run(words, cage, result)}
            records.append(record)
            with (options.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps({**provenance(setup), **record}) + "\n")
            say(f"round {number + 1}/{options.rounds}, {arm}: {_median(record) * 1e3:.1f} ms a token")
    text, valid = report(records)
    (options.out / "report.md").write_text(text + "\n")
    print(text)
    return valid


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what recording a trace costs.")
    parser.add_argument("--model", type=Path, help="a GGUF file; left out: the demo model")
    parser.add_argument("--ram", default="1.1GB", help="the cap (1.1GB)")
    parser.add_argument("--mechanism", help="left out: the default")
    parser.add_argument("--prompt", default=next(iter(PROMPTS)), choices=PROMPTS)
    parser.add_argument("--tokens", type=int, default=128, help="tokens a run generates (128)")
    parser.add_argument("--rounds", type=int, default=6, help="runs of each arm (6)")
    parser.add_argument(
        "--out", type=Path, default=Path("results/scratch/trace-cost"), help="directory of records and report"
    )
    for name in ("--arm", "--trace", "--json"):  # of one run, in a process of its own
        parser.add_argument(name, type=str if name == "--arm" else Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tokens < 2 or options.rounds < 3:
        parser.error("a token's time takes two tokens, an interval three rounds")
    end_on_sigterm()
    try:
        if options.arm is not None:
            write_json(options.json, measure(options))
            return 0
        return 0 if compare(options) else 4
    except KeyboardInterrupt:
        return 130
    except MoestreamError as error:
        say(f"trace_cost: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
