"""``moestream replay TRACE...``: what other policies and budgets would have read."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestream.cli.banner import Bar
from moestream.errors import RefusedError, UsageError
from moestream.probe import saved_probe_of
from moestream.report import check_writable, write_json
from moestream.units import format_age, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from moestream.replay import Fidelity, Options, Point, Recording
    from moestream.trace import Trace

HALVES = ("first", "second")


def replay(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE", help="Traces of one model (run --trace).")],
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Names with commas, or all. Left out: the ones worth comparing, and belady."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="25%, 400MB or recorded, with commas. Left out: a curve up to all experts."
        ),
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="RATE", help="The disk's rate, for an expected speed: 1.9GB/s.")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(metavar="TIME", help="A token's time with all in memory: 34ms.")
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take both rates from this file. Left out: from the kept probe."),
    ] = None,
    half: Annotated[
        str | None, typer.Option(metavar="HALF", help="Only the first or the second half of the steps.")
    ] = None,
    warm_half: Annotated[
        bool, typer.Option("--warm-half", help="The first half warms the cache, the second is counted.")
    ] = False,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Leave out what the engine read early.")
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write one JSON object to this file; - prints it instead."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the curves: a .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Feed recorded routes to the engine's own cache under other policies and budgets: hits, bytes, expected speed.

    belady is the bound: it knows the routes to come. What the engine asked for early is replayed too.
    """
    _check_words(traces, half, warm_half, json, plot)
    # numpy and the traces' reader: wrong words are to be told at once.
    from moestream.replay import (
        Options,
        check_same_model,
        curves,
        parse_budgets,
        parse_policies,
        parse_rates,
        prepare,
        saved_rates,
    )
    from moestream.seeds import load_priorities
    from moestream.trace.read import read_trace

    rates = parse_rates(disk, compute, probe)
    read = [(path, read_trace(Path(path))) for path in dict.fromkeys(traces)]
    recordings = [prepare(trace, path) for path, trace in read]
    check_same_model(recordings)

    def load(path: str) -> Any:
        return load_priorities(path, recordings[0].identity)

    kept = saved_probe_of(recordings[0].identity) if rates is None else None
    options = Options(half, warm_half, not no_speculation, rates or saved_rates(kept))
    policies = parse_policies(policy, load)
    budgets = parse_budgets(budget, recordings)
    checked = [_check(trace, recording, load) for (_, trace), recording in zip(read, recordings, strict=True)]
    points = _replayed(curves(recordings, policies, budgets, options), _count(recordings, policies, budgets))
    if json is not None:
        document = describe(recordings, checked, points, options, kept)
        if json == "-":
            print(json_module.dumps(document, indent=2))
        else:
            write_json(Path(json), document)
    if plot is not None:
        from moestream.replay.plot import draw

        draw(points, Path(plot), title=_title(recordings, options))
    if json != "-":
        _print(recordings, checked, points, options, _rates_line(kept, options))


def _count(recordings: list[Any], policies: list[Any], budgets: list[Any]) -> int:
    """Points of ``curves``; several traces have one more for all of them."""
    return len(policies) * len(budgets) * (len(recordings) + (len(recordings) > 1))


def _replayed(points: Iterator[Point], count: int) -> list[Point]:
    """All points, with a bar while they are made."""
    found = []
    with Bar(sys.stderr, "replaying") as bar:
        for point in points:
            found.append(point)
            bar.update(len(found), count)
    return found


def _check_words(
    traces: list[str], half: str | None, warm_half: bool, json: str | None, plot: str | None
) -> None:
    """What can be told before anything is read: minutes of replay are not to end in a file that cannot be written."""
    if half is not None and half not in HALVES:
        raise UsageError(f"--half is first or second, not {half!r}")
    if half is not None and warm_half:
        raise UsageError("--half replays one half alone, --warm-half both: name one of them")
    if plot is not None:
        from moestream.analyze.plot import check_plot

        check_plot(Path(plot))
    for option, path in (("--json", json), ("--plot", plot)):
        if path is None or path == "-":
            continue
        check_writable(Path(path), option=option)
        if any(Path(path).resolve() == Path(trace).resolve() for trace in traces):
            raise UsageError(f"{option} {path}: that is the trace, name another file")


def _check(trace: Trace, recording: Recording, load: Callable[[str], Any]) -> Fidelity | str:
    """The recorded mechanism replayed, or in words why it cannot be: no reason not to replay others."""
    from moestream.replay import check_fidelity

    try:
        fidelity = check_fidelity(trace, recording, load)
    except (UsageError, RefusedError) as error:
        return f"warning: not held against its own record: {error}"
    return fidelity or "its mechanism kept no experts itself: there are no recorded hits to reproduce"


def describe(
    recordings: list[Recording],
    checked: list[Fidelity | str],
    points: list[Point],
    options: Options,
    kept: dict[str, Any] | None,
) -> dict[str, Any]:
    """The curves as plain JSON values; sizes in bytes. ``probe_measured_at``: of the ``kept`` probe whose rates these
    are, None where others were named or there are none."""
    from moestream.replay import gaps_closed

    return {
        "format": "moestream-replay",
        "version": 1,
        "model": {
            "identity": recordings[0].identity,
            "expert_bytes": recordings[0].geometry.frame_bytes_total,
            "parts": [
                {"banks": list(part.banks), "frame_bytes": part.frame_bytes, "experts": part.experts}
                for part in recordings[0].geometry.parts
            ],
        },
        "traces": [
            {
                "path": recording.name,
                "mechanism": recording.mechanism,
                "routes": len(recording),
                "routed_experts": len(recording.experts),
                "capacities": list(recording.capacities),
                "recorded": None if isinstance(fidelity, str) else dataclasses.asdict(fidelity),
            }
            for recording, fidelity in zip(recordings, checked, strict=True)
        ],
        **dataclasses.asdict(options),
        "probe_measured_at": kept["measured_at"] if kept is not None and options.rates is not None else None,
        "points": [
            {
                **dataclasses.asdict(point),
                "hit_rate": point.figures.hit_rate,
                "bytes_read": point.figures.bytes_read,
                "gap_closed": gap,
            }
            for point, gap in zip(points, gaps_closed(points), strict=True)
        ],
    }


def _title(recordings: list[Recording], options: Options) -> str:
    names = ", ".join(Path(recording.name).name for recording in recordings[:3])
    more = f" and {len(recordings) - 3} more" if len(recordings) > 3 else ""
    part = (
        f", {options.half} half"
        if options.half
        else ", second half after a warm first"
        if options.warm_half
        else ""
    )
    return names + more + part


def _rates_line(kept: dict[str, Any] | None, options: Options) -> str | None:
    """Where rates come from that nobody has named; None where somebody has, or there is no probe."""
    if kept is None:
        return None
    if options.rates is None:
        return (
            "the kept probe knows only one of the two rates that an expected speed needs: --disk, --compute"
        )
    disk, compute = options.rates.disk_bytes_per_s, options.rates.compute_s_per_token
    return (
        f"rates: of the probe kept for this model, measured {format_age(time.time() - kept['measured_at'])}: "
        f"{format_bytes(disk)}/s, {compute * 1e3:.1f} ms a token"
    )


def _print(
    recordings: list[Recording],
    checked: list[Fidelity | str],
    points: list[Point],
    options: Options,
    rates_line: str | None,
) -> None:
    from moestream.console import console as stdout

    console = stdout()
    for recording, fidelity in zip(recordings, checked, strict=True):
        console.print(
            f"{recording.name}: {len(recording)} routes, {len(recording.experts)} routed experts, "
            f"recorded under {recording.mechanism}",
            soft_wrap=True,
        )
        console.print(f"  {_fidelity_line(fidelity)}", soft_wrap=True)
    _print_table(console, points, options, several=len(recordings) > 1)
    for line in (*([rates_line] if rates_line else []), *_notes(points, options)):
        console.print(line, soft_wrap=True)


def _fidelity_line(fidelity: Fidelity | str) -> str:
    if isinstance(fidelity, str):
        return fidelity
    if fidelity.different_steps == 0:
        return (
            f"replayed as recorded ({fidelity.policy}): {fidelity.hits} hits and {fidelity.misses} misses, "
            f"the same in each of {fidelity.steps} steps"
        )
    return (
        f"warning: replayed as recorded ({fidelity.policy}), {fidelity.different_steps} of {fidelity.steps} steps "
        f"differ: {fidelity.hits} hits, recorded {fidelity.recorded_hits} (a trace that does not begin with the load, "
        "or another version's policy)"
    )


def _print_table(console: Console, points: list[Point], options: Options, several: bool) -> None:
    from rich import box
    from rich.table import Table

    from moestream.replay import gaps_closed

    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for column in ("budget", "policy", *(["trace"] if several else [])):
        table.add_column(column, no_wrap=True)
    for column in ("hits", "misses", "read", "gap"):
        table.add_column(column, justify="right", no_wrap=True)
    if options.rates is not None:
        table.add_column("tok/s", justify="right", no_wrap=True)
        table.add_column("at most", justify="right", no_wrap=True)
    before = None
    for point, gap in zip(points, gaps_closed(points), strict=True):
        figures = point.figures
        if before is not None and before != point.budget:
            table.add_section()
        speed = point.speed
        rates = ["-", "-"] if speed is None else [f"{speed.tok_per_s:.2f}", f"{speed.ceiling_tok_per_s:.2f}"]
        table.add_row(
            f"{format_bytes(point.budget_bytes)} ({point.share:.0%})" if before != point.budget else "",
            point.policy,
            *([Path(point.trace).name] if several else []),
            f"{figures.hit_rate:.1%}",
            str(figures.misses),
            format_bytes(figures.bytes_read),
            "-" if gap is None else f"{gap:.0%}",
            *(rates if options.rates is not None else []),
        )
        before = point.budget
    console.print(table)


def _notes(points: list[Point], options: Options) -> list[str]:
    notes = ["gap: of the bytes lru reads beyond belady, the share this policy does not read"]
    if options.rates is not None:
        notes.append(
            "tok/s: of decoded tokens, compute and then the disk; at most: the longer of the two alone"
        )
    if any(point.figures.early for point in points):
        notes.append(
            "read: what was asked for early too, each as if read to its end; --no-speculation leaves it out"
        )
    if options.warm_half:
        notes.append("belady reads least over both halves together, not in the second alone")
    if any(point.policy == "pinned" for point in points) and not options.warm_half:
        notes.append(
            "pinned is seeded by each trace's own first half: hold it against the others with --warm-half"
        )
    refused = {point.budget: point.figures.refused for point in points if point.figures.refused}
    for budget, count in refused.items():
        notes.append(
            f"budget {budget}: {count} routes are wider than it holds and are not counted at all: the engine would "
            "have taken smaller steps"
        )
    return notes
