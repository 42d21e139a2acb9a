"""What an experiment runs on a model, in order, and how long that takes: pure functions.

Times are those of the demo model on two cores and a disk of 1 to 2 GB/s; another model's are in proportion to what a
token reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from moestream.errors import UsageError
from moestream.lab.experiment import NO_CAP, ArmSpec, Experiment, Settings, budget_bytes
from moestream.mechanism import Mechanism

#: The demo model: what ``lab list`` estimates for.
DEMO_BYTES, DEMO_EXPERT_BYTES, DEMO_DEMAND = 3_238_072_576, 3_185_049_600, 398_131_200
#: Seconds of a run beside its tokens: a process, the dropped cache, the disk's rate, a load.
_RUN_S = 6.0
#: A prompt wants most experts once: as many bytes as so many tokens.
_PROMPT_TOKENS = 6
#: Seconds a token, by store or reader (see FINDINGS.md).
_TOKEN_S = {
    "stock": 2.4, "fault": 2.4, "memcpy": 1.2, "pread": 0.8, "pread+willneed": 0.8, "hybrid": 0.5, "tiered": 0.8,
    "willneed": 0.2, "readahead": 0.25, "fadvise": 0.25, "cow": 0.8, "shared": 4.0, "arena": 0.14,
    "resident": 0.035,
}  # fmt: skip
_DROPPING, _FRESH, _BACKGROUND = 3.0, 1.7, 2.0
#: Seconds a GB: to read a model whole, to write a copy, to make it anew in another quantisation.
_WHOLE_S_PER_GB, _COPY_S_PER_GB, _FILE_S_PER_GB = 1.0, 4.0, {"aligned": 5.0, "requantized": 45.0}
#: A cap is a multiple of this: a cgroup rounds its limit down to pages, and a cap above it would not be as asked.
_WHOLE = 1 << 20
#: Seconds an analysis takes beside its runs.
_ANALYSIS_S = 5.0


@dataclass(frozen=True)
class Sizes:
    """Of a model, in bytes."""

    bytes: int
    expert_bytes: int
    demand: int


#: What tells one run of an experiment from its others: arm, prompt, round.
Step = tuple[str, str, int]
PROBE: Step = ("probe", "", 0)
DEMO = Sizes(DEMO_BYTES, DEMO_EXPERT_BYTES, DEMO_DEMAND)


@dataclass(frozen=True)
class Job:
    """One run. ``round``: the repeat, from 0; ``position``: its place in the round. ``cap_bytes`` None: no cap;
    ``budget_bytes`` None: all the cap leaves; ``batch`` None: what every arm's cap allows."""

    experiment: str
    arm: ArmSpec
    prompt: str
    round: int
    position: int
    cap_bytes: int | None
    budget_bytes: int | None
    tokens: int
    threads: int
    ctx: int
    batch: int | None
    trace: bool

    @property
    def key(self) -> Step:
        """What tells it from the experiment's other runs."""
        return self.arm.key, self.prompt, self.round

    def made(self, record: Mapping[str, Any]) -> bool:
        """Is the record of this run? One of that name may be older than what its arm asks for today."""
        return (
            (record["arm"], record["prompt"], record["round"]) == self.key
            and (record["asked"], record["cap_bytes"]) == (self.arm.mechanism, self.cap_bytes)
            and all(
                record.get(name, getattr(self, name)) == getattr(self, name)
                for name in ("tokens", "threads", "ctx")
            )
        )

    @property
    def same_run(self) -> tuple[Any, ...]:
        """What decides what is run: equal for two experiments' jobs that are one and the same run."""
        what = ArmSpec("", self.arm.mechanism, file=self.arm.file)
        return astuple(replace(self, experiment="", position=0, arm=what))


def jobs(experiment: Experiment, settings: Settings, sizes: Sizes, cap_bytes: int | None = None) -> list[Job]:
    """Every run, in order: all arms of a prompt and repeat in turn, every other turn in reverse, so that a disk that
    drifts favours none. ``cap_bytes``: instead of the settings' cap, for arms that name none of their own."""
    order: list[Job] = []
    turns = [(repeat, prompt) for repeat in range(settings.repeats) for prompt in settings.prompts]
    for number, (repeat, prompt) in enumerate(turns):
        arms = experiment.arms[::-1] if number % 2 else experiment.arms
        for position, arm in enumerate(arms):
            order.append(
                Job(
                    experiment=experiment.name,
                    arm=arm,
                    prompt=prompt,
                    round=repeat,
                    position=position,
                    cap_bytes=_cap(arm, settings, sizes, cap_bytes),
                    budget_bytes=_budget(arm, sizes),
                    tokens=arm.tokens or settings.tokens,
                    threads=arm.threads or settings.threads,
                    ctx=arm.ctx or settings.ctx,
                    batch=arm.batch or settings.batch,
                    trace=experiment.kind in ("trace", "replay"),
                )
            )
    return order


def _cap(arm: ArmSpec, settings: Settings, sizes: Sizes, override: int | None) -> int | None:
    if arm.cap is None and override is not None and settings.cap != NO_CAP:
        return override
    share = arm.cap if arm.cap is not None else settings.cap
    return None if isinstance(share, str) else int(share * sizes.bytes) // _WHOLE * _WHOLE


def _budget(arm: ArmSpec, sizes: Sizes) -> int | None:
    return None if arm.budget is None else budget_bytes(arm.budget, sizes.expert_bytes, sizes.demand)


def check_cap(experiment: Experiment, cap_bytes: int | None) -> None:
    """UsageError where ``--ram`` would change nothing: every arm's cap is part of the question."""
    if cap_bytes is None or experiment.kind == "probe":
        return
    if all(arm.cap is not None for arm in experiment.arms):
        raise UsageError(f"{experiment.name} is about its own caps: leave --ram out")


def steps(
    experiment: Experiment, quick: bool, sizes: Sizes = DEMO, cap_bytes: int | None = None
) -> dict[Step, float]:
    """About how long each of its runs takes, what is read out of its trace included; a probe is one step."""
    if experiment.kind == "probe":
        return {PROBE: (experiment.quick_probe if quick else experiment.probe).seconds + _ANALYSIS_S}
    settings = experiment.quick if quick else experiment.settings
    analysed = 0.0 if experiment.kind == "runs" else _ANALYSIS_S
    return {
        job.key: run_seconds(job, sizes) + analysed for job in jobs(experiment, settings, sizes, cap_bytes)
    }


def seconds(experiment: Experiment, quick: bool, sizes: Sizes = DEMO) -> float:
    """About how long it takes by itself, the files it needs included."""
    made = sum(file_seconds(kind, sizes) for kind in experiment.files)
    return sum(steps(experiment, quick, sizes).values()) + made


def not_shared(experiments: Sequence[Experiment], quick: bool, sizes: Sizes = DEMO) -> dict[str, float]:
    """By experiment about how long its runs take where those that one before it has made already are not made again."""
    made: list[set[tuple[Any, ...]]] = []
    times = {}
    for one in experiments:
        order = [] if one.kind == "probe" else jobs(one, one.quick if quick else one.settings, sizes)
        wanted = {job.same_run for job in order}
        known = bool(wanted) and any(wanted <= runs for runs in made)
        times[one.name] = 0.0 if known else sum(steps(one, quick, sizes).values())
        made.append(wanted)
    return times


def file_seconds(kind: str, sizes: Sizes = DEMO) -> float:
    """About how long the file of that kind takes to make."""
    return _FILE_S_PER_GB[kind] * sizes.bytes / 1e9


def run_seconds(job: Job, sizes: Sizes) -> float:
    """About how long one run takes."""
    scale = sizes.demand / DEMO_DEMAND
    tokens = job.tokens + _PROMPT_TOKENS
    if job.arm.is_stock:
        return _RUN_S + tokens * _TOKEN_S["stock"] * scale + _WHOLE_S_PER_GB * sizes.bytes / 1e9
    mechanism = Mechanism.parse(job.arm.mechanism)
    word = mechanism.store
    if word == "mapped":
        word = mechanism.reader.partition("+background")[0].partition(":")[0]
    token = _TOKEN_S[word] * (_BACKGROUND if "background" in mechanism.reader else 1.0)
    if mechanism.policy.startswith("dontneed"):
        token *= _DROPPING
    if mechanism.store == "arena" and not mechanism.has("recycle"):
        token *= _FRESH
    beside = {"resident": _WHOLE_S_PER_GB, "shared": _COPY_S_PER_GB}.get(mechanism.store, 0.0)
    return _RUN_S + tokens * token * scale + beside * sizes.bytes / 1e9


def capped(order: Sequence[Job]) -> list[tuple[int, int]]:
    """Each context length and cap among the jobs that take the common batch, each once, in ascending order."""
    return sorted(
        {(job.ctx, job.cap_bytes) for job in order if job.cap_bytes is not None and job.batch is None}
    )
