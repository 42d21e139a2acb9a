"""``moestream report DIR...``: what benches and experiments found, as text, markdown, JSON and one HTML page."""

from __future__ import annotations

import io
import json as json_module
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestream.errors import UsageError
from moestream.files import check_listable, exists, followed
from moestream.report import check_writable

if TYPE_CHECKING:
    from moestream.reports import Group
    from moestream.reports.traces import Routing

#: What a bench, an experiment or a probe wrote: never replaced by a report, nor is a file of these suffixes.
_MEASUREMENTS = ("setup.json", "summary.json", "verdict.json", "probe*.json")
_MEASURED_SUFFIXES = (".jsonl", ".parquet", ".gguf")
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
    _check_apart(outputs, directories, probe)
    from moestream.lab.record_kinds import refusing
    from moestream.reports import read_results, summarize
    from moestream.reports.document import document
    from moestream.reports.labs import is_lab, read_labs
    from moestream.reports.text import markdown as as_markdown
    from moestream.reports.text import print_report

    for directory in directories:
        check_listable(directory, "name one that a bench wrote (it holds runs.jsonl)")
    unique = {directory.resolve(): directory for directory in directories}
    measured = [directory for directory in unique.values() if not is_lab(directory)]
    groups = summarize([read_results(directory) for directory in measured], probe)
    asked = [directory for directory in unique.values() if directory not in measured]
    labs = [lab for directory in asked for lab in read_labs(directory, probe)]
    routings = _routings(groups)
    # All of it is made before anything is written or said.
    with refusing(f"one of the files in {', '.join(map(str, directories))}"):
        texts: dict[str, str] = {}
        if html is not None:
            from moestream.reports.page import page

            texts["--html"] = page(groups, routings, labs)
        if json is not None:
            texts["--json"] = _json_text(document(groups, routings, labs))
        if markdown is not None:
            texts["--markdown"] = as_markdown(groups, routings, labs)
        if "-" in (json, markdown):
            said = texts["--json" if json == "-" else "--markdown"]
        else:
            piped = io.StringIO()
            print_report(groups, routings, labs, piped)
            said = piped.getvalue()
    for path, option in outputs:
        _write(path, texts[option], option)
    if "-" not in (json, markdown) and sys.stdout.isatty():
        print_report(groups, routings, labs, sys.stdout)
    else:
        print(said, end="")
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
        real = followed(path, option)
        if _is_measurements(real) or (real.suffix == ".json" and option != "--json"):
            raise UsageError(f"{option} {path}: that is the name of measurements, name another file")
    return outputs


def _is_measurements(path: Path) -> bool:
    return path.suffix in _MEASURED_SUFFIXES or any(path.match(name) for name in _MEASUREMENTS)


def _check_apart(outputs: list[tuple[Path, str]], directories: list[Path], probe: Path | None) -> None:
    """UsageError where two outputs are one file, or one is a file that is read (whatever it is called, also by a link):
    nothing measured is replaced."""
    earlier: dict[Path, str] = {}
    for path, option in outputs:
        real = followed(path, option)
        if real in earlier:
            raise UsageError(f"{option} {path}: {earlier[real]} names that file too, name another")
        earlier[real] = option
    read = [probe] if probe is not None else []
    for directory in directories:
        read += [found for found in _files_in(directory) if _is_measurements(found)]
    for path, option in outputs:
        for measured in read:
            if exists(path) and exists(measured) and path.samefile(measured):
                raise UsageError(f"{option} {path}: that is {measured}, which is read: name another file")


def _files_in(directory: Path) -> list[Path]:
    """Of a bench, and of the experiments in a directory of several."""
    try:
        return [*directory.glob("*"), *directory.glob("*/*")]
    except OSError:
        return []  # whoever reads it says why


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


def _json_text(document: dict[str, Any]) -> str:
    """JSON has no word for what is no number: it becomes null."""
    return json_module.dumps(_finite(document), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, text: str, option: str) -> None:
    """The whole file or nothing."""
    from moestream.make.output import new_file

    with new_file(path, min(_ROOM_BYTES, 2 * len(text)), option) as temporary:
        temporary.write_text(text, encoding="utf-8")
