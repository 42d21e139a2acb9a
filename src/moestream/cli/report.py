"""``moestream report DIR...``: what benches and experiments found, as text, markdown, JSON and one HTML page."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestream.errors import UsageError
from moestream.report import check_writable, write_json

if TYPE_CHECKING:
    from moestream.reports import Group
    from moestream.reports.traces import Routing

#: What a bench or an experiment wrote: never replaced by a report.
_MEASUREMENTS = ("setup.json", "summary.json", "verdict.json")
#: Room that a report needs at most.
_ROOM_BYTES = 32 << 20


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Directories that `bench` or `lab run` wrote.")
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page with all pictures, to be opened anywhere."),
    ] = None,
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Write markdown; - for stdout instead of the text.")
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Write all figures as JSON; - for stdout instead of the text."),
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ceilings from `moestream probe --json FILE`.")
    ] = None,
) -> None:
    """Show what runs measured: speed with its interval, where the time went, what limits it, and how to repeat it.

    Several directories stand side by side. Runs of different boxes are never put into one figure. Where a run's trace
    lies beside its record, the page shows what other budgets and policies would have read. Of experiments it shows the
    verdicts with their figures.
    """
    outputs = _outputs(html, markdown, json)
    from moestream.reports import read_results, summarize
    from moestream.reports.document import document
    from moestream.reports.labs import is_lab, read_labs
    from moestream.reports.text import markdown as as_markdown
    from moestream.reports.text import print_report

    unique = {directory.resolve(): directory for directory in directories}
    measured = [directory for directory in unique.values() if not is_lab(directory)]
    groups = summarize([read_results(directory) for directory in measured], probe)
    asked = [directory for directory in unique.values() if directory not in measured]
    labs = [lab for directory in asked for lab in read_labs(directory, probe)]
    routings = _routings(groups)
    if html is not None:
        from moestream.reports.page import page

        _write(html, page(groups, routings, labs))
    if json not in (None, "-"):
        write_json(Path(json), document(groups, routings, labs))
    if markdown not in (None, "-"):
        _write(Path(markdown), as_markdown(groups, routings, labs))
    if json == "-":
        print(json_module.dumps(document(groups, routings, labs), indent=1))
    elif markdown == "-":
        print(as_markdown(groups, routings, labs), end="")
    else:
        print_report(groups, routings, labs, sys.stdout)
    for path, _ in outputs:
        print(f"wrote {path}", file=sys.stderr)


def _outputs(html: Path | None, markdown: str | None, json: str | None) -> list[tuple[Path, str]]:
    """The files to write and their options, each checked before anything is read. Raises UsageError."""
    if markdown == json == "-":
        raise UsageError("--markdown - and --json -: stdout is for one of the two")
    outputs = [(html, "--html")] if html is not None else []
    outputs += [
        (Path(text), option)
        for text, option in ((markdown, "--markdown"), (json, "--json"))
        if text not in (None, "-")
    ]
    for path, option in outputs:
        check_writable(path, option=option)
        ours = path.name in _MEASUREMENTS or path.suffix in (".jsonl", ".parquet")
        if ours or (path.suffix == ".json" and option != "--json"):
            raise UsageError(f"{option} {path}: that is the name of measurements, name another file")
    return outputs


def _routings(groups: list[Group]) -> list[Routing | None]:
    """What the traces beside each group's records say; what was left out of them is said at once."""
    # Without a trace nothing of replay needs to be imported.
    if not any(record["trace"] for group in groups for record in group.runs):
        return [None] * len(groups)
    from moestream.reports.traces import read_routing

    found = []
    for group in groups:
        routing, notes = read_routing(group)
        found.append(routing)
        for note in notes:
            print(f"{group.name}: {note}", file=sys.stderr)
    return found


def _write(path: Path, text: str) -> None:
    """The whole file or nothing."""
    from moestream.make.output import new_file

    with new_file(path, min(_ROOM_BYTES, 2 * len(text))) as temporary:
        temporary.write_text(text, encoding="utf-8")
