"""A canned experiment: one question, what its source found, what is run to answer it, and what counts as an answer.

Experiments are TOML files in ``moestream/lab/experiments``, the question on their first line. This module reads and
checks them and runs nothing; a key it does not know is refused by name.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestream.errors import MechanismError, RefusedError, UsageError
from moestream.files import read_bytes
from moestream.lab.bench_arms import PROMPTS, STOCK
from moestream.lab.experiment_bounds import GROUPS, MOST_TIMES, check_key, check_number, check_text, shown
from moestream.lab.experiment_figures import FIGURES
from moestream.mechanism import Mechanism
from moestream.nearest import did_you_mean
from moestream.units import parse_size

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = {
    "runs": "a fresh process for each arm, prompt and repeat; figures of the runs",
    "trace": "recorded runs; figures of what their traces say of routing",
    "replay": "recorded runs; their routes fed again to the engine's own cache under other policies",
    "probe": "the box alone, on the model's own file: no token is computed",
}
#: Files that are made from the model for an arm, and removed by ``lab clean``.
FILES = ("model", "requantized", "aligned")
NO_CAP = "none"
#: Of ``--quick``, where the file does not say: the first prompt, so often, so many tokens.
QUICK_REPEATS, QUICK_TOKENS = 2, 48
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(x|%)", re.ASCII)


@dataclass(frozen=True)
class Settings:
    """What every arm has unless it says otherwise. ``cap``: a share of the model's bytes, or ``none``; ``tokens``: how
    many a run generates; ``repeats``: of each prompt; ``batch``: most tokens of a prompt in one step, None for what
    every arm's cap allows."""

    cap: float | str = 0.34
    prompts: tuple[str, ...] = ("prose", "code", "chat")
    repeats: int = 3
    tokens: int = 128
    threads: int = 2
    ctx: int = 512
    batch: int | None = None


@dataclass(frozen=True)
class ArmSpec:
    """One arm. None means: as the settings say. ``budget``: bytes of experts, as a size, as a share of all (``25%``) or
    as a multiple of one token's demand (``1.3x``); None for all the cap leaves. ``file``: one of ``FILES``."""

    key: str
    mechanism: str
    cap: float | str | None = None
    budget: str | None = None
    tokens: int | None = None
    threads: int | None = None
    ctx: int | None = None
    batch: int | None = None
    file: str = "model"

    @property
    def is_stock(self) -> bool:
        return self.mechanism == STOCK


@dataclass(frozen=True)
class ProbeSpec:
    """What a probe measures; names as in ``moestream.probe.disk.Scope``. ``groups``: of its cases only those."""

    groups: tuple[str, ...] = ()
    depths: tuple[int, ...] = (8,)
    threads: tuple[int, ...] = (1, 4)
    splits: tuple[int, ...] = (1,)
    alignments: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    rounds: int = 7
    case_mb: int = 96
    case_s: float = 0.25
    seconds: float = 60.0


@dataclass(frozen=True)
class ReplaySpec:
    """Each policy at each budget (shares of all expert bytes, as ``replay --budget`` takes them)."""

    policies: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ("25%",)


@dataclass(frozen=True)
class Claim:
    """What would be seen if the source is right here: ``figure`` of the arm ``of``, as a ratio to that of ``over``
    where one is named, is at least and at most so much. ``prompt``: only on that one. ``found``: what the source saw,
    None where it is not stated. An arm of a replay is ``POLICY@BUDGET``, of a probe ``GROUP/SETTING``.

    ``larger``: another figure; the ratio is then that of the arm which has more of it to the other, whichever of the
    two that is: a copy of the user's model may be larger or smaller than it."""

    says: str
    figure: str
    of: str
    over: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    found: float | None = None
    prompt: str | None = None
    larger: str | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.of,) if self.over is None else (self.of, self.over)


@dataclass(frozen=True)
class Experiment:
    """``found``: the source's finding in words, or ``not stated``; ``measure``: the figure the arms are compared by;
    ``show``: more figures beside it; ``settings``, ``probe``: as they are and with ``--quick``; ``file``: the user's
    own, as it was named."""

    name: str
    question: str
    kind: str
    source: str
    found: str
    measures: str
    measure: str
    show: tuple[str, ...]
    settings: Settings
    quick: Settings
    arms: tuple[ArmSpec, ...]
    claims: tuple[Claim, ...]
    probe: ProbeSpec = field(default_factory=ProbeSpec)
    quick_probe: ProbeSpec = field(default_factory=ProbeSpec)
    replay: ReplaySpec = field(default_factory=ReplaySpec)
    file: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are made for it, each once."""
        return tuple(dict.fromkeys(arm.file for arm in self.arms if arm.file != "model"))

    @property
    def figures(self) -> tuple[str, ...]:
        """Every figure its table has, the measure first."""
        claimed = [name for claim in self.claims for name in (claim.figure, claim.larger) if name is not None]
        return tuple(dict.fromkeys((self.measure, *self.show, *claimed)))


_OWN = ".toml"
_TOP = {"question", "kind", "source", "found", "measures", "measure", "show"}
_TABLES = {"settings", "quick", "arms", "claims", "probe", "quick_probe", "replay"}


@cache
def experiments() -> dict[str, Experiment]:
    """All that come with the package, by name, in the order of the documents they repeat."""
    order = _folder().joinpath("order.txt").read_text(encoding="utf-8").split()
    return {name: load(_folder().joinpath(f"{name}.toml"), name) for name in order}


def find(name: str) -> Experiment:
    """The experiment of that name, or of the user's own file where it ends in ``.toml``. UsageError with the nearest
    names, RefusedError with what is wrong with the file."""
    if name.endswith(_OWN):
        return replace(load(Path(name), Path(name).stem), file=name)
    known = experiments()
    if name not in known:
        raise UsageError(
            f"no experiment {name!r}{did_you_mean(name, known)} (moestream lab list has them all; one of your own: "
            f"FILE{_OWN})"
        )
    return known[name]


def load(path: Path | Traversable, name: str) -> Experiment:
    """Read one file. RefusedError names the file and the key, arm or claim that is wrong."""
    try:
        text = (
            read_bytes(path, f"name one of your own, FILE{_OWN}")
            if isinstance(path, Path)
            else path.read_bytes()
        )
        document = tomllib.loads(text.decode("utf-8"))
    except RecursionError:
        raise RefusedError(f"{path}: not a TOML file that can be read: it is nested too deeply") from None
    except ValueError as error:
        # Beside what the reader itself says: no UTF-8, and whole numbers of thousands of digits.
        raise RefusedError(f"{path}: not a TOML file that can be read: {error}") from None
    try:
        return parse(document, name)
    except UsageError as error:
        raise RefusedError(f"{path}: {error}") from None


def parse(document: dict[str, Any], name: str) -> Experiment:
    """The experiment of a TOML document. UsageError for what is missing, unknown or of the wrong kind."""
    _only(document, _TOP | _TABLES, "the experiment")
    for key in sorted(_TOP - {"show"}):
        if not isinstance(document.get(key), str) or not document[key]:
            raise UsageError(f"{key} is missing or no text")
        check_text(key, document[key], "the experiment's")
    if next(iter(document)) != "question":
        raise UsageError("the question must be on the first line")
    for key in ("show", "arms", "claims"):
        if not isinstance(document.get(key, []), list):
            raise UsageError(f"{key} must be a list")
    if not all(isinstance(name, str) for name in document.get("show", [])):
        raise UsageError(f"show must be names of figures, not {shown(document['show'])}")
    if document["kind"] not in KINDS:
        raise UsageError(f"kind {document['kind']!r}: one of {', '.join(KINDS)}")
    settings = _made(Settings(), document.get("settings", {}), "settings")
    probe = _made(ProbeSpec(), document.get("probe", {}), "probe")
    experiment = Experiment(
        name=name,
        **{key: document[key] for key in _TOP - {"show"}},
        show=tuple(document.get("show", ())),
        settings=settings,
        quick=_made(_shorter(settings), document.get("quick", {}), "quick"),
        arms=tuple(_row(ArmSpec, row, "arms", n) for n, row in enumerate(document.get("arms", []), 1)),
        claims=tuple(_row(Claim, row, "claims", n) for n, row in enumerate(document.get("claims", []), 1)),
        probe=probe,
        quick_probe=_made(probe, document.get("quick_probe", {}), "quick_probe"),
        replay=_made(ReplaySpec(), document.get("replay", {}), "replay"),
    )
    _check(experiment)
    return experiment


def budget_bytes(text: str, expert_bytes: int, demand_bytes: int) -> int:
    """Bytes of a budget in any of its three forms. UsageError for another."""
    match = _BUDGET.fullmatch(text)
    if match is None:
        return parse_size(text)
    number = float(match[1])
    if not 0 < number <= MOST_TIMES:
        raise UsageError(f"no budget: {shown(text)}")
    return int(number * demand_bytes) if match[2] == "x" else int(number / 100 * expert_bytes)


def _shorter(settings: Settings) -> Settings:
    """What ``--quick`` leaves of the settings where the file does not say."""
    return replace(
        settings,
        prompts=settings.prompts[:1],
        repeats=min(settings.repeats, QUICK_REPEATS),
        tokens=min(settings.tokens, QUICK_TOKENS),
    )


def _folder() -> Traversable:
    return files("moestream.lab").joinpath("experiments")


def _only(table: dict[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = did_you_mean(key, sorted(known), most=1) or f" (known: {', '.join(sorted(known))})"
            raise UsageError(f"unknown key {key!r} in {where}{near}")


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def _made(default: Any, table: dict[str, Any], where: str) -> Any:
    """The default with what the table says instead; of the default's kinds."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    _only(table, {each.name for each in fields(default)}, f"[{where}]")
    kinds = {each.name: str(each.type) for each in fields(default)}
    for key, value in _frozen(table).items():
        if isinstance(value, str):
            right = key == "cap" and value == NO_CAP
        elif isinstance(value, tuple):
            right = bool(value) and _fits(value, kinds[key])
        else:
            right = _fits(value, kinds[key])
        if not right:
            raise UsageError(f"[{where}] {key} cannot be {shown(value)}")
        check_number(key, value, f"[{where}]")
    return replace(default, **_frozen(table))


def _row(kind: Any, row: Any, where: str, number: int) -> Any:
    if not isinstance(row, dict):
        raise UsageError(f"[[{where}]] must be tables")
    place = f"[[{where}]] number {number}"
    kinds = {each.name: str(each.type) for each in fields(kind)}
    _only(row, set(kinds), place)
    for key, value in row.items():
        if not _fits(value, kinds[key]):
            raise UsageError(f"{place} {key} cannot be {shown(value)}")
        check_number(key, value, place)
        check_text(key, value, place)
    try:
        return kind(**row)
    except TypeError:
        needed = [each.name for each in fields(kind) if each.name not in row]
        raise UsageError(f"{place} lacks one of: {', '.join(needed)}") from None


def _fits(value: Any, kinds: str) -> bool:
    """Is the value of one of the kinds, as a field of a dataclass names them (``int | None``, ``tuple[str, ...]``)?"""
    if isinstance(value, tuple):
        item = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", kinds)
        return item is not None and all(_fits(each, item[1]) for each in value)
    named: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    return any(
        isinstance(value, named[kind]) and not isinstance(value, bool)
        for kind in kinds.split(" | ")
        if kind in named
    )


def _check(experiment: Experiment) -> None:
    """What no single key can be wrong about."""
    keys = [arm.key for arm in experiment.arms]
    if len(set(keys)) != len(keys):
        raise UsageError(f"two arms have one key: {', '.join(keys)}")
    for arm in experiment.arms:
        check_key(arm.key)
        _check_arm(arm)
    for probe in (experiment.probe, experiment.quick_probe):
        _check_probe(probe)
    for settings in (experiment.settings, experiment.quick):
        for prompt in settings.prompts:
            if prompt not in PROMPTS:
                raise UsageError(f"no prompt {prompt!r} (known: {', '.join(PROMPTS)})")
    if experiment.kind != "probe" and not experiment.arms:
        raise UsageError(f"kind {experiment.kind} needs [[arms]]")
    if experiment.kind == "probe" and experiment.arms:
        raise UsageError("a probe has no [[arms]]: its claims name the cases it measures")
    if not experiment.claims:
        raise UsageError("without [[claims]] there is nothing to agree with")
    for figure in experiment.figures:
        if not isinstance(figure, str) or figure not in FIGURES or FIGURES[figure].kind != experiment.kind:
            known = [name for name, one in FIGURES.items() if one.kind == experiment.kind]
            raise UsageError(f"no figure {figure!r} of {experiment.kind} (known: {', '.join(known)})")
    for claim in experiment.claims:
        _check_claim(claim, experiment)


def _check_arm(arm: ArmSpec) -> None:
    if not arm.is_stock:
        try:
            Mechanism.parse(arm.mechanism)
        except MechanismError as error:
            raise UsageError(f"arm {arm.key}: {error}") from None
    if arm.file not in FILES:
        raise UsageError(f"arm {arm.key}: no file {arm.file!r} (known: {', '.join(FILES)})")
    if isinstance(arm.cap, str) and arm.cap != NO_CAP:
        raise UsageError(
            f"arm {arm.key}: cap is a share of the model's bytes, or {NO_CAP}: not {shown(arm.cap)}"
        )
    if arm.budget is not None:
        try:
            budget_bytes(arm.budget, 1 << 30, 1 << 30)
        except UsageError as error:
            raise UsageError(f"arm {arm.key}: budget: {error}") from None


def _check_probe(probe: ProbeSpec) -> None:
    from moestream.probe.disk import ADVICE, ALIGNMENTS

    for key, known in (("groups", GROUPS), ("alignments", tuple(ALIGNMENTS)), ("advice", tuple(ADVICE))):
        for name in getattr(probe, key):
            if name not in known:
                raise UsageError(f"[probe] {key}: there is no {shown(name)} (known: {', '.join(known)})")


def _check_claim(claim: Claim, experiment: Experiment) -> None:
    if claim.at_least is None and claim.at_most is None:
        raise UsageError(f"claim {claim.says!r} has neither at_least nor at_most: nothing could disagree")
    if claim.at_least is not None and claim.at_most is not None and claim.at_least > claim.at_most:
        raise UsageError(f"claim {claim.says!r}: at_least is more than at_most: nothing could agree")
    if claim.over == claim.of:
        raise UsageError(f"claim {claim.says!r}: of and over are one arm: name two")
    if experiment.kind in ("runs", "trace"):
        for key in claim.arms:
            if key not in {arm.key for arm in experiment.arms}:
                raise UsageError(f"claim {claim.says!r}: there is no arm {key!r}")
    if experiment.kind == "replay":
        replayed = {
            f"{policy}@{b}" for policy in experiment.replay.policies for b in experiment.replay.budgets
        }
        for key in claim.arms:
            if key not in replayed:
                raise UsageError(f"claim {claim.says!r}: {key!r} is no POLICY@BUDGET of [replay]")
    if claim.larger is not None and claim.over is None:
        raise UsageError(f"claim {claim.says!r}: larger says which of two arms stands above: name both")
    if claim.prompt is not None and claim.prompt not in experiment.settings.prompts:
        raise UsageError(f"claim {claim.says!r}: prompt {claim.prompt!r} is not run")
