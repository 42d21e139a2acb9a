"""One HTML page that holds everything: its style, its pictures, no script, nothing from a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from moestream.lab.verdicts import AGREES, CANNOT_TELL, DISAGREES
from moestream.reports import lab_plots, lab_tables, plots, tables, trace_plots
from moestream.reports.canvas import Picture
from moestream.reports.labs import Lab, Outcome
from moestream.reports.repeat import commands, lab_commands
from moestream.reports.summary import Group
from moestream.reports.tables import Table
from moestream.reports.traces import Routing, curve_table
from moestream.version import __version__

#: A figure and the interval behind it, as `tables.with_interval` writes them.
#: A longer name of a figure takes a line of its own on a phone.
_LONG_LABEL = 16
_WORDS = (AGREES, DISAGREES, CANNOT_TELL)
_INTERVAL = re.compile(r"([^()]+) \(([^()]+ … [^()]+)\)")


def page(groups: Sequence[Group], routings: Sequence[Routing | None], labs: Sequence[Lab] = ()) -> str:
    """The whole page; ``routings``: what each group's traces say. Nothing in a record becomes markup."""
    title = ", ".join([*(group.name for group in groups), *(lab.name for lab in labs)])
    style = files("moestream.reports").joinpath("page.css").read_text(encoding="utf-8")
    together = tables.comparison(groups)
    body = [f"<h1>{escape(title)}</h1>"]
    if len(groups) + len(labs) > 1:
        body.append(_contents([*groups, *labs]))
    if together is not None:
        body.append(_card(table_html(together)))
    for number, (group, routing) in enumerate(zip(groups, routings, strict=True), 1):
        body += _group(group, routing, number, alone=len(groups) + len(labs) == 1)
    if labs:
        body.append(_card(table_html(lab_tables.overview(labs))))
    for number, lab in enumerate(labs, len(groups) + 1):
        body += _lab(lab, number, alone=len(groups) + len(labs) == 1)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Browsers ask for an icon unless they are told that there is none.
        '<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n<footer>moestream {escape(__version__)}</footer>\n</main>\n</body>\n</html>\n"
    )


def _contents(parts: Sequence[Group | Lab]) -> str:
    links = (f'<a href="#group-{number}">{escape(part.name)}</a>' for number, part in enumerate(parts, 1))
    return f"<nav>{''.join(links)}</nav>"


def _group(group: Group, routing: Routing | None, number: int, alone: bool) -> list[str]:
    parts = [] if alone else [f'<h2 id="group-{number}">{escape(group.name)}</h2>']
    about = f"{group.model.get('name') or 'a model'} on {group.box}"
    parts.append(f'<p class="lead">{escape(about)}</p>')
    parts.append(_list("answers", tables.headline(group)))
    parts.append(_list("notes", list(group.notes)))
    name = f"g{number}"
    if group.runs:
        parts.append(_picture(plots.speed(group, f"{name}-speed")))
    parts.append(_card(table_html(tables.speed_table(group))))
    for at, cap in enumerate(group.caps):
        parts.append(_picture(plots.waterfall(group, cap, f"{name}-steps-{at}")))
    if group.runs:
        parts.append(_picture(plots.time_split(group, f"{name}-split")))
    parts.append(_card(table_html(tables.work_table(group))))
    parts.append(_card(table_html(tables.cost_table(group))))
    for at, cap in enumerate(group.caps):
        parts.append(_picture(plots.series(group, cap, f"{name}-tokens-{at}")))
    if routing is not None:
        parts.append(_picture(trace_plots.byte_curves(group, routing, f"{name}-curves")))
        parts.append(_picture(trace_plots.heat_map(routing, f"{name}-heat")))
        parts.append(_card(table_html(curve_table(routing))))
    excluded = tables.excluded_table(group)
    if excluded is not None:
        parts.append(_card(table_html(excluded)))
    parts.append(_card(facts_html(tables.box_table(group))))
    if group.doubts:
        parts.append(_card(f"<h3>Doubts</h3>{_list('notes', tables.doubt_lines(group))}"))
    parts.append(_card(f"<h3>To repeat it</h3>{_commands(commands(group))}"))
    return [part for part in parts if part]


def _lab(lab: Lab, number: int, alone: bool) -> list[str]:
    parts = [] if alone else [f'<h2 id="group-{number}">{escape(lab.name)}</h2>']
    parts.append(f'<p class="lead">{escape(lab_tables.about(lab))}</p>')
    parts.append(_list("notes", list(lab.notes)))
    parts += [_outcome(lab, one, f"l{number}-{at}") for at, one in enumerate(lab.outcomes)]
    return [part for part in parts if part]


def _outcome(lab: Lab, outcome: Outcome, name: str) -> str:
    verdict = str(outcome["verdict"])
    found = f"{outcome.get('source')}: {outcome.get('found')}"
    inside = [
        f"<h3>{escape(outcome['experiment'])} {_word(verdict)}</h3><p>{escape(outcome['question'])}</p>",
        f'<p class="fine">{escape(found)}</p>',
        f'<ul class="claims">{"".join(map(_claim, outcome["claims"]))}</ul>',
    ]
    drawn = lab_plots.bars(outcome, lab.ceilings, name)
    inside.append(figure_html(drawn) if drawn is not None else "")
    if outcome["table"]:
        inside.append(_stack(lab_tables.figure_table(outcome)))
    inside.append(_list("notes", lab_tables.remarks(outcome)))
    inside.append(_commands(lab_commands(lab, outcome)))
    return _card("".join(inside))


def _claim(claim: dict[str, Any]) -> str:
    text = escape(lab_tables.claim_text(claim))
    return (
        f'<li>{_word(str(claim["word"]))} {escape(str(claim["says"]))}<span class="range">{text}</span></li>'
    )


def _word(verdict: str) -> str:
    return f'<span class="word {verdict.split()[0] if verdict in _WORDS else ""}">{escape(verdict)}</span>'


def _commands(lines: Sequence[str]) -> str:
    shown = "".join(f'<span class="line">{escape(line)}</span>' for line in lines)
    return f"<pre>{shown}</pre>"


def _card(inside: str) -> str:
    return f'<section class="card">{inside}</section>'


def _picture(found: Picture | None) -> str:
    if found is None:
        return ""
    return _card(f"<h3>{escape(found.title)}</h3>{figure_html(found)}")


def figure_html(found: Picture) -> str:
    """A picture in both widths, of which the style sheet shows one."""
    return (
        f'<figure><div class="wide">{found.wide}</div><div class="narrow">{found.narrow}</div>'
        f"<figcaption>{escape(found.caption)}</figcaption></figure>"
    )


def _list(kind: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f'<ul class="{kind}">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def facts_html(table: Table) -> str:
    """A table of two columns, a name and a sentence."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in table.rows)
    return f'<h3>{escape(table.title)}</h3><table class="facts"><tbody>{rows}</tbody></table>'


def table_html(table: Table) -> str:
    """A titled table whose rows become blocks where there is no room for its columns; a cap is named once."""
    return f"<h3>{escape(table.title)}</h3>{_stack(table)}"


def _stack(table: Table) -> str:
    head = "".join(
        f"<th{_figure(at, table)}>{escape(column)}</th>" for at, column in enumerate(table.columns)
    )
    rows: list[str] = []
    before = None
    for row in table.rows:
        new = row[0] != before
        before = row[0]
        cells = "".join(_cell(at, cell, table, shown=at > 0 or new) for at, cell in enumerate(row))
        opening = '<tr class="cap">' if new and rows and table.heads > 1 else "<tr>"
        rows.append(f"{opening}{cells}</tr>")
    notes = "".join(f'<p class="fine">{escape(note)}</p>' for note in table.notes)
    return f'<table class="stack"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>{notes}'


def _figure(at: int, table: Table) -> str:
    return ' class="figure"' if at >= table.heads else ""


def _label(at: int, table: Table) -> str:
    return f' data-label="{escape(table.columns[at])}"'


def _cell(at: int, cell: str, table: Table, shown: bool) -> str:
    if at == 0:
        return f"<th>{escape(cell) if shown else ''}</th>"
    if table.columns[at] == "mechanism":
        return f'<td class="name">{escape(cell)}</td>'
    if cell in _WORDS:
        return f'<td class="text"{_label(at, table)}>{_word(cell)}</td>'
    if cell == tables.UNKNOWN:
        return '<td class="figure none"></td>'
    label = _label(at, table)
    if at < table.heads:
        return f'<td class="text"{label}>{escape(cell)}</td>'
    text = _INTERVAL.sub(r'<span>\1<span class="range">\2</span></span>', escape(cell))
    wide = text != escape(cell) or len(table.columns[at]) > _LONG_LABEL
    kind = "figure long" if wide else "figure"
    return f'<td class="{kind}"{label}>{text}</td>'
