"""Why a benchmark's figures may not mean what they seem to: an enumerated list, each with the next command to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moestream.box.filesystems import look_up
from moestream.lab import bench_figures as figures
from moestream.lab import statistics
from moestream.lab.bench_arms import FEWEST_PROMPTS, STOCK
from moestream.lab.validity import Reason, Record, must_be_cold

#: Below this many rounds an order that turns round has not evened out, and one odd run decides.
FEWEST_ROUNDS = 3
#: The second half of a benchmark against its first. (A laptop that throttled was 40 % off with the same bytes read.)
DRIFT_SHARE = 0.05
#: The second half of a run against its first: texts differ in what they route to, so this one is wide.
RUN_DRIFT_SHARE = 0.25
#: The best over the worst of the disk's rates, measured before every run.
DISK_SPREAD = 1.5
#: Two equal arms that differ by more: what is smaller than this cannot be seen.
NOISE_SHARE = 0.10
#: Of all CPUs' time: used by others, or taken by a hypervisor.
OTHER_CPU_SHARE = 0.10
STOLEN_SHARE = 0.02
#: What one run's process may write: its trace and its document. More is a copy of the model, or dirty pages of one.
WRITTEN_BYTES = 64 << 20


_FIGURES = re.compile(r"[0-9a-f]*\d[0-9a-f.]*")


class Kind(str, Enum):
    """What a doubt is about."""

    CAP_NOT_ENFORCED = "cap not enforced"
    EXCLUDED = "runs excluded"
    FEW_REPEATS = "few repeats"
    FEW_PROMPTS = "few prompts"
    NO_NOISE_FLOOR = "no noise floor"
    NOISY = "noisy"
    DRIFT = "drift"
    RUN_DRIFT = "runs slow down"
    FILE_SYSTEM = "file system"
    DISK_SPREAD = "disk rate spread"
    OTHER_LOAD = "other load"
    STOLEN = "stolen time"
    THROTTLED = "throttled"
    NOT_COMPARED = "tokens not compared"
    COLD_UNKNOWN = "cold state unknown"
    COUNTER_STUCK = "counter stuck"
    WRITES = "disk written"
    NO_CEILING = "no ceiling"
    MODIFIED = "modified code"


@dataclass(frozen=True)
class Doubt:
    """``kind``, what was seen, and ``next``: a command to type, or what to do with commands between backticks."""

    kind: Kind
    text: str
    next: str


@dataclass(frozen=True)
class Typed:
    """How a command names the benchmark, as words of a shell. ``again``: its own command with its directory, after
    which options replace those said before; ``model``: what commands take; ``file``: the model's first."""

    again: str
    model: str
    file: str

    @classmethod
    def anywhere(cls, setup: Mapping[str, Any]) -> Typed:
        """Without telling where on a machine things are: to be typed in the model's directory."""
        name = shlex.quote(str(setup["model"]["name"]))
        return cls(f"{setup['command']} --out {shlex.quote(str(setup['out']))}", name, name)


_TRY = "moestream run {model}{ram}{mechanism} --strict -p test -n 8"
_REMEDIES = {
    Reason.FAILED: _TRY,
    Reason.LOST_CAP: "moestream plan {model}{ram}{mechanism}",
    Reason.FELL_BACK: "moestream mechanisms",
    Reason.INACTIVE: _TRY,
    Reason.SWAPPED: "sudo swapoff -a && {again} --force",
    Reason.NOT_COLD: "`fuser -v {file}` names who has it open: end that, then `{again} --force`",
    Reason.EMPTY: _TRY,
    Reason.OTHER_TOKENS: "report it, this is a bug, with what `{again} --resume --share` prints",
}
#: Arms named in one doubt; more are counted.
_NAMED = 3


def doubts(
    setup: Mapping[str, Any],
    records: Sequence[Record],
    noise: float | None,
    *,
    has_ceiling: bool,
    typed: Typed | None = None,
) -> list[Doubt]:
    """Every doubt about a benchmark. ``records``: judged (``validity.judge_all``), in the order they ran; ``typed``:
    how commands name what is meant, None for anywhere."""
    valid = [record for record in records if record["valid"]]
    typed = typed or Typed.anywhere(setup)
    return [
        *_cap(setup, valid, typed),
        *_excluded(setup, records, typed),
        *_amount(valid, typed),
        *_noise(setup, noise, typed),
        *_drift(setup, valid, typed),
        *_file_system(records, typed),
        *_machine(valid, typed),
        *_compared(valid),
        *_accounts(valid, typed, has_ceiling),
    ]


def _cap(setup: Mapping[str, Any], valid: Sequence[Record], typed: Typed) -> Iterator[Doubt]:
    free = [record for record in valid if record["cap_bytes"] is not None and not record["caged"]]
    if free or not setup["caged"]:
        yield Doubt(
            Kind.CAP_NOT_ENFORCED,
            f"no memory cgroup held {len(free)} runs; arms that need one were left out, and stock ran without a cap",
            f'sudo -E env PATH="$PATH" {typed.again} --force',
        )


def _excluded(setup: Mapping[str, Any], records: Sequence[Record], typed: Typed) -> Iterator[Doubt]:
    """One for each thing that went wrong, whatever figures its text holds and however many arms it met."""
    seen: dict[tuple[Reason, str], list[tuple[Record, str]]] = {}
    for record in records:
        for text in record["invalid"]:
            reason = next(reason for reason in Reason if text.startswith(f"{reason.value}: "))
            seen.setdefault((reason, _FIGURES.sub("", text)), []).append((record, text))
    for (reason, _), runs in seen.items():
        first, text = runs[0]
        arms = list(dict.fromkeys(record["arm"] for record, _ in runs))
        named = ", ".join(arms[:_NAMED]) + (f" and {len(arms) - _NAMED} more" if len(arms) > _NAMED else "")
        words = {
            "model": typed.model,
            "file": typed.file,
            "ram": f" --ram {setup['ram']}" if first["cap_bytes"] is not None else "",
            "mechanism": f" --mechanism {shlex.quote(first['asked'])}"
            if first["asked"] not in (STOCK, "default")
            else "",
            "again": typed.again,
        }
        yield Doubt(
            Kind.EXCLUDED,
            f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} of {named} excluded, {text}",
            _REMEDIES[reason].format(**words),
        )


def _amount(valid: Sequence[Record], typed: Typed) -> Iterator[Doubt]:
    rounds = len({record.get("round", 0) for record in valid})
    if rounds < FEWEST_ROUNDS:
        yield Doubt(
            Kind.FEW_REPEATS,
            f"{rounds} {'round' if rounds == 1 else 'rounds'}, fewer than {FEWEST_ROUNDS}",
            f"{typed.again} --resume --repeats {FEWEST_ROUNDS + 1}",
        )
    prompts = len({record["prompt"] for record in valid})
    if prompts < FEWEST_PROMPTS:
        yield Doubt(
            Kind.FEW_PROMPTS,
            f"{prompts} prompts have a valid run, fewer than {FEWEST_PROMPTS}",
            f"{typed.again} --resume",
        )


def _noise(setup: Mapping[str, Any], noise: float | None, typed: Typed) -> Iterator[Doubt]:
    if noise is None:
        yield Doubt(
            Kind.NO_NOISE_FLOOR,
            "fewer than 3 cells have both runs of the sentinel, so nothing is called faster or slower",
            f"{typed.again} --resume --repeats {FEWEST_ROUNDS + 1}",
        )
    elif noise > NOISE_SHARE:
        yield Doubt(
            Kind.NOISY,
            f"two equal arms differ by up to {noise:.0%}: smaller differences cannot be seen",
            f"end what else runs, then `{typed.again} --resume --repeats {2 * setup['repeats']}`",
        )


def _drift(setup: Mapping[str, Any], valid: Sequence[Record], typed: Typed) -> Iterator[Doubt]:
    drift = statistics.session_drift(valid)
    if drift is not None and abs(drift) > DRIFT_SHARE:
        yield Doubt(
            Kind.DRIFT,
            f"the second half of the runs was {_words(drift)} than the first",
            f"let the machine cool and settle, then `{typed.again} --force`",
        )
    for arm in dict.fromkeys(record["arm"] for record in valid):
        inside = [
            change
            for record in valid
            if record["arm"] == arm and (change := statistics.run_drift(record)) is not None
        ]
        middle = figures.median(inside)
        if middle is not None and middle < -RUN_DRIFT_SHARE:
            yield Doubt(
                Kind.RUN_DRIFT,
                f"{arm}: the second half of a run is {_words(middle)} than its first: this rate is not yet the "
                "one that stays",
                f"{typed.again} --force -n {2 * setup['tokens']}",
            )


def _file_system(records: Sequence[Record], typed: Typed) -> Iterator[Doubt]:
    """Of runs that do not count too: it may be why (what lies in memory is never cold)."""
    box: dict[str, Any] = next((record["box"] for record in records if record.get("box")), {})
    where = look_up(box.get("fs", ""), box.get("kernel", ""))
    if where is not None and where.follows:
        yield Doubt(
            Kind.FILE_SYSTEM,
            f"the model lies on {box['fs']}, {where.follows}",
            f"{where.advice}, then `{typed.again} --force`",
        )


def _machine(valid: Sequence[Record], typed: Typed) -> Iterator[Doubt]:
    rates = [record["disk_bytes_per_s"] for record in valid if record["disk_bytes_per_s"]]
    if rates and max(rates) > DISK_SPREAD * min(rates):
        yield Doubt(
            Kind.DISK_SPREAD,
            f"the disk gave {min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f} GB/s before runs",
            f"`iostat -x 5` shows what else uses the disk, `moestream probe --model {typed.model}` what it gives",
        )

    def count(name: str, limit: float) -> tuple[int, float]:
        values = [(record.get("conditions") or {}).get(name) or 0 for record in valid]
        return sum(value > limit for value in values), max(values, default=0)

    many, most = count("other_cpu_share", OTHER_CPU_SHARE)
    if many:
        yield Doubt(
            Kind.OTHER_LOAD,
            f"{many} of {len(valid)} runs had others use up to {most:.0%} of the CPUs",
            f"`top` shows who: end what is not needed, then `{typed.again} --force`",
        )
    many, most = count("stolen_share", STOLEN_SHARE)
    if many:
        yield Doubt(
            Kind.STOLEN,
            f"{many} of {len(valid)} runs had up to {most:.0%} of the CPUs' time taken by the hypervisor",
            f"at another time, or on a machine of its own, `{typed.again} --force`",
        )
    many, _ = count("throttled", 0)
    if many:
        yield Doubt(
            Kind.THROTTLED,
            f"the CPUs were slowed for heat or by a quota in {many} of {len(valid)} runs",
            f"let the machine cool, lift the quota, then `{typed.again} --force`",
        )


def _compared(valid: Sequence[Record]) -> Iterator[Doubt]:
    steps: dict[tuple[str, int], set[str]] = {}
    for record in valid:
        document = record["document"]
        step = min(document["n_batch"], document["prompt_tokens"])
        steps.setdefault((record["prompt"], step), set()).add(record["arm"])
    alone = sorted({arm for group in steps.values() if len(group) == 1 for arm in group})
    if alone:
        yield Doubt(
            Kind.NOT_COMPARED,
            f"nobody else read a prompt in the same steps as {', '.join(alone)}: its tokens are compared with none",
            "name a larger --ram, under which all arms read a prompt in equal steps",
        )


def _accounts(valid: Sequence[Record], typed: Typed, has_ceiling: bool) -> Iterator[Doubt]:
    probe = f"moestream probe --model {typed.model}"
    unknown = sum(must_be_cold(record) and record["cached_bytes_before"] is None for record in valid)
    if unknown:
        yield Doubt(
            Kind.COLD_UNKNOWN,
            f"the kernel does not tell what of the model is cached (before 6.5 only its owner is told): {unknown} "
            "starts are not known to be cold",
            f'sudo chown "$USER" {typed.file}',
        )
    read = sum(figures.decode(record)["bytes_read"] for record in valid)
    counted = sum(figures.decode(record)["read_bytes_os"] for record in valid)
    if read and not counted:
        yield Doubt(
            Kind.COUNTER_STUCK,
            "the kernel's account of this process's reads does not move here: what page-cache arms read is not known",
            probe,
        )
    for source in ("cgroup", "device"):
        many = sum(figures.read_source(record) == source for record in valid)
        if many:
            yield Doubt(
                Kind.COUNTER_STUCK,
                f"the kernel's account of the process does not move: what {many} runs read is that of the {source}, "
                "others' reads included",
                probe,
            )
    yield from _writes(valid)
    if not has_ceiling:
        yield Doubt(
            Kind.NO_CEILING,
            "what a token costs with everything in memory is not known: no share of floor",
            probe,
        )
    if any(record["modified"] for record in valid):
        yield Doubt(
            Kind.MODIFIED,
            "the code that ran is not that of its commit",
            f"`git stash` or `git commit`, then `{typed.again} --force`",
        )


def _writes(valid: Sequence[Record]) -> Iterator[Doubt]:
    for arm in dict.fromkeys(record["arm"] for record in valid):
        written = max(
            record["document"].get("write_bytes_os") or 0 for record in valid if record["arm"] == arm
        )
        if written > WRITTEN_BYTES:
            yield Doubt(
                Kind.WRITES,
                f"{arm}: a run wrote {written / 1e9:.2f} GB to the disk, which wears it and holds up reads",
                "leave it out of --mechanisms, unless it is meant to write: a copy of the model, a trace",
            )


def _words(change: float) -> str:
    """``-0.2`` as ``20 % slower``."""
    return f"{abs(change):.0%} {'faster' if change > 0 else 'slower'}".replace("%", " %")
