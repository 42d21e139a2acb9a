"""Reports for a terminal, and as markdown: the same tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from moestream.reports import lab_tables, tables
from moestream.reports.labs import Lab
from moestream.reports.repeat import commands, lab_commands
from moestream.reports.summary import Group
from moestream.reports.tables import Table
from moestream.reports.traces import Routing, curve_table, routing_lines

_BAR = 24
#: What is piped has no width, and is given this one; a terminal that has less gets narrower tables.
_PIPED_WIDTH = 160


def sections(group: Group, routing: Routing | None) -> list[Table]:
    """A group's tables in the order of reading."""
    found = [
        make(group) for make in (tables.box_table, tables.speed_table, tables.work_table, tables.cost_table)
    ]
    excluded = tables.excluded_table(group)
    found += [curve_table(routing)] if routing is not None else []
    return [*found, excluded] if excluded is not None else found


def _sentences(group: Group, routing: Routing | None) -> list[str]:
    lines = tables.headline(group) + (routing_lines(routing) if routing is not None else [])
    lines += [f"note: {note}" for note in group.notes]
    return lines + [f"doubt: {line}" for line in tables.doubt_lines(group)]


def print_report(
    groups: Sequence[Group],
    routings: Sequence[Routing | None],
    labs: Sequence[Lab],
    file: IO[str],
) -> None:
    """Everything for a terminal, or for a file; ``routings``: what each group's traces say."""
    from moestream.console import console as to

    console = to(file, _PIPED_WIDTH)
    together = tables.comparison(groups)
    if together is not None:
        _print_table(console, together)
    for group, routing in zip(groups, routings, strict=True):
        console.print(f"{group.name}: {group.box}", soft_wrap=True)
        for line in _sentences(group, routing):
            console.print(line, soft_wrap=True)
        console.print()
        for bar in bars(group):
            console.print(bar, soft_wrap=True)
        for table in sections(group, routing):
            _print_table(console, table)
        console.print("To repeat it:")
        for line in commands(group):
            console.print(f"  {line}", soft_wrap=True)
        console.print()
    if labs:
        _print_table(console, lab_tables.overview(labs))
    for lab in labs:
        _print_lab(console, lab)


def _print_lab(console: Any, lab: Lab) -> None:
    console.print(f"{lab.name}: {lab_tables.about(lab)}", soft_wrap=True)
    for note in lab.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for outcome in lab.outcomes:
        console.print()
        console.print(f"{outcome['experiment']}: {outcome['verdict']}", soft_wrap=True)
        console.print(f"  {outcome['question']}", soft_wrap=True)
        if outcome["table"]:
            _print_table(console, lab_tables.figure_table(outcome))
        for claim in outcome["claims"]:
            console.print(f"  {claim['word']}: {claim['says']}", soft_wrap=True)
            console.print(f"      {lab_tables.claim_text(claim)}", soft_wrap=True)
        for remark in lab_tables.remarks(outcome):
            console.print(f"  {remark}", soft_wrap=True)
        console.print(f"  repeat: {' && '.join(lab_commands(lab, outcome))}", soft_wrap=True)
    console.print()


def bars(group: Group) -> list[str]:
    """Each arm's rate as a bar of text, in one scale up to the compute ceiling."""
    arms = [arm for arm in group.arms if arm.rate is not None]
    rates = [arm.rate.value for arm in arms if arm.rate is not None]
    most = max([*rates, group.ceilings.compute_rate or 0.0], default=0.0)
    if most <= 0:
        return []
    caps = [tables.cap_text(arm.cap_bytes) for arm in arms]
    names = [f"{cap:<{max(map(len, caps))}}  {arm.label}" for cap, arm in zip(caps, arms, strict=True)]
    wide = max(map(len, names))
    lines = []
    for name, rate in zip(names, rates, strict=True):
        full, rest = divmod(round(rate / most * _BAR * 8), 8)
        drawn = "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")
        lines.append(f"{name:<{wide}}  {drawn:<{_BAR}}  {rate:.2f} tok/s")
    return lines


def _print_table(console: Any, table: Table) -> None:
    """A table whose figures are never cut or folded: where there is little room, intervals stand under their value."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table as RichTable

    def narrow(text: str, mark: str) -> str:
        return text.replace(f" {mark}", f"\n{mark}") if console.width < _PIPED_WIDTH else text

    drawn = RichTable(
        title=table.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(table.columns),
    )
    shown = [
        [narrow(cell, "(") if at >= table.heads else cell for at, cell in enumerate(row)]
        for row in table.rows
    ]
    for at, column in enumerate(table.columns):
        figure = at >= table.heads
        heading = narrow(column, "") if figure else column
        whole = figure or at == 0 or column == "mechanism"
        lines = [line for cell in (heading, *(row[at] for row in shown)) for line in cell.splitlines()]
        drawn.add_column(
            heading,
            justify="right" if figure else "left",
            overflow="fold",
            min_width=max(map(len, lines), default=0) if whole else None,
        )
    for row in shown:
        drawn.add_row(*row)
    needed = console.measure(drawn).minimum
    if needed > console.width:
        # The terminal wraps its lines: better than figures that are lost.
        drawn.width = needed
    console.print(drawn, crop=False)
    for note in table.notes:
        console.print(Padding(note, (0, 0, 0, 2), expand=False))
    console.print()


def markdown(groups: Sequence[Group], routings: Sequence[Routing | None], labs: Sequence[Lab] = ()) -> str:
    """The whole report as markdown."""
    lines = [f"# {', '.join([*(group.name for group in groups), *(lab.name for lab in labs)])}", ""]
    together = tables.comparison(groups)
    if together is not None:
        lines += _markdown_table(together)
    for group, routing in zip(groups, routings, strict=True):
        lines += [f"## {_escaped(group.name)}", ""]
        lines += [f"- {_escaped(line)}" for line in _sentences(group, routing)]
        lines.append("")
        for table in sections(group, routing):
            lines += _markdown_table(table)
        lines += ["### To repeat it", "", "```", *commands(group), "```", ""]
    if labs:
        lines += _markdown_table(lab_tables.overview(labs))
    for lab in labs:
        lines += _markdown_lab(lab)
    return "\n".join(lines)


def _markdown_lab(lab: Lab) -> list[str]:
    lines = [f"## {_escaped(lab.name)}", "", _escaped(lab_tables.about(lab)), ""]
    lines += [f"- {_escaped(f'note: {note}')}" for note in lab.notes]
    for outcome in lab.outcomes:
        lines += [f"### {_escaped(outcome['experiment'])}: {_escaped(outcome['verdict'])}", ""]
        lines += [_escaped(outcome["question"]), ""]
        if outcome["table"]:
            lines += [*_rows(lab_tables.figure_table(outcome)), ""]
        lines += [
            f"- {_escaped(claim['word'])}: {_escaped(claim['says'])}: {_escaped(lab_tables.claim_text(claim))}"
            for claim in outcome["claims"]
        ]
        lines += [f"- {_escaped(remark)}" for remark in lab_tables.remarks(outcome)]
        lines += ["", "```", *lab_commands(lab, outcome), "```", ""]
    return lines


def _markdown_table(table: Table) -> list[str]:
    lines = [f"### {table.title}", "", *_rows(table)]
    return [*lines, "", *(f"{_escaped(note)}\n" for note in table.notes)]


def _rows(table: Table) -> list[str]:
    rule = "|".join("---" if at < table.heads else "---:" for at in range(len(table.columns)))
    return [_row(table.columns), f"|{rule}|", *(_row(row) for row in table.rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    """Text that markdown shows as it is, in one line."""
    for mark in ("\\", "|", "`", "*", "_"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.replace("<", "&lt;").split())
