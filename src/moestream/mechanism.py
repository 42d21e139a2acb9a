"""A mechanism: which store, reader, policy, predictor and dense placement do the work, as one value.

Its canonical text is ``store[/variant...]+reader[+background:N]+policy+predictor+dense``; every result stores it.
Only this module parses and prints it. It knows the vocabulary and which members go together, not what they do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from moestream.errors import MechanismError
from moestream.members import (
    BACKGROUND,
    DENSE,
    ELSEWHERE,
    FAMILIES,
    GROUPS,
    POLICIES,
    PREDICTORS,
    QUEUE,
    STORES,
    VARIANTS,
    WARMERS,
    Member,
)
from moestream.nearest import did_you_mean, nearest


@dataclass(frozen=True)
class _Grammar:
    """What goes with one store."""

    readers: dict[str, Member]
    policies: dict[str, Member]
    predictors: dict[str, Member]
    dense: dict[str, Member]
    defaults: tuple[str, str, str, str]  # reader, policy, predictor, dense


def _only(family: dict[str, Member], *names: str) -> dict[str, Member]:
    return {name: family[name] for name in names}


#: Stores that copy what they read into a mapping of the file.
_COPYING = _Grammar(
    QUEUE,
    {name: member for name, member in POLICIES.items() if name != "dontneed"},
    _only(PREDICTORS, "none"),
    _only(DENSE, "mapped", "mlock"),
    ("sync", "lru", "none", "mapped"),
)
_GRAMMAR = {
    "resident": _Grammar(
        QUEUE,
        _only(POLICIES, "none"),
        _only(PREDICTORS, "none"),
        _only(DENSE, "anon", "mlock"),
        ("uring:8", "none", "none", "anon"),
    ),
    "mapped": _Grammar(
        WARMERS,
        _only(POLICIES, "none", "dontneed"),
        PREDICTORS,
        DENSE,
        ("fault", "none", "none", "mapped"),
    ),
    "arena": _Grammar(
        QUEUE,
        POLICIES,
        PREDICTORS,
        _only(DENSE, "anon", "mlock"),
        ("uring:8", "lfu-adapt", "none", "anon"),
    ),
    "cow": _COPYING,
    "shared": _COPYING,
}
#: Families whose words need no place of their own.
_AFTER_STORE = {name: members for name, members in FAMILIES.items() if name not in ("store", "variant")}
_PARTS = ("reader", "policy", "predictor", "dense")
_REASONS = {
    ("resident", "policy"): "nothing ever leaves a resident store",
    ("resident", "predictor"): "nothing is read after the load of a resident store",
    ("mapped", "policy"): "the kernel's page cache decides what stays in a mapped store",
    ("resident", "dense"): "its dense bytes are read into anonymous memory",
    ("arena", "dense"): "its dense bytes are read into anonymous memory",
    ("cow", "policy"): "what was copied stays",
    ("cow", "predictor"): "it reads when a route says so and not before",
    ("cow", "dense"): "its dense bytes stay in the file mapping",
    ("shared", "policy"): "what was written stays until the kernel writes it back",
    ("shared", "predictor"): "it reads when a route says so and not before",
    ("shared", "dense"): "its dense bytes stay in the file mapping",
}
#: Of a path in a mechanism's text: what would end it.
_ESCAPED = {"%": "%25", "+": "%2B", ",": "%2C"}


@dataclass(frozen=True)
class Mechanism:
    """One combination; every part is canonical text (``uring:8``, never ``uring``).

    ``variants`` holds the words that differ from the store's defaults, in canonical order. ``reader`` ends in
    ``+background:N`` where worker threads do the asking. A file's name stands as it is; only the text escapes ``+``,
    ``,`` and ``%`` in it. A value built by hand from members that do not go together raises MechanismError, like
    ``parse``.
    """

    store: str
    variants: tuple[str, ...]
    reader: str
    policy: str
    predictor: str
    dense: str

    def __post_init__(self) -> None:
        grammar = _grammar(self.store)
        object.__setattr__(self, "variants", _canonical_variants(self.store, self.variants))
        reader, background = _split_background(self.reader)
        for family, part, members in (
            ("reader", reader, grammar.readers),
            ("policy", self.policy, grammar.policies),
            ("predictor", self.predictor, grammar.predictors),
            ("dense", self.dense, grammar.dense),
        ):
            name, colon, argument = part.partition(":")
            if name not in members:
                raise MechanismError(_refusal(self.store, family, part, members))
            object.__setattr__(self, family, _with_argument(name, argument if colon else None, members[name]))
        asks = self.store == "mapped" and self.reader != "fault"
        if background and not asks:
            raise MechanismError(
                f"{background} needs a reader of the mapped store that asks for slabs, such as "
                f"mapped+willneed+{background}: {self.store}+{self.reader} has none"
            )
        if background:
            name, colon, argument = background.partition(":")
            text = _with_argument(name, argument if colon else None, BACKGROUND[name])
            object.__setattr__(self, "reader", f"{self.reader}+{text}")
        if self.store == "mapped" and self.predictor != "none" and not asks:
            raise MechanismError(
                f"mapped+fault cannot have predictor {self.predictor!r}: it asks for nothing "
                "(mapped+willneed does)"
            )

    def __str__(self) -> str:
        parts = (self.reader, _escaped(self.policy), _escaped(self.predictor), self.dense)
        return "+".join(("/".join((self.store, *self.variants)), *parts))

    @classmethod
    def parse(cls, text: str) -> Mechanism:
        """The mechanism a text names. After the store, parts may come in any order and be left out (the
        store's defaults); of two ``none`` the first is the policy. Raises MechanismError that names the nearest
        known words."""
        head, *parts = [part.strip() for part in text.strip().split("+")]
        store, *variants = head.split("/")
        grammar = _grammar(store)
        chosen: dict[str, str] = {}
        nones = 0
        for part in _joined(parts):
            if part == "none":
                nones += 1
                continue
            family = _family(part, store)
            if family in chosen:
                both = f"{chosen[family]} and {part}"
                raise MechanismError(f"mechanism {text!r} names two members for {family}: {both}")
            chosen[family] = unquote(part) if family in ("policy", "predictor") else part
        for _ in range(nones):
            free = [family for family in ("policy", "predictor") if family not in chosen]
            if not free:
                raise MechanismError(f"a 'none' too many in {text!r}: only policy and predictor can be none")
            chosen[free[0]] = "none"
        reader, *rest = (chosen.get(f, d) for f, d in zip(_PARTS, grammar.defaults, strict=True))
        if "background" in chosen:
            reader += "+" + chosen["background"]
        return cls(store, tuple(variants), reader, *rest)

    def has(self, variant: str) -> bool:
        """Is the variant named or the default of its group?"""
        for group in GROUPS[self.store]:
            if variant in group:
                return variant in self.variants or (
                    group[0] == variant and not any(word in self.variants for word in group)
                )
        return False

    def one_of(self, *group: str) -> str:
        """Which of a group's variants holds; the first where the store has no such group."""
        return next((word for word in group if self.has(word)), group[0])

    @property
    def cached(self) -> bool:
        """Does the engine itself keep a set of experts of a named size?"""
        return self.store in ("arena", "cow", "shared")

    @property
    def left_to_the_kernel(self) -> bool:
        """Does the kernel decide how much of the file stays in memory, so that only a cgroup is a cap to it?"""
        return self.store in ("mapped", "cow", "shared") or self.has("cached")

    def file_of(self, family: str) -> str | None:
        """The file behind the colon of the policy or predictor; None where it takes none."""
        name, _, argument = str(getattr(self, family)).partition(":")
        known = FAMILIES[family][name].argument
        return argument if known is not None and known.file else None

    def without_file(self, family: str) -> str:
        """The policy or predictor as the core takes it: what its file holds goes there as seeds."""
        text = str(getattr(self, family))
        return text if self.file_of(family) is None else text.partition(":")[0]


def _split_background(reader: str) -> tuple[str, str]:
    head, plus, last = reader.rpartition("+")
    if plus and last.partition(":")[0] in BACKGROUND:
        return head, last
    return reader, ""


def _joined(parts: list[str]) -> list[str]:
    """``pread`` and ``willneed`` side by side are one reader; either may carry its argument."""
    joined: list[str] = []
    for part in parts:
        name, colon, argument = part.partition(":")
        last, last_colon, last_argument = joined[-1].partition(":") if joined else ("", "", "")
        if {last, name} == {"pread", "willneed"} and not (colon and last_colon):
            joined[-1] = "pread+willneed" + (colon or last_colon) + (argument or last_argument)
        else:
            joined.append(part)
    return joined


def _grammar(store: str) -> _Grammar:
    if store not in _GRAMMAR:
        near = did_you_mean(store, _GRAMMAR)
        raise MechanismError(f"unknown store {store!r}{near} (known: {', '.join(_GRAMMAR)})")
    return _GRAMMAR[store]


def _canonical_variants(store: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """The words that differ from the defaults, each group's at most once, in the groups' order."""
    known = [word for group in GROUPS[store] for word in group if word]
    for word in words:
        if word not in known:
            if not known:
                raise MechanismError(f"store {store} has no variants, not {word!r} (the arena has some)")
            raise MechanismError(
                f"unknown variant {word!r} of {store}{did_you_mean(word, known)} (known: {', '.join(known)})"
            )
    chosen = []
    for group in GROUPS[store]:
        named = list(dict.fromkeys(word for word in words if word in group))
        if len(named) > 1:
            raise MechanismError(f"store {store} cannot be both {named[0]} and {named[1]}")
        chosen += [word for word in named if word != group[0]]
    return tuple(chosen)


def _family(part: str, store: str) -> str:
    name = part.partition(":")[0]
    for family, members in _AFTER_STORE.items():
        if name in members:
            return family
    if name in STORES:
        raise MechanismError(f"a mechanism names its store once and first, not again as {part!r}")
    if name in ELSEWHERE:
        raise MechanismError(ELSEWHERE[name])
    if name in VARIANTS:
        raise MechanismError(f"{part!r} is a variant of a store: it follows the store after a slash")
    raise MechanismError(f"unknown part {part!r} of a mechanism{_meant(name, _GRAMMAR[store], store)}")


def _meant(name: str, grammar: _Grammar, store: str) -> str:
    """What an unknown word may have meant, and all there is of its kind; for one like none, where all kinds are."""
    taken = {
        "reader": grammar.readers,
        "policy": grammar.policies,
        "predictor": grammar.predictors,
        "dense": grammar.dense,
        "background": BACKGROUND,
    }
    near = nearest(name, [word for members in taken.values() for word in members], most=1)
    if not near:
        return " (`moestream mechanisms` lists readers, policies, predictors and the rest)"
    family, members = next(kind for kind in taken.items() if near[0] in kind[1])
    return f"{did_you_mean(name, members)} ({family} of {store}: {', '.join(members)})"


def _refusal(store: str, family: str, part: str, members: dict[str, Member]) -> str:
    name = part.partition(":")[0]
    known = ", ".join(members)
    if name not in FAMILIES[family]:
        return f"unknown {family} {part!r}{did_you_mean(name, members)} (store {store} takes: {known})"
    reason = _REASONS.get((store, family), "that reader belongs to another store")
    return f"store {store} cannot have {family} {part!r}: {reason} (it takes: {known})"


def _escaped(part: str) -> str:
    name, colon, argument = part.partition(":")
    return name + colon + re.sub("[%+,]", lambda match: _ESCAPED[match[0]], argument)


def _with_argument(name: str, text: str | None, member: Member) -> str:
    """Canonical ``name`` or ``name:argument``; MechanismError when the argument is missing, wrong or out of range."""
    argument = member.argument
    if argument is None:
        if text is not None:
            raise MechanismError(f"{name} takes no number, not {name}:{text[:20]}")
        return name
    if argument.file:
        if not text:
            raise MechanismError(f"{name} needs a file, {argument.what}: {name}:FILE")
        return f"{name}:{text}"
    if argument.choices:
        word = argument.choices[0] if text is None else text
        if word not in argument.choices:
            raise MechanismError(
                f"{name}:{word[:20]}: {argument.what} is one of {', '.join(argument.choices)}"
            )
        return f"{name}:{word}"
    number, times, pieces = ("", "", "") if text is None else text.partition("x")
    count = argument.default if text is None else _whole(number, argument.lowest, argument.highest)
    most = argument.most_times
    parts = _whole(pieces, 1, most) if times and most > 1 else (None if times else 1)
    if count is None or parts is None:
        each = "NxS: each slab in S pieces" if argument.pieces else "NxL: of each of the next L layers"
        shape = f" (or {each}, 1 to {most})" if most > 1 else ""
        raise MechanismError(
            f"{name}:{(text or '')[:20]}: {argument.what} must be a whole number, "
            f"{argument.lowest} to {argument.highest}{shape}"
        )
    if name in WARMERS and count == parts == 1:  # one thread, whole slabs: the plain member
        return name
    return f"{name}:{count}" + (f"x{parts}" if parts > 1 else "")


def _whole(digits: str, lowest: int, highest: int) -> int | None:
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        return None
    return int(digits) if lowest <= int(digits) <= highest else None


#: What runs when nothing is asked for and the model is larger than the memory named.
DEFAULT = Mechanism.parse("arena")
