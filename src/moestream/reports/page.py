"""One HTML page that holds everything: its style, its pictures, no script, nothing from a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from moestream.reports import tables
from moestream.reports.repeat import commands
from moestream.reports.summary import Group
from moestream.reports.tables import Table
from moestream.version import __version__

#: A figure and the interval behind it, as `tables.with_interval` writes them.
_INTERVAL = re.compile(r"(\S+) \((\S+ … \S+)\)")


def page(groups: Sequence[Group]) -> str:
    """The whole page. Text from records is escaped: nothing in a record becomes markup."""
    title = ", ".join(group.name for group in groups)
    style = files("moestream.reports").joinpath("page.css").read_text(encoding="utf-8")
    together = tables.comparison(groups)
    body = [f"<h1>{escape(title)}</h1>"]
    body.append(
        '<p class="lead">What moves a mixture-of-experts model through too little memory, measured on this box.</p>'
        if len(groups) == 1
        else _contents(groups)
    )
    if together is not None:
        body.append(_card(table_html(together)))
    for number, group in enumerate(groups, 1):
        body += _group(group, number, alone=len(groups) == 1)
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


def _group(group: Group, number: int, alone: bool) -> list[str]:
    parts = [] if alone else [f'<h2 id="group-{number}">{escape(group.name)}</h2>']
    parts.append(f'<p class="lead">{escape(str(group.box))}</p>')
    parts.append(_list("answers", tables.headline(group)))
    parts.append(_list("notes", list(group.notes)))
    parts.append(_card(table_html(tables.speed_table(group))))
    parts.append(_card(table_html(tables.work_table(group))))
    excluded = tables.excluded_table(group)
    if excluded is not None:
        parts.append(_card(table_html(excluded)))
    parts.append(_card(facts_html(tables.box_table(group))))
    lines = "".join(f'<span class="line">{escape(line)}</span>' for line in commands(group))
    parts.append(_card(f"<h3>To repeat it</h3><pre>{lines}</pre>"))
    return [part for part in parts if part]


def _card(inside: str) -> str:
    return f'<section class="card">{inside}</section>'


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
        opening = '<tr class="cap">' if new and rows else "<tr>"
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
    if at == 1:
        return f'<td class="name">{escape(cell)}</td>'
    label = f' data-label="{escape(table.columns[at])}"'
    if at < table.heads:
        return f'<td class="text"{label}>{escape(cell)}</td>'
    text = _INTERVAL.sub(r'<span>\1<span class="range">\2</span></span>', escape(cell))
    return f'<td class="figure"{label}>{text}</td>'
