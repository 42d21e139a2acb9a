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
_FILE = typer.Argument(metavar="TRACE", help="A Parquet file that run --trace or a benchmark has written.")

trace = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Show a recorded run, export it, or finish one cut short.",
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
    csv: Annotated[
        Path,
        typer.Option("--csv", metavar="FILE", help="One row a step; the experts go to NAME.experts.csv."),
    ],
    quiet: Annotated[bool, typer.Option("-q", help="Leave out the rows of experts.")] = False,
) -> None:
    """Write a trace as CSV: its steps, and its routes.

    The second table has a row for each expert each token was routed to.
    """
    from moestream.trace.export import export_csv
    from moestream.trace.read import read_trace

    for path in export_csv(read_trace(file), csv, experts=not quiet):
        print(path)


@trace.command()
def recover(
    file: Annotated[Path, typer.Argument(metavar="TRACE", help="The file the run was to write.")],
) -> None:
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
    from rich.table import Table

    from moestream.console import print_facts

    console = print_facts(_facts(description))
    if not description["steps"]:
        console.print("it holds no steps")
        return
    console.print(_phases(description, Table))
    console.print(_step_table(description, Table))


def _facts(description: dict[str, Any]) -> list[tuple[str, str]]:
    meta = description["meta"]
    model, budget = meta["model"], meta.get("budget", {})
    versions = ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items())
    facts = [
        ("model", f"{model.get('name', '?')} ({model.get('arch', '?')}), identity {model['identity']}"),
        ("experts", f"{sum(model['experts'])} in {len(model['experts'])} banks"),
        ("box", _box(meta.get("box", {}))),
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
    return [(label, text) for label, text in facts if text]


def _box(box: dict[str, Any]) -> str:
    words = [f"{name} {box[name]}" for name in ("cpus", "machine", "kernel", "fs", "device") if name in box]
    return ", ".join([*words, f"memory {_size(box.get('ram_bytes'))}"])


def _size(value: Any) -> str:
    return format_bytes(value) if isinstance(value, (int, float)) else "?"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _table(table_type: Any, *columns: str) -> Any:
    """A table of numbers that fits a terminal of 80 columns."""
    table = table_type(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "phase" else "right", no_wrap=True)
    return table


def _phases(description: dict[str, Any], table_type: Any) -> Any:
    table = _table(
        table_type,
        "phase",
        "steps",
        "tokens",
        "tok/s",
        "p50 ms",
        "p95 ms",
        "hits",
        "read",
        "a token",
        "stall s",
    )
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
            f"{phase['stall_s']:.2f}",
        )
    return table


def _step_table(description: dict[str, Any], table_type: Any) -> Any:
    """The first and the last steps; times in ms."""
    table = _table(
        table_type, "step", "phase", "tokens", "ms", "stall", "work", "hits", "misses", "read", "majflt"
    )
    for step in description["first"]:
        table.add_row(*_cells(step))
    if description["steps"] > len(description["first"]) + len(description["last"]):
        table.add_row("...")
    for step in description["last"]:
        table.add_row(*_cells(step))
    return table


def _cells(step: dict[str, Any]) -> list[str]:
    return [
        str(step["step"]),
        step["phase"],
        str(step["tokens"]),
        *(f"{step[name] * 1e3:.1f}" for name in ("seconds", "stall_s", "memory_work_s")),
        str(step["hits"]),
        str(step["misses"]),
        format_bytes(step["bytes_read"]),
        str(step["majflt"]),
    ]
