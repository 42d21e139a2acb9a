"""A mechanism: which store, reader, policy, predictor and dense placement do the work, as one value.

Its canonical text is ``store[/variant]+reader+policy+predictor+dense``; every result stores it. Only this
module parses and prints it. It knows the vocabulary and which members go together, not what they do.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from moestream.errors import MechanismError


@dataclass(frozen=True)
class Member:
    """One member of a family. ``argument``: what the number after the colon counts, '' when it takes none."""

    help: str
    argument: str = ""
    default: int = 0
    lowest: int = 1
    highest: int = 0


_QUEUE = {
    "uring": Member("io_uring by raw system calls", "reads in flight", 8, 1, 1024),
    "threads": Member("a pool of pread threads", "threads", 4, 1, 64),
    "sync": Member("pread by the thread that needs the bytes"),
}
_WARMERS = {
    "fault": Member("page faults bring the bytes, as in stock llama.cpp"),
    "willneed": Member("MADV_WILLNEED for each routed slab"),
    "pread": Member("pread of each routed slab into scratch, to warm the page cache"),
    "pread+willneed": Member("MADV_WILLNEED, then pread into scratch"),
}
_STORES = {
    "resident": Member("everything read into memory at load: the compute ceiling"),
    "mapped": Member("the file mapped without MAP_POPULATE: the kernel's page cache is the cache"),
    "arena": Member("a fixed set of pages, moved to wherever the next expert must appear"),
}
_POLICIES = {
    "none": Member("nothing is kept on purpose: an arena reuses frames in the order they were filled"),
    "lru": Member("the expert unused for the longest time leaves"),
    "lru-layer": Member("lru inside an equal share for each layer"),
    "lfu-decay": Member(
        "the expert of the lowest decayed use count leaves", "half-life in tokens", 16, 1, 10**6
    ),
}
_PREDICTORS = {
    "none": Member("nothing is read early"),
    "gate": Member("the next layer's router on this layer's input", "experts a layer", 1, 1, 64),
}
_DENSE = {
    "mapped": Member("in the file mapping, as in stock llama.cpp"),
    "mlock": Member("locked in memory"),
    "anon": Member("in anonymous memory, read once at load"),
}
_VARIANTS = {
    "direct": Member("O_DIRECT reads"),
    "buffered": Member("reads through the page cache, dropped after"),
}


@dataclass(frozen=True)
class _Grammar:
    """What goes with one store."""

    readers: dict[str, Member]
    policies: dict[str, Member]
    predictors: dict[str, Member]
    dense: dict[str, Member]
    variants: tuple[str, ...]
    defaults: tuple[str, str, str, str]  # reader, policy, predictor, dense


_ANON = {name: _DENSE[name] for name in ("anon", "mlock")}
_NONE = {"none": _POLICIES["none"]}
_GRAMMAR = {
    "resident": _Grammar(_QUEUE, _NONE, _NONE, _ANON, (), ("uring:8", "none", "none", "anon")),
    "mapped": _Grammar(_WARMERS, _NONE, _NONE, _DENSE, (), ("fault", "none", "none", "mapped")),
    "arena": _Grammar(
        _QUEUE,
        _POLICIES,
        _PREDICTORS,
        _ANON,
        ("direct", "buffered"),
        ("uring:8", "lfu-decay:16", "none", "anon"),
    ),
}
_FAMILIES = {"reader": _QUEUE | _WARMERS, "policy": _POLICIES, "predictor": _PREDICTORS, "dense": _DENSE}
_REASONS = {
    ("resident", "policy"): "nothing ever leaves a resident store",
    ("resident", "predictor"): "nothing is read after the load of a resident store",
    ("mapped", "policy"): "the kernel's page cache decides what stays in a mapped store",
    ("mapped", "predictor"): "a mapped store reads nothing of its own early",
    ("resident", "dense"): "its dense bytes are read into anonymous memory",
    ("arena", "dense"): "its dense bytes are read into anonymous memory",
}


@dataclass(frozen=True)
class Mechanism:
    """One combination; every part is canonical text (``uring:8``, never ``uring``).

    ``variant`` is ``direct`` or ``buffered`` for an arena and '' for the other stores. A value built by hand
    from members that do not go together raises MechanismError, like ``parse``.
    """

    store: str
    variant: str
    reader: str
    policy: str
    predictor: str
    dense: str

    def __post_init__(self) -> None:
        grammar = _grammar(self.store)
        _check_variant(self.store, self.variant)
        for family, part, members in (
            ("reader", self.reader, grammar.readers),
            ("policy", self.policy, grammar.policies),
            ("predictor", self.predictor, grammar.predictors),
            ("dense", self.dense, grammar.dense),
        ):
            name, colon, argument = part.partition(":")
            if name not in members:
                raise MechanismError(_refusal(self.store, family, part, members))
            object.__setattr__(self, family, _with_argument(name, argument if colon else None, members[name]))

    def __str__(self) -> str:
        variant = "/buffered" if self.variant == "buffered" else ""
        return "+".join((self.store + variant, self.reader, self.policy, self.predictor, self.dense))

    @classmethod
    def parse(cls, text: str) -> Mechanism:
        """The mechanism a text names. After the store, parts may come in any order and be left out (the
        store's defaults); of two ``none`` the first is the policy. Raises MechanismError that names the nearest
        known words."""
        head, *parts = [part.strip() for part in text.strip().split("+")]
        store, slash, variant = head.partition("/")
        grammar = _grammar(store)
        if not slash:
            variant = grammar.variants[0] if grammar.variants else ""
        elif variant not in grammar.variants:
            raise MechanismError(_unknown_variant(store, variant))
        chosen: dict[str, str] = {}
        nones = 0
        for part in _joined(parts):
            if part == "none":
                nones += 1
                continue
            family = _family(part)
            if family in chosen:
                both = f"{chosen[family]} and {part}"
                raise MechanismError(f"mechanism {text!r} names two members for {family}: {both}")
            chosen[family] = part
        for _ in range(nones):
            free = [family for family in ("policy", "predictor") if family not in chosen]
            if not free:
                raise MechanismError(f"a 'none' too many in {text!r}: only policy and predictor can be none")
            chosen[free[0]] = "none"
        names = ("reader", "policy", "predictor", "dense")
        return cls(store, variant, *(chosen.get(f, d) for f, d in zip(names, grammar.defaults, strict=True)))


def _joined(parts: list[str]) -> list[str]:
    """``pread`` followed by ``willneed`` is one reader."""
    joined: list[str] = []
    for part in parts:
        if joined and {joined[-1], part} == {"pread", "willneed"}:
            joined[-1] = "pread+willneed"
        else:
            joined.append(part)
    return joined


def _grammar(store: str) -> _Grammar:
    if store not in _GRAMMAR:
        nearest = _nearest(store, list(_GRAMMAR))
        raise MechanismError(f"unknown store {store!r}{nearest} (known: {', '.join(_GRAMMAR)})")
    return _GRAMMAR[store]


def _check_variant(store: str, variant: str) -> None:
    known = _GRAMMAR[store].variants
    if variant not in (known or ("",)):
        raise MechanismError(_unknown_variant(store, variant))


def _unknown_variant(store: str, variant: str) -> str:
    known = _GRAMMAR[store].variants
    if not known:
        return f"store {store} has no variants, not {variant!r} (the arena has: {', '.join(_VARIANTS)})"
    nearest = _nearest(variant, list(known))
    return f"unknown variant {variant!r} of {store}{nearest} (known: {', '.join(known)})"


def _family(part: str) -> str:
    name = part.partition(":")[0]
    for family, members in _FAMILIES.items():
        if name in members:
            return family
    words = list(dict.fromkeys(word for members in _FAMILIES.values() for word in members))
    if name in _STORES:
        raise MechanismError(f"a mechanism names its store once and first, not again as {part!r}")
    nearest = _nearest(name, words)
    raise MechanismError(f"unknown part {part!r} of a mechanism{nearest} (known: {', '.join(words)})")


def _refusal(store: str, family: str, part: str, members: dict[str, Member]) -> str:
    name = part.partition(":")[0]
    known = ", ".join(members)
    if name not in _FAMILIES[family]:
        return f"unknown {family} {part!r}{_nearest(name, list(members))} (store {store} takes: {known})"
    reason = _REASONS.get((store, family), "that reader belongs to another store")
    return f"store {store} cannot have {family} {part!r}: {reason} (it takes: {known})"


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f": did you mean {' or '.join(close)}?" if close else ""


def _with_argument(name: str, argument: str | None, member: Member) -> str:
    """Canonical ``name`` or ``name:number``; MechanismError when the number is not one or out of range."""
    if not member.argument:
        if argument is not None:
            raise MechanismError(f"{name} takes no number, not {name}:{argument}")
        return name
    if argument is None:
        return f"{name}:{member.default}"
    digits = argument.isascii() and argument.isdigit() and len(argument) < 10
    if not digits or not member.lowest <= int(argument) <= member.highest:
        allowed = f"{member.lowest} to {member.highest}"
        raise MechanismError(f"{name}:{argument[:20]}: {member.argument} must be a whole number, {allowed}")
    return f"{name}:{int(argument)}"


def members() -> dict[str, dict[str, Member]]:
    """Every family's members by name, for documentation."""
    return {
        "store": dict(_STORES),
        "variant": dict(_VARIANTS),
        "reader": dict(_FAMILIES["reader"]),
        "policy": dict(_POLICIES),
        "predictor": dict(_PREDICTORS),
        "dense": dict(_DENSE),
    }


#: What runs when nothing is asked for and the model is larger than the memory named.
DEFAULT = Mechanism.parse("arena")
