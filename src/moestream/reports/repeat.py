"""The commands that make the same runs again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from moestream.lab.bench_arms import PROMPTS
from moestream.reports.labs import Lab, Outcome
from moestream.reports.records import Record
from moestream.reports.summary import Arm, Group
from moestream.units import format_bytes

_PROGRAM = ".venv/bin/moestream"


def commands(group: Group) -> list[str]:
    """Shell lines: the code, then the bench as it was asked for, or where nothing says, one bench a cap. What the runs
    had in common is in the first valid one."""
    runs = group.runs or group.excluded
    lines = _code(runs[0]["commit"])
    if group.setup.get("command"):
        words = _words(group.setup["command"])
        return [*lines, f".venv/bin/{shlex.join([*words, '--out', f'results/scratch/{_place(group)}'])}"]
    own = [str(name) for name in dict.fromkeys(record["prompt"] for record in runs) if name not in PROMPTS]
    if own:
        # A comment ends with its line, so that no name may go on in the next.
        names = " ".join(", ".join(own).split())
        lines.append(f"# prompts.json: an object with the texts of {names}, which records do not hold")
    for cap in group.caps:
        arms = [arm for arm in group.arms if arm.cap_bytes == cap]
        lines.append(_bench(group, arms, cap, ["--prompts", "prompts.json"] if own else []))
    return lines


def lab_commands(lab: Lab, outcome: Outcome) -> list[str]:
    """Shell lines that make an experiment again: the code, then the experiment."""
    words = [_PROGRAM, "lab", "run", str(outcome["experiment"])]
    model = _model(lab.model)
    words += [] if model == "demo" else ["--model", model]
    words += ["--ram", str(outcome["cap_bytes"])] if outcome.get("cap_bytes") is not None else []
    words += ["--quick"] if outcome.get("quick") else []
    return [*_code(outcome["commit"]), shlex.join(words)]


def _words(command: str) -> list[str]:
    """Of a command as a setup has it, each to be quoted again: it may have been edited."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def _code(commit: str | None) -> list[str]:
    """What ran, built. Of runs whose commit nobody wrote down, whatever is there."""
    return [*([f"git checkout {shlex.quote(commit)}"] if commit else []), "make setup"]


def _bench(group: Group, arms: Sequence[Arm], cap: int | None, prompts: Sequence[str]) -> str:
    """One bench of all arms under one cap; stock is an arm of every bench."""
    records = [record for arm in arms for record in (*arm.runs, *arm.excluded)]
    asked = dict.fromkeys(_asked(record) for arm in arms for record in (*arm.runs, *arm.excluded)[:1])
    mechanisms = [text for text in asked if text != "stock"]
    words = [_PROGRAM, "bench", _model(group.model)]
    # Without a cap the bench still wants to know what it may use: all that the box has.
    words += ["--ram", str(cap if cap is not None else group.box.ram_bytes or 0)]
    words += ["--mechanisms", ",".join(mechanisms)] if mechanisms else []
    words += ["-n", str(max(int(record["most_tokens"] or record["tokens"] or 0) for record in records))]
    words += ["--repeats", str(max(int(record["round"]) for record in records) + 1)]
    for option, key in (("--threads", "threads"), ("--ctx", "ctx"), ("--seconds", "limit_s")):
        values = [record[key] for record in records if record[key] is not None]
        words += [option, f"{max(values):g}"] if values else []
    name = "no-cap" if cap is None else format_bytes(cap).replace(" ", "")
    words += [*prompts, "--out", f"results/scratch/{_place(group)}-{name}"]
    return shlex.join(words)


def _place(group: Group) -> str:
    return group.name.split(" ")[0]


def _asked(record: Record) -> str:
    """The mechanism's text as a bench takes it; the default is named by what it came to."""
    if record["asked"] != "default":
        return str(record["asked"])
    return str((record["document"] or {}).get("mechanism", {}).get("effective") or record["asked"])


def _model(model: dict[str, object]) -> str:
    """What to type for the model: the demo's word, or its file's name, which is all that a record keeps of its path."""
    name = str(model.get("name") or "MODEL.gguf")
    return "demo" if name.startswith("demo-") else name
