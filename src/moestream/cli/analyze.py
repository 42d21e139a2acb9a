"""``moestream analyze TRACE``: how skewed and how local routing is, and what could be known of it in advance."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream.cli.banner import Bar
from moestream.errors import UsageError
from moestream.files import exists
from moestream.report import check_writable, write_json
from moestream.units import format_bytes

#: Distances the summary shows; --json has all.
_DISTANCES = (1, 2, 4, 8, 16, 32)


def analyze(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, made by run --trace.")],
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write one JSON object there; - for stdout.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a heat map, locality and recall: a .png, .svg or .pdf."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Expert memory to count misses at: 25%, 400MB, recorded; several with commas.",
        ),
    ] = None,
) -> None:
    """Show skew, locality, how well predictors name what comes next, and what of it a cache would have missed.

    Misses are counted one token a step, a prompt's too, by the engine's own cache under the trace's policy.
    """
    _check_outputs(trace, json, plot)
    from moestream.analyze.plot import plot as draw
    from moestream.analyze.report import analyze as make
    from moestream.replay.curves import parse_budgets
    from moestream.replay.run import prepare
    from moestream.trace.read import read_trace

    found = read_trace(trace)
    recording = prepare(found, str(trace))
    budgets = parse_budgets(budget or ("recorded" if recording.capacities else "25%"), [recording])
    with Bar(sys.stderr, "analyzing") as bar:
        document = make(found, recording, budgets, bar.update)
    if plot is not None:
        draw(document, plot)
    if json == "-":
        print(json_module.dumps(document, indent=1))
        return
    if json is not None:
        write_json(Path(json), document)
    _print(document)
    for path in (json, plot):
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)


def _check_outputs(trace: Path, json: str | None, plot: Path | None) -> None:
    """What can be told of the files to be written before anything is read; a model or a trace is never replaced."""
    if plot is not None:
        from moestream.analyze.plot import check_plot

        check_plot(plot)
        check_writable(plot, option="--plot")
    if json is None or json == "-":
        return
    path = Path(json)
    check_writable(path, option="--json")
    if exists(path) and (path.suffix != ".json" or path.resolve() == trace.resolve()):
        raise UsageError(f"--json {path} exists: name a .json file to replace, or another place")


def _print(document: dict[str, Any]) -> None:
    from moestream.console import console as stdout

    console = stdout()
    model, demand = document["model"], document["demand"]
    console.print(
        f"{document['trace']}: {document['tokens']} tokens, {len(document['layers'])} layers", soft_wrap=True
    )
    console.print(f"model      {model['name'] or model['arch']} ({model['identity']})", soft_wrap=True)
    console.print(f"mechanism  {document['mechanism']}", soft_wrap=True)
    console.print(
        f"demand     {format_bytes(demand['bytes_per_token'])} a token of {format_bytes(demand['expert_bytes'])} "
        "of experts, in pages that come and go",
        soft_wrap=True,
    )
    cliff = (
        "never hits in this trace"
        if demand["cliff_bytes"] is None
        else (
            f"hits nothing below {format_bytes(demand['cliff_bytes'])} ({demand['cliff_share']:.1%} of the experts)"
        )
    )
    console.print(f"cliff      a global LRU {cliff}", soft_wrap=True)
    for table in (_layers_table, _locality_table, _recall_table, _predictors_table):
        console.print(table(document))
    for name, why in document["predictors"]["absent"].items():
        console.print(f"{name}: {why}", soft_wrap=True)
    for budget in document["budgets"]:
        console.print(_budget_table(budget))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _layers_table(document: dict[str, Any]) -> Any:
    """One row a layer: skew, and the overlap with the token before."""
    from moestream.console import table as new_table

    table = new_table(
        "By layer: fewest experts for so much of the activations, distinct ones, overlap of neighbours",
        "layer", "experts", "50%", "80%", "95%", "distinct", "in 64", "overlap", "shuffled",
    )  # fmt: skip
    near = document["locality"]
    for number, row in enumerate(document["skew"]):
        window = row["distinct_in_window"]
        table.add_row(
            str(row["layer"]),
            str(row["experts"]),
            *(str(count) for count in row["needed"].values()),
            str(row["distinct"]),
            "-" if window is None else f"{window:.0f}",
            _share(near["overlap"][number][0]),
            _share(near["control"][number][0]),
        )
    return table


def _locality_table(document: dict[str, Any]) -> Any:
    from moestream.analyze.routing import mean_over_layers
    from moestream.console import table as new_table

    near = document["locality"]
    columns = [near["distances"].index(distance) for distance in _DISTANCES]
    table = new_table("Overlap with the token so many before, mean of all layers", "", *map(str, _DISTANCES))
    for label, kind in (("as it was", "overlap"), ("shuffled", "control")):
        mean = mean_over_layers(near[kind])
        table.add_row(label, *(_share(mean[column]) for column in columns))
    return table


def _recall_table(document: dict[str, Any]) -> Any:
    """One row a layer: the recall of each predictor one layer ahead."""
    from moestream.console import table as new_table

    told = document["predictors"]
    title = f"Recall@{told['k']} one layer ahead, by layer, on the last {told['tokens']} tokens"
    table = new_table(title, "layer", *told["recall"])
    for number, layer in enumerate(document["layers"]):
        table.add_row(str(layer), *(_share(by["1"][number]) for by in told["recall"].values()))
    return table


def _predictors_table(document: dict[str, Any]) -> Any:
    from moestream.analyze.predictors import LOOKAHEADS
    from moestream.analyze.routing import mean_over_layers
    from moestream.console import table as new_table

    told = document["predictors"]
    wishes = list(next(iter(told["precision"].values())))
    table = new_table(
        f"Recall@{told['k']} so many layers ahead, mean of all; and how many of the first named are right",
        "predictor",
        *(f"{ahead} ahead" for ahead in LOOKAHEADS),
        *(f"of {n}" for n in wishes),
    )
    for name, by in told["recall"].items():
        recalls = [
            mean_over_layers([[v] for v in by[str(a)]])[0] if str(a) in by else None for a in LOOKAHEADS
        ]
        table.add_row(name, *map(_share, recalls), *(_share(told["precision"][name][n]) for n in wishes))
    return table


def _budget_table(budget: dict[str, Any]) -> Any:
    from moestream.console import table as new_table

    table = new_table(
        f"At {budget['budget']} ({format_bytes(budget['budget_bytes'])}), {budget['policy']}: "
        f"{_share(budget['miss_rate'])} of the experts missed in the last {budget['tokens']} tokens",
        "predictor", "named", "misses named", "wasted/saved", "demand saved", "bytes read",
    )  # fmt: skip
    for name, by in budget["by"].items():
        for wishes, row in by.items():
            wasted = row["wasted_bytes_per_saved_byte"]
            table.add_row(
                name,
                wishes,
                _share(row["named_share_of_misses"]),
                "-" if wasted is None else f"{wasted:.2f}",
                _share(row["demand_bytes_saved"]),
                _share(row["bytes_read_ratio"]),
            )
    return table
