"""Experiments' outcomes as plain tables and sentences: every output shows the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moestream.lab.verdicts import shown
from moestream.reports.labs import Lab, Outcome, claim_unit, value_text
from moestream.reports.tables import UNKNOWN, Table


def overview(labs: Sequence[Lab]) -> Table:
    """An experiment a row, a lab a column: verdicts of several boxes side by side, none averaged."""
    names = dict.fromkeys(outcome["experiment"] for lab in labs for outcome in lab.outcomes)
    rows = []
    for name in names:
        mine = [next((o for o in lab.outcomes if o["experiment"] == name), None) for lab in labs]
        question = next(outcome["question"] for outcome in mine if outcome is not None)
        rows.append((name, question, *(outcome["verdict"] if outcome else UNKNOWN for outcome in mine)))
    columns = ("experiment", "question", *(["verdict"] if len(labs) == 1 else [lab.name for lab in labs]))
    return Table("Verdicts", columns, tuple(rows), heads=len(columns))


def figure_table(outcome: Outcome) -> Table:
    """The arms' figures: means and the range they came from."""
    rows = [
        (str(arm), *(_cell(of.get(name), name) for name in outcome["figures"]))
        for arm, of in outcome["table"].items()
    ]
    return Table("Figures", ("", *outcome["figures"]), tuple(rows), heads=1)


def _cell(found: dict[str, Any] | None, name: str) -> str:
    if found is None:
        return UNKNOWN
    value = value_text(found["value"], name)
    low, high = value_text(found["low"], name), value_text(found["high"], name)
    return value if low == high else f"{value} ({low} … {high})"


def claim_text(claim: dict[str, Any]) -> str:
    """What was seen, what would have agreed, and what the source says."""
    unit, seen = claim_unit(claim), claim["seen"]
    here = str(claim["why"])
    if seen is not None:
        low, high = shown(seen["low"], unit), shown(seen["high"], unit)
        here = f"{shown(seen['value'], unit)} ({low} … {high}, n {seen['n']})"
        here += f", {claim['why']}" if claim["word"] == "cannot tell" else ""
    bounds = (("at least", claim["at_least"]), ("at most", claim["at_most"]))
    expected = " and ".join(f"{word} {shown(bound, unit)}" for word, bound in bounds if bound is not None)
    source = "" if claim["found"] is None else f"; the source: {shown(claim['found'], unit)}"
    return f"here {here}; expected {expected}{source}"


def remarks(outcome: Outcome) -> list[str]:
    """What was not run, not counted, or went wrong."""
    lines = [f"left out: {arm}: {reason}" for arm, reason in (outcome.get("left_out") or {}).items()]
    lines += [f"not counted: {text}" for text in outcome.get("not_counted") or []]
    return lines + ([f"failed: {outcome['failed']}"] if outcome.get("failed") else [])


def about(lab: Lab) -> str:
    return f"{lab.model.get('name') or 'a model'} on {lab.box}: {lab.counted()}"
