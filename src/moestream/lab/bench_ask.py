"""From the words of ``moestream bench`` to what is run: arms, order, what cannot run here and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moestream.box import Box, Cage, disk_rate
from moestream.errors import BudgetError, MoestreamError, RefusedError
from moestream.files import read_json
from moestream.lab.bench_arms import Arm
from moestream.lab.bench_journal import SETUP
from moestream.lab.bench_ladder import CEILING, REFERENCES, bench_arms, sentinel_of
from moestream.lab.bench_session import Asked
from moestream.lab.bench_time import DISK_BYTES_PER_S, WEIGHTS_BYTES_PER_S, Pace, expected_s
from moestream.lab.runs import Setup
from moestream.model import Model
from moestream.plan import Plan
from moestream.probe import saved_probe
from moestream.units import format_bytes

#: What has to be free for the arm that holds everything: the model, and llama.cpp and Python beside it.
FITS_SHARE, FITS_BESIDE = 1.05, 1_000_000_000


@dataclass(frozen=True)
class Request:
    """The command's words, checked as far as that goes without a plan. ``mechanisms``: as typed; ``command``: how to
    repeat it, without a path; ``prompts``: texts by name."""

    model: Model
    out: Path
    ram: str
    cap_bytes: int
    mechanisms: str
    prompts: Mapping[str, str]
    tokens: int
    limit_s: float
    repeats: int
    threads: int
    ctx: int
    trace: bool
    command: str


def plan_of(model: Model, cap: int, ctx: int) -> Plan:
    """The default plan under a cap: it says what batch fits and what the engine would choose. Raises BudgetError."""
    from moestream.dryrun import COMPUTE_SHARE, plan_context

    return plan_context(model, Box(), cap, None, n_ctx=ctx, compute_share=COMPUTE_SHARE, n_outputs_max=1)


def smallest_cap(model: Model, ctx: int) -> int:
    """The least cap that the plan accepts, as its refusal of next to nothing names it."""
    try:
        return plan_of(model, 1, ctx).smallest_cap_bytes
    except BudgetError as error:
        if error.smallest_bytes is None:
            raise
        return error.smallest_bytes


def check_context(request: Request) -> None:
    """Raises RefusedError when a prompt and what is generated after it do not fit into the context: every run on it
    would fail. Reads the vocabulary only."""
    from llama_cpp._internals import LlamaModel

    from moestream.binding import low

    params = low.llama_model_default_params()
    params.vocab_only = True
    vocabulary: Any = LlamaModel(path_model=str(request.model.paths[0]), params=params, verbose=False)
    try:
        for name, text in request.prompts.items():
            needed = len(vocabulary.tokenize(text.encode(), add_bos=True, special=True)) + request.tokens
            if needed > request.ctx:
                raise RefusedError(
                    f"prompt {name} and {request.tokens} tokens after it take {needed} of a context of {request.ctx}: "
                    f"say --ctx {needed} or more, or a smaller -n"
                )
    finally:
        vocabulary.close()


def fits_in_memory(model: Model, available: int) -> bool:
    return available >= model.bytes * FITS_SHARE + FITS_BESIDE


def ask(request: Request, *, resume: bool) -> Asked:
    """What to run. A benchmark that goes on keeps the arms and the batch it was begun with, however much memory is
    free now. Raises BudgetError for a cap that is too small, and MechanismError."""
    model, ctx = request.model, request.ctx
    check_context(request)
    plan = plan_of(model, request.cap_bytes, ctx)
    caged, reason = Cage.available()
    begun = _begun(request.out) if resume else {}
    available = Box().available_memory()
    fits = begun["fits"] if begun else fits_in_memory(model, available)
    arms = bench_arms(
        request.mechanisms,
        request.cap_bytes,
        chosen=plan.mechanism,
        fits=fits,
    )
    notes: list[str] = []
    if not caged:
        arms, notes = without_cage(arms, reason)
    able, left_out = able_arms(arms, caged, reason)
    if not fits:
        left_out.append(f"resident: the model does not fit into the {format_bytes(available)} that are free")
    if all(arm.cap_bytes is None for arm in able):
        raise RefusedError(
            f"no arm can run under a cap here ({'; '.join(left_out)}): run as root, or in a user session of systemd"
        )
    setup = Setup(
        model=model,
        threads=request.threads,
        ctx=ctx,
        batch=begun["batch"] if begun else plan.n_batch,
        tokens=request.tokens,
        caged=caged,
        out=request.out,
        trace=request.trace,
        prompts=dict(request.prompts),
        limit_s=request.limit_s,
    )
    return Asked(
        setup=setup,
        arms=tuple(able),
        repeats=request.repeats,
        sentinel=sentinel_of(able),
        cap_bytes=request.cap_bytes,
        ram=request.ram,
        command=request.command,
        left_out=tuple(left_out),
        notes=tuple(notes),
        ladder=request.mechanisms == "ladder",
        expected_s=expected_s(setup, able, pace_of(model, plan)),
    )


def pace_of(model: Model, plan: Plan) -> Pace:
    """What this box is expected to give: as a probe measured it, or lacking that the disk's rate of now and a guess."""
    probe = saved_probe(model) or {}
    compute = probe.get("compute_s_per_token")
    disk = probe.get("disk_bytes_per_s")
    if not disk:
        rate = disk_rate(model.paths[0])
        disk = rate.bytes_per_s if rate is not None else DISK_BYTES_PER_S
    weights = model.dense_bytes + model.demand_bytes_per_token
    return Pace(disk, compute or weights / WEIGHTS_BYTES_PER_S, plan.expert_bytes)


def without_cage(arms: list[Arm], reason: str) -> tuple[list[Arm], list[str]]:
    """The arms where no cgroup holds a cap, and what has to be said of that: what others are held against, stock and
    the inert hook, runs without one, because what it keeps the kernel decides."""
    free = [replace(arm, cap_bytes=None) if arm.key in REFERENCES else arm for arm in arms]
    return free, [
        f"caps are the engine's own and not enforced: {reason}",
        *(f"{key}: runs without a cap, only a memory cgroup could hold it to one" for key in REFERENCES),
    ]


def able_arms(arms: list[Arm], caged: bool, reason: str) -> tuple[list[Arm], list[str]]:
    """The arms that can run, and a line for each that cannot: without a cgroup nothing caps what the kernel keeps."""
    able = [arm for arm in arms if caged or not arm.needs_cage]
    gone = [arm.key for arm in arms if arm not in able]
    return able, [f"{key}: only a memory cgroup caps it, {reason}" for key in gone]


def _begun(out: Path) -> dict[str, Any]:
    """Of a benchmark that is there: whether everything fitted, and its batch; {} where there is none to be read."""
    try:
        setup = read_json(out / SETUP, "begin anew with --force")
        return {"fits": any(arm["key"] == CEILING for arm in setup["arms"]), "batch": int(setup["batch"])}
    except (MoestreamError, ValueError, KeyError, TypeError, OverflowError):
        # Whoever opens the journal next says what is wrong with it.
        return {}
