"""One HTML page that holds everything: its style, its pictures, no script, nothing from a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from moestream.reports import plots, tables, trace_plots
from moestream.reports.canvas import Picture
from moestream.reports.repeat import commands
from moestream.reports.summary import Group
from moestream.reports.tables import Table
from moestream.reports.traces import Routing, curve_table
from moestream.version import __version__

#: A figure and the interval behind it, as `tables.with_interval` writes them.
_INTERVAL = re.compile(r"(\S+) \((\S+ … \S+)\)")


def page(groups: Sequence[Group], routings: Sequence[Routing | None]) -> str:
    """The whole page; ``routings``: what each group's traces say. Nothing in a record becomes markup."""
    title = ", ".join(group.name for group in groups)
    style = files("moestream.reports").joinpath("page.css").read_text(encoding="utf-8")
    together = tables.comparison(groups)
    body = [f"<h1>{escape(title)}</h1>"]
    if len(groups) > 1:
        body.append(_contents(groups))
    if together is not None:
        body.append(_card(table_html(together)))
    for number, (group, routing) in enumerate(zip(groups, routings, strict=True), 1):
        body += _group(group, routing, number, alone=len(groups) == 1)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Browsers ask for an icon unless they are told that there is none.
        '<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n<footer>moestream {escape(__version__)}</footer>\n</main>\n</body>\n</html>\n"
    )


def _contents(groups: Sequence[Group]) -> str:
    links = (f'<a href="#group-{number}">{escape(group.name)}</a>' for number, group in enumerate(groups, 1))
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
    lines = "".join(f'<span class="line">{escape(line)}</span>' for line in commands(group))
    parts.append(_card(f"<h3>To repeat it</h3><pre>{lines}</pre>"))
    return [part for part in parts if part]


def _card(inside: str) -> str:
    return f'<section class="card">{inside}</section>'


def _picture(found: Picture | None) -> str:
    if found is None:
        return ""
    return _card(
        f'<h3>{escape(found.title)}</h3><figure><div class="wide">{found.wide}</div>'
        f'<div class="narrow">{found.narrow}</div><figcaption>{escape(found.caption)}</figcaption></figure>'
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
    """A table whose rows become blocks where there is no room for its columns; a cap is named once."""
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
    return (
        f'<h3>{escape(table.title)}</h3><table class="stack"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{notes}"
    )


def _figure(at: int, table: Table) -> str:
    return ' class="figure"' if at >= table.heads else ""


def _cell(at: int, cell: str, table: Table, shown: bool) -> str:
    if at == 0:
        return f"<th>{escape(cell) if shown else ''}</th>"
    if at == 1 and table.heads > 1:
        return f'<td class="name">{escape(cell)}</td>'
    if cell == tables.UNKNOWN:
        return '<td class="figure none"></td>'
    label = f' data-label="{escape(table.columns[at])}"'
    if at < table.heads:
        return f'<td class="text"{label}>{escape(cell)}</td>'
    text = _INTERVAL.sub(r'<span>\1<span class="range">\2</span></span>', escape(cell))
    kind = "figure long" if text != escape(cell) else "figure"
    return f'<td class="{kind}"{label}>{text}</td>'
