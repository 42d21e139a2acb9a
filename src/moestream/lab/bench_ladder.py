"""The arms of ``moestream bench``: stock, the inert hook and the ceiling always, what was asked for between them."""

from __future__ import annotations

from collections.abc import Sequence

from moestream.errors import UsageError
from moestream.lab.bench_arms import STOCK, Arm
from moestream.mechanism import Mechanism
from moestream.members import GROUPS, POLICIES, PREDICTORS, QUEUE, WARMERS, Member

INERT = "mapped+fault+none+none+mapped"
#: The arms that every benchmark has, whatever was asked for and wherever it runs.
REFERENCES = (STOCK, INERT)
#: One lever at a time, from stock to the default: the lever, and the mechanism once it is pulled.
RUNGS = (
    ("the hook, which asks for nothing", "mapped+fault+mapped"),
    ("dense weights locked", "mapped+fault+mlock"),
    ("each routed slab asked for (WILLNEED)", "mapped+willneed+mlock"),
    ("own memory, fresh pages, one blocking read at a time", "arena/fresh+sync+none"),
    ("least recently used experts leave", "arena/fresh+sync+lru"),
    ("reads in parallel (threads)", "arena/fresh+threads:4+lru"),
    ("reads by io_uring", "arena/fresh+uring:8+lru"),
    ("pages move instead of being dropped", "arena+uring:8+lru"),
    ("least often used experts leave, older uses counting less", "arena+uring:8+lfu-decay:16"),
    ("several half-lives, and what followed moments like this one", "arena+uring:8+lfu-adapt"),
)
CEILING = "resident"
DEFAULT_KEY = "default"


def bench_arms(which: str, cap: int, *, chosen: Mechanism, fits: bool) -> list[Arm]:
    """The arms of ``--mechanisms``: ``ladder``, ``all``, or texts with commas between.

    Stock comes first, then the inert hook, then what was asked for, last the ceiling: everything in memory without a
    cap, where ``fits`` says that it can be. ``chosen``: what the engine takes by itself under this cap; that arm is
    not told a mechanism, so that it runs as a user's does, fallbacks included. Raises UsageError for an empty list
    and MechanismError for words it does not know."""
    if which == "ladder":
        asked = [(lever, Mechanism.parse(text)) for lever, text in RUNGS]
        asked.append(("the default", chosen))
    elif which == "all":
        asked = [("", mechanism) for mechanism in [*everything(), chosen]]
    else:
        texts = [text.strip() for text in which.split(",") if text.strip()]
        if not texts:
            raise UsageError("--mechanisms names none: write some with commas between, ladder, or all")
        for word in ("ladder", "all"):
            if word in texts:
                raise UsageError(f"--mechanisms {which[:60]!r}: {word} stands alone, without commas")
        asked = [
            ("", chosen if text == DEFAULT_KEY else Mechanism.parse(text)) for text in texts if text != STOCK
        ]
    arms = [Arm(STOCK, cap, STOCK)]
    for lever, mechanism in _unique([("the hook, which asks for nothing", Mechanism.parse(INERT)), *asked]):
        if mechanism == chosen:
            arms.append(Arm(DEFAULT_KEY, cap, None, lever=lever))
        else:
            arms.append(Arm(str(mechanism), cap, str(mechanism), lever=lever))
    if fits:
        arms.append(Arm(CEILING, None, str(Mechanism.parse("resident"))))
    return arms


def sentinel_of(arms: Sequence[Arm]) -> str:
    """The key of the arm that runs twice a block: the default where it is one of them, else the last that is under the
    cap and does not fault."""
    capped = [arm for arm in arms if arm.cap_bytes is not None]
    quick = [arm for arm in capped if not arm.faults]
    return next((arm.key for arm in arms if arm.key == DEFAULT_KEY), (quick or capped or list(arms))[-1].key)


def everything() -> list[Mechanism]:
    """One mechanism for each member in turn, the rest as by default: every reader, policy, predictor, variant and place
    of the dense bytes. Left out is what needs a file, a copy of the model (``shared``) or memory without bound
    (``cow``): such an arm is asked for by name."""
    texts = [f"mapped+{reader}+mlock" for reader in WARMERS]
    texts += [f"mapped/{word}+fault" for group in GROUPS["mapped"][:1] for word in group[1:]]
    texts += ["mapped+willneed", "mapped+willneed+anon", "mapped+willneed+background:1+mlock"]
    texts += ["mapped+willneed+dontneed:0+mlock"]
    texts += [f"arena+{reader}" for reader in QUEUE]
    for group in GROUPS["arena"]:
        texts += [f"arena/{word}" for word in group[1:]]
    texts += [f"arena+{name}" for name, member in POLICIES.items() if _free(member) and name != "dontneed"]
    texts += [f"arena+{name}" for name, member in PREDICTORS.items() if _free(member) and name != "none"]
    texts.append("arena+mlock")
    found = [Mechanism.parse(text) for text in texts]
    return [mechanism for _, mechanism in _unique([("", one) for one in found])]


def _free(member: Member) -> bool:
    return member.argument is None or not member.argument.file


def _unique(pairs: Sequence[tuple[str, Mechanism]]) -> list[tuple[str, Mechanism]]:
    """Each mechanism once, where it first comes."""
    first: dict[Mechanism, str] = {}
    for lever, mechanism in pairs:
        first.setdefault(mechanism, lever)
    return [(lever, mechanism) for mechanism, lever in first.items()]
