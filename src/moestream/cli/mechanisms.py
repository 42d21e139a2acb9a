"""``moestream mechanisms``: every member a mechanism can be made of, and whether this box has what it needs."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream.box.abilities import tests
from moestream.members import ELSEWHERE, FAMILIES, GROUPS, Member

_TITLES = {
    "store": "store: where slabs live (the first word)",
    "variant": "variant: follows its store after a slash",
    "reader": "reader: how bytes travel",
    "background": "background: may follow a reader of the mapped store",
    "policy": "policy: which experts stay",
    "predictor": "predictor: which experts are asked for early",
    "dense": "dense: where the rest of the model lies",
}


def mechanisms(
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where models lie: the file system that is tried.")
    ] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """List every member of a mechanism: what it does, where it was seen, what it needs, and whether this box has it.

    A mechanism is STORE[/VARIANT...]+READER[+background:N]+POLICY+PREDICTOR+DENSE; what is left out takes the
    store's default. Each member has a page in docs/mechanisms/.
    """
    listed = describe(directory)
    if json:
        print(json_module.dumps(listed, indent=2))
    else:
        _print(listed)


def describe(directory: Path) -> dict[str, Any]:
    """By family, a row for each member: ``name`` (with its argument), ``does``, ``seen``, ``needs``, ``here`` (may it
    be used on this box) and ``why_not``."""
    tried: dict[str, str] = {}
    available = tests(directory)

    def lacking(needs: tuple[str, ...]) -> list[str]:
        for need in needs:
            if need not in tried:
                tried[need] = available[need]()
        return [tried[need] for need in needs if tried[need]]

    families = {
        family: [_row(*named, lacking) for name, member in members.items() for named in _named(name, member)]
        for family, members in FAMILIES.items()
    }
    for row in families["variant"]:
        word = row["name"].partition(":")[0]
        row["stores"] = [store for store, groups in GROUPS.items() if any(word in group for group in groups)]
    return {**families, "replay only": [{"name": name, "does": why} for name, why in ELSEWHERE.items()]}


def _named(name: str, member: Member) -> Iterator[tuple[str, Member, tuple[str, ...]]]:
    """A member as it is written, once for each word it can take, with what it then needs."""
    argument = member.argument
    if argument is None:
        yield name, member, member.needs
    elif argument.choices:
        for choice in argument.choices:
            more = tuple(need for word, need in argument.needs if word == choice)
            yield f"{name}:{choice}", member, member.needs + more
    else:
        yield name + argument.shown, member, member.needs


def _row(
    name: str, member: Member, needs: tuple[str, ...], lacking: Callable[[tuple[str, ...]], list[str]]
) -> dict[str, Any]:
    missing = lacking(needs)
    argument = member.argument
    default = f"; {argument.what}, default {argument.default}" if argument and argument.highest else ""
    return {
        "name": name,
        "does": member.help + default,
        "seen": member.seen,
        "needs": list(needs),
        "here": not missing,
        "why_not": missing,
    }


def _print(listed: dict[str, Any]) -> None:
    from rich.table import Table

    from moestream.console import console as stdout

    console = stdout()
    width = max(len(row["name"]) for family in _TITLES for row in listed[family])
    for family, title in _TITLES.items():
        console.print(title, style="bold")
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=width + 2)
        table.add_column(no_wrap=True)
        table.add_column()
        for row in listed[family]:
            table.add_row("  " + row["name"], "yes" if row["here"] else "no", _told(row))
        console.print(table)
        console.print()
    for row in listed["replay only"]:
        console.print(row["does"])


def _told(row: dict[str, Any]) -> str:
    """What a member does, where it was seen, and what it needs or lacks."""
    needs = f"; needs {', '.join(row['needs'])}" if row["needs"] else ""
    lacks = f": {'; '.join(row['why_not'])}" if row["why_not"] else ""
    return f"{row['does']} ({row['seen']}{needs}){lacks}"
