"""``moestream bench``: mechanisms side by side under a cap, with how sure that is."""

from __future__ import annotations

import datetime
import json as json_module
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestream.box import MOST_THREADS, Box
from moestream.errors import MoestreamError, UsageError
from moestream.model import check_architecture, locate, read_model
from moestream.probe import saved_probe
from moestream.report import check_writable, write_json
from moestream.units import parse_size

if TYPE_CHECKING:
    from moestream.lab.bench_ask import Request
    from moestream.lab.bench_session import Asked
    from moestream.lab.schedule import Slot

_CTX = 1024
_TOKENS, _REPEATS = 96, 4
#: Arms whose bytes come by page faults take seconds a token: so long they may decode.
_SECONDS = 30.0
_MECHANISMS = "mapped+willneed+mlock,default"


def bench(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of a split model, or demo.")
    ],
    ram: Annotated[
        str, typer.Option(metavar="SIZE", help="The cap of every arm, whole process: 4GiB, 1.1GB.")
    ],
    mechanisms: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="With commas between; ladder: one lever at a time from stock to the default; all: each member once.",
        ),
    ] = _MECHANISMS,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Three or more: JSON of names and texts, or texts with a line of --- between.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", min=4, metavar="N", help="Tokens a run generates.")
    ] = _TOKENS,
    seconds: Annotated[
        float,
        typer.Option(
            min=1,
            max=3000,
            metavar="S",
            help="A run that decodes for longer ends there, after 11 tokens or more.",
        ),
    ] = _SECONDS,
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Rounds of all arms.")
    ] = _REPEATS,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the records. Left out: a new one, named by the date."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in --out with the runs not made yet.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Begin anew in --out; its records are removed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell the arms and how long they will take.")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="A trace of each run beside its record.")] = False,
    share: Annotated[
        bool, typer.Option("--share", help="Print one markdown block to paste, with no path in it.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_THREADS, metavar="N", help="Compute threads. Left out: one for each CPU."
        ),
    ] = None,
    ctx: Annotated[int, typer.Option(min=64, max=2**20, metavar="N", help="Tokens of context.")] = _CTX,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the summary; - for stdout.")
    ] = None,
) -> None:
    """Run mechanisms side by side under a memory cap, in turns, and say which is faster and how sure that is.

    Stock llama.cpp and the engine's inert hook are always among them (without a cap, and marked, where no cgroup can be
    had), and everything in memory where that fits. Every run is a fresh process with a cold start. Records, summary and
    report are kept in --out (docs/formats/runs.md).
    """
    # The binding takes a while to import: wrong words are to be told at once.
    from moestream.lab.bench_arms import PROMPTS, read_prompts
    from moestream.lab.bench_ask import Request
    from moestream.lab.bench_doubts import Typed
    from moestream.lab.bench_paths import without_paths
    from moestream.lab.bench_summary import as_typed
    from moestream.lab.bench_text import report
    from moestream.lab.bench_text import share as share_text
    from moestream.lab.statistics import need_scipy

    cap = parse_size(ram)
    if (resume or force) and out is None:
        raise UsageError("--resume and --force need the directory: --out DIR")
    if resume and force:
        raise UsageError("--resume goes on and --force begins anew: say one of the two")
    need_scipy()
    texts = read_prompts(prompts) if prompts is not None else PROMPTS
    found = read_model(locate(model))
    check_architecture(found)
    target = Path(json) if json not in (None, "-") else None
    if target is not None:
        check_writable(target, found.paths)
    words = ["--ram", ram, "--mechanisms", mechanisms, "-n", str(tokens), "--repeats", str(repeats)]
    for option, value, usual in (
        ("--seconds", f"{seconds:g}", f"{_SECONDS:g}"),
        ("--ctx", ctx, _CTX),
        ("--threads", threads, None),
    ):
        words += [option, str(value)] if value != usual else []
    words += ["--trace"] if trace else []
    typed = [
        "moestream",
        "bench",
        model,
        *words,
        *(["--prompts", str(prompts)] if prompts is not None else []),
    ]
    shown = ["moestream", "bench", "demo" if model == "demo" else found.paths[0].name, *words]
    shown += ["--prompts", prompts.name] if prompts is not None else []
    request = Request(
        model=found,
        out=out or Path(f"bench-{datetime.datetime.now():%Y%m%d-%H%M%S}"),
        ram=ram,
        cap_bytes=cap,
        mechanisms=mechanisms,
        prompts=texts,
        tokens=tokens,
        limit_s=seconds,
        repeats=repeats,
        threads=threads or Box().compute_threads(),
        ctx=ctx,
        trace=trace,
        command=without_paths(shlex.join(shown)),
    )
    if dry_run:
        _tell(request)
        return
    again = shlex.join([*typed, "--out", str(request.out)])
    summary, records = _measure(request, f"{again} --resume", resume=resume, force=force)
    if target is not None:
        write_json(target, summary)
    if json == "-":
        print(json_module.dumps(summary, indent=1))
    else:
        said = Typed(again, shlex.quote(model), shlex.quote(str(found.paths[0])))
        print(share_text(summary) if share else report(as_typed(summary, records, said)), end="")
    if not summary["valid_runs"]:
        raise MoestreamError(f"no run counts: {request.out / 'runs.jsonl'} says why of each")


def _measure(
    request: Request, go_on: str, *, resume: bool, force: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make the runs that are not there; the summary and all records. When it is stopped, what there is is summed up all
    the same, and ``go_on`` is what to type."""
    from moestream.lab.bench_ask import ask
    from moestream.lab.bench_journal import open_journal, read_runs
    from moestream.lab.bench_progress import display
    from moestream.lab.bench_session import check_earlier, conclude, make_runs
    from moestream.lab.runs import RUNS
    from moestream.lab.schedule import schedule

    asked = ask(request, resume=resume)
    box = Box().describe(request.model.paths[0])
    setup = asked.document(box)
    records = open_journal(request.out, setup, resume=resume, force=force)
    check_earlier(request.out, setup, records)
    slots = schedule(asked.arms, list(asked.setup.prompts), asked.repeats, asked.sentinel)
    before = signal.signal(signal.SIGTERM, _end)
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as errors:
        try:
            with display(errors) as show:
                for text in _beforehand(asked):
                    show.note(text)
                show.note(_ahead(asked, slots, records) + f", in {request.out}")
                records = make_runs(asked.setup, slots, records, show, expected=asked.expected_s)
        except (KeyboardInterrupt, SystemExit):
            conclude(request.out, read_runs(request.out / RUNS), _probed(request))
            print(f"stopped; go on with: {go_on}", file=errors)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return conclude(request.out, records, _probed(request)), records


def _beforehand(asked: Asked) -> list[str]:
    """What must be known before the first run."""
    return [*asked.notes, *(f"left out: {text}" for text in asked.left_out)]


def _ahead(asked: Asked, slots: list[Slot], records: list[dict[str, Any]]) -> str:
    """How much there is to do, before it is begun."""
    from moestream.lab.bench_progress import duration
    from moestream.lab.bench_session import not_made
    from moestream.lab.bench_time import left_s, seconds_by_arm

    todo = not_made(slots, records)
    text = f"{len(slots)} runs of {len(asked.arms)} arms"
    text += f", {len(records)} made already" if records else ""
    left = left_s(asked.expected_s, seconds_by_arm(records), todo)
    return text + (f": about {duration(left)}" if left is not None else "")


def _tell(request: Request) -> None:
    """What would be run, and for how long; nothing is made."""
    from moestream.lab.bench_ask import ask
    from moestream.lab.bench_progress import duration
    from moestream.lab.schedule import schedule

    asked = ask(request, resume=False)
    slots = schedule(asked.arms, list(asked.setup.prompts), asked.repeats, asked.sentinel)
    runs = [slot.arm.key for slot in slots]
    for arm in asked.arms:
        print(f"{runs.count(arm.key):4} x {duration(asked.expected_s[arm.key]):>9}  {arm.key}")
    for text in _beforehand(asked):
        print(text)
    print(_ahead(asked, slots, []))


def _probed(request: Request) -> float | None:
    """A token's seconds with everything in memory, as a probe found them; None without one."""
    probe = saved_probe(request.model)
    return probe["compute_s_per_token"] if probe is not None else None


def _end(number: int, _frame: Any) -> None:
    """Ended by a signal as by an exception, so that no run and no cgroup is left behind."""
    sys.exit(128 + number)
