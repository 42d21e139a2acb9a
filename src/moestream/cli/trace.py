"""``moestream trace show|export|recover FILE``: look at a recorded run, make tables of it, finish a broken one."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestream.units import format_bytes

if TYPE_CHECKING:
    from moestream.trace.trace import Trace

#: Steps shown at either end.
_SHOWN = 3
_FILE = typer.Argument(help="A Parquet file that run --trace or a benchmark has written.")

trace = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Look at a recorded run, export it, or finish one that was cut short.",
)


@trace.command()
def show(
    file: Annotated[Path, _FILE],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what was run, how fast it was, and what it read."""
    from moestream.trace.read import read_trace

    description = describe(read_trace(file))
    if json:
        print(json_module.dumps(description, indent=2))
    else:
        _print(description)


@trace.command()
def export(
    file: Annotated[Path, _FILE],
    csv: Annotated[Path, typer.Option("--csv", help="One row a step; the experts go to NAME.experts.csv.")],
    quiet: Annotated[bool, typer.Option("-q", help="Leave out the rows of experts.")] = False,
) -> None:
    """Write a trace as CSV: a table of steps, and one of each expert each token was routed to."""
    from moestream.trace.export import export_csv
    from moestream.trace.read import read_trace

    for path in export_csv(read_trace(file), csv, experts=not quiet):
        print(path)


@trace.command()
def recover(file: Annotated[Path, typer.Argument(help="The file the run was to write.")]) -> None:
    """Finish the trace of a run that died: FILE.partial becomes FILE."""
    from moestream.trace.write import recover as finish

    steps = finish(file)
    print(f"{file}: {steps} steps recovered")


def describe(trace: Trace) -> dict[str, Any]:
    """A trace as plain JSON values: ``meta``, the figures of each phase as in ``run --json``, reads by kind (``slabs``,
    ``bytes``, ``waited_s``), and the first and last steps."""
    from moestream.stats import phase_summary
    from moestream.trace.trace import PHASES, SLAB_KINDS

    steps = _steps(trace)
    phases = {}
    for phase in PHASES:
        mine = [step for name, _, step in steps if name == phase]
        phases[phase] = {"steps": len(mine), **phase_summary(mine)}
        del phases[phase]["step_ms"]
    slabs = trace.slabs
    reads = {}
    for number, kind in enumerate(SLAB_KINDS):
        which = slabs.kind == number
        reads[kind] = {
            "slabs": int(which.sum()),
            "bytes": int(slabs.bytes[which].sum()),
            "waited_s": int(slabs.waited_ns[which].sum()) * 1e-9,
        }
    return {
        "meta": trace.meta,
        "steps": len(steps),
        "routes": len(trace.routes),
        "slab_events": len(slabs),
        **phases,
        "reads": reads,
        "first": [_row(*step) for step in steps[:_SHOWN]],
        "last": [_row(*step) for step in steps[max(_SHOWN, len(steps) - _SHOWN) :]],
    }


def _steps(trace: Trace) -> list[tuple[str, int, Any]]:
    """Phase, number and figures of each step."""
    from dataclasses import fields

    from moestream.stats import Step
    from moestream.trace.trace import PHASES

    columns = {field.name: trace.steps[field.name].tolist() for field in fields(Step)}
    return [
        (PHASES[phase], number, Step(**{name: values[i] for name, values in columns.items()}))
        for i, (phase, number) in enumerate(
            zip(trace.steps["phase"].tolist(), trace.steps["step"].tolist(), strict=True)
        )
    ]


def _row(phase: str, number: int, step: Any) -> dict[str, Any]:
    names = ("tokens", "seconds", "hits", "misses", "bytes_read", "stall_s", "memory_work_s", "majflt")
    return {"step": number, "phase": phase, **{name: getattr(step, name) for name in names}}


def _print(description: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value in _facts(description):
        facts.add_row(label, value)
    console.print(facts)
    if not description["steps"]:
        console.print("no steps were recorded")
        return
    console.print(_phases(description, Table))
    console.print(_step_table(description, Table))


def _facts(description: dict[str, Any]) -> list[tuple[str, str]]:
    meta = description["meta"]
    model, budget, box = meta["model"], meta.get("budget", {}), meta.get("box", {})
    versions = ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items())
    facts = [
        ("model", f"{model.get('name', '?')} ({model.get('arch', '?')}), identity {model['identity']}"),
        ("experts", f"{sum(model['experts'])} in {len(model['experts'])} banks"),
        ("box", ", ".join(f"{name} {value}" for name, value in box.items() if not isinstance(value, dict))),
        ("mechanism", str(meta.get("mechanism", "?"))),
        *(("not as asked", text) for text in meta.get("fallbacks", [])),
        ("budget", ", ".join(f"{name.removesuffix('_bytes')} {_size(n)}" for name, n in budget.items())),
        ("recorded", f"{meta.get('created', '?')} by {versions}"),
        ("command", " ".join(meta.get("command", []))),
        ("routes", f"{description['routes']}, {description['slab_events']} slab events"),
    ]
    for kind, reads in description["reads"].items():
        if reads["slabs"]:
            text = f"{reads['slabs']} slabs, {format_bytes(reads['bytes'])}, waited for {reads['waited_s']:.2f} s"
            facts.append((kind, text))
    return facts


def _size(value: Any) -> str:
    return format_bytes(value) if isinstance(value, (int, float)) else "?"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _phases(description: dict[str, Any], table_type: Any) -> Any:
    table = table_type("phase")
    for column in (
        "steps",
        "tokens",
        "tok/s",
        "p50 ms",
        "p95 ms",
        "hit rate",
        "read",
        "a token",
        "stall",
        "work",
    ):
        table.add_column(column, justify="right")
    for name in ("prefill", "decode"):
        phase = description[name]
        routed, tokens = phase["hits"] + phase["misses"], phase["tokens"]
        table.add_row(
            name,
            str(phase["steps"]),
            str(tokens),
            _number(phase["tok_per_s"], ".2f"),
            _number(phase["p50_ms"], ".1f"),
            _number(phase["p95_ms"], ".1f"),
            _number(phase["hits"] / routed if routed else None, ".1%"),
            format_bytes(phase["bytes_read"]),
            format_bytes(phase["bytes_read"] / tokens) if tokens else "-",
            f"{phase['stall_s']:.2f} s",
            f"{phase['memory_work_s']:.2f} s",
        )
    return table


def _step_table(description: dict[str, Any], table_type: Any) -> Any:
    table = table_type("step", "phase")
    for column in ("tokens", "ms", "hits", "misses", "read", "stall ms", "work ms", "major faults"):
        table.add_column(column, justify="right")

    def add(step: dict[str, Any], end_section: bool = False) -> None:
        table.add_row(
            str(step["step"]),
            step["phase"],
            str(step["tokens"]),
            f"{step['seconds'] * 1e3:.1f}",
            str(step["hits"]),
            str(step["misses"]),
            format_bytes(step["bytes_read"]),
            f"{step['stall_s'] * 1e3:.1f}",
            f"{step['memory_work_s'] * 1e3:.1f}",
            str(step["majflt"]),
            end_section=end_section,
        )

    for step in description["first"]:
        add(step, end_section=step is description["first"][-1])
    for step in description["last"]:
        add(step)
    return table
