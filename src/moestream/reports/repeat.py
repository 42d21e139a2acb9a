"""The commands that make the same runs again."""

from __future__ import annotations

import shlex

from moestream.reports.records import Record
from moestream.reports.summary import Arm, Group
from moestream.units import format_bytes


def commands(group: Group) -> list[str]:
    """Shell lines: the code, then the bench as it was asked for, or where nothing says, one bench a cap. What the runs
    had in common is in the first valid one."""
    runs = group.runs or [record for arm in group.arms for record in arm.excluded]
    commit = runs[0]["commit"]
    lines = [f"git checkout {commit}"] if commit else []
    lines.append("make setup")
    if group.setup.get("command"):
        return [*lines, f".venv/bin/{group.setup['command']} --out results/scratch/{_place(group)}"]
    for cap in group.caps:
        arms = [arm for arm in group.arms if arm.cap_bytes == cap]
        lines.append(_bench(group, arms, cap))
    return lines


def _bench(group: Group, arms: list[Arm], cap: int | None) -> str:
    """One bench of all arms under one cap; stock is an arm of every bench."""
    records = [record for arm in arms for record in (*arm.runs, *arm.excluded)]
    asked = dict.fromkeys(_asked(record) for arm in arms for record in (*arm.runs, *arm.excluded)[:1])
    mechanisms = [text for text in asked if text != "stock"]
    words = [".venv/bin/moestream", "bench", _model(group)]
    # Without a cap the bench still wants to know what it may use: all that the box has.
    words += ["--ram", str(cap if cap is not None else group.box.ram_bytes or 0)]
    words += ["--mechanisms", ",".join(mechanisms)] if mechanisms else []
    words += ["-n", str(max(int(record["most_tokens"] or record["tokens"] or 0) for record in records))]
    words += ["--repeats", str(max(int(record["round"]) for record in records) + 1)]
    name = "no-cap" if cap is None else format_bytes(cap).replace(" ", "")
    words += ["--out", f"results/scratch/{_place(group)}-{name}"]
    return shlex.join(words)


def _place(group: Group) -> str:
    return group.name.split(" ")[0]


def _asked(record: Record) -> str:
    """The mechanism's text as a bench takes it; the default is named by what it came to."""
    if record["asked"] != "default":
        return str(record["asked"])
    return str((record["document"] or {}).get("mechanism", {}).get("effective") or record["asked"])


def _model(group: Group) -> str:
    """What to type for the model: the demo's word, or its file's name, which is all that a record keeps of its path."""
    name = str(group.model.get("name") or "MODEL.gguf")
    return "demo" if name.startswith("demo-") else name
