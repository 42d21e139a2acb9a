"""Experiments and their outcomes as text: the list, its markdown, and the figures side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moestream.lab.experiment import KINDS, Experiment
from moestream.lab.experiment_figures import FIGURES
from moestream.lab.experiment_plan import file_seconds, not_shared, seconds
from moestream.lab.verdicts import AGREES, CANNOT_TELL, DISAGREES, NOISE, shown

_HEADER = """\
# Experiments

Written by `moestream lab list --markdown`. Each is a TOML file in `src/moestream/lab/experiments/`, which comes with
the package; `moestream lab run NAME` runs it and ends in `agrees`, `disagrees` or `cannot tell`, with the figures side
by side. `all` runs every one.

A claim agrees when the whole interval of what was seen lies within its bounds, disagrees when the whole interval lies
outside, and else nothing can be told; times are never known better than 6 %, nor
better than repeats of one run show. An experiment agrees when all its claims
do, and disagrees when one does. Ratios are of two arms' runs of the same prompt and round; of
tokens a second, over the steps that both made.

A file of your own is run by its name, `moestream lab run my.toml`, and has the same keys as those files.
Its numbers have the bounds of the bench's options; what cannot be run or judged is named with its key."""


def minutes(value_s: float) -> str:
    """A length of time for a list: at least one minute."""
    return f"{max(1, round(value_s / 60))} min"


def total_seconds(experiments: Iterable[Experiment], quick: bool) -> float:
    """About how long all of them take on the demo model one after another, each file made once, and the runs of an
    experiment that another has made already."""
    chosen = list(experiments)
    kinds = {kind for one in chosen for kind in one.files}
    return sum(not_shared(chosen, quick).values()) + sum(map(file_seconds, kinds))


def list_rows(experiments: Iterable[Experiment]) -> list[dict[str, Any]]:
    """A row for each: plain values, times in seconds on the demo model."""
    return [
        {
            "name": one.name,
            "question": one.question,
            "kind": one.kind,
            "source": one.source,
            "found": one.found,
            "measures": one.measures,
            "seconds_quick": round(seconds(one, True)),
            "seconds": round(seconds(one, False)),
            "files": list(one.files),
        }
        for one in experiments
    ]


def markdown(experiments: Iterable[Experiment]) -> str:
    """docs/experiments.md: every experiment's question, what was found, what is measured, and what would agree."""
    chosen = list(experiments)
    lines = [
        *_HEADER.splitlines(),
        "",
        f"On the demo model and two cores all of them take about {minutes(total_seconds(chosen, True))} with "
        "`--quick`.",
        "",
        "| kind | is |",
        "|---|---|",
        *(f"| {kind} | {what} |" for kind, what in KINDS.items()),
    ]
    for one in chosen:
        lines += ["", f"## {one.name}", "", f"**{one.question}**", ""]
        files = f" Makes: {', '.join(one.files)} file of the model." if one.files else ""
        quick, full = minutes(seconds(one, True)), minutes(seconds(one, False))
        lines += [
            f"- Source: {one.source}. Found: {one.found}.",
            f"- Measured: {one.measures}.",
            f"- Kind: {one.kind}; {quick} with `--quick`, {full} without.{files}",
            "- Agrees when:",
        ]
        lines += [f"  - {claim_line(claim.__dict__)}" for claim in one.claims]
    return "\n".join(lines) + "\n"


def claim_line(claim: Mapping[str, Any]) -> str:
    """What a claim expects, without what was seen."""
    unit = unit_of(claim)
    of = f"`{claim['of']}`" + (f" over `{claim['over']}`" if claim["over"] is not None else "")
    of += f" on {claim['prompt']}" if claim["prompt"] is not None else ""
    found = "" if claim["found"] is None else f" (the source: {shown(claim['found'], unit)})"
    of += f", the one of more {claim['larger']} above," if claim["larger"] is not None else ""
    return f"{claim['says']}: {claim['figure']} of {of} {expected(claim)}{found}"


def expected(claim: Mapping[str, Any]) -> str:
    """``at least 1.05``, ``at most 0.5``, or both."""
    unit = unit_of(claim)
    bounds = (("at least", claim["at_least"]), ("at most", claim["at_most"]))
    return " and ".join(f"{word} {shown(bound, unit)}" for word, bound in bounds if bound is not None)


def unit_of(claim: Mapping[str, Any]) -> str:
    """A ratio has none."""
    return "n" if claim["over"] is not None else FIGURES[claim["figure"]].unit


def outcome_lines(outcome: Mapping[str, Any]) -> list[str]:
    """An experiment's outcome for a terminal: the question, the figures side by side, each claim, the verdict."""
    lines = [
        f"{outcome['experiment']}: {outcome['question']}",
        f"found   {outcome['found']} ({outcome['source']})",
    ]
    lines += _figure_rows(outcome["figures"], outcome["table"])
    for arm, reason in outcome["left_out"].items():
        lines.append(f"left out: {arm}: {reason}")
    lines += [f"not counted: {text}" for text in outcome["not_counted"]]
    for doubt in outcome.get("doubts") or ():
        lines += [f"doubt: {doubt['kind']}: {doubt['text']}", f"      {doubt['next']}"]
    if outcome.get("noise", NOISE) > NOISE:
        lines.append(f"repeats of one run differ by {outcome['noise']:.0%}: no time is known better")
    if outcome.get("failed"):
        lines.append(f"failed: {outcome['failed']}")
    for claim in outcome["claims"]:
        lines += [f"  {claim['word']}: {claim['says']}", f"      {_seen(claim)}"]
    return [*lines, f"verdict: {outcome['verdict']}"]


def summary_lines(outcomes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What came of several experiments: a line each, and how many said what."""
    width = max(len(outcome["experiment"]) for outcome in outcomes)
    lines = [f"{outcome['experiment']:{width}}  {outcome['verdict']}" for outcome in outcomes]
    words = [outcome["verdict"] for outcome in outcomes]
    counts = [f"{words.count(word)} {word}" for word in (AGREES, DISAGREES, CANNOT_TELL)]
    return [*lines, f"of {len(words)}: {', '.join(counts)}"]


def _seen(claim: Mapping[str, Any]) -> str:
    unit = unit_of(claim)
    source = "not stated" if claim["found"] is None else shown(claim["found"], unit)
    seen = claim["seen"]
    if seen is None:
        here = claim["why"]
    else:
        low, high = shown(seen["low"], unit), shown(seen["high"], unit)
        here = f"{shown(seen['value'], unit)} ({low} to {high}, n {seen['n']})"
        here += f": {claim['why']}" if claim["word"] == "cannot tell" else ""
    return f"here {here}; expected {expected(claim)}; the source {source}"


def _figure_rows(figures: list[str], table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table: an arm a line, a figure a column, means."""
    heads = ["", *figures]
    rows = [
        [arm, *(shown(of[name]["value"], FIGURES[name].unit) if name in of else "-" for name in figures)]
        for arm, of in table.items()
    ]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in [heads, *rows]
    ]
