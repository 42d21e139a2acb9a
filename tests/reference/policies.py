"""What each policy decides, in plain Python: the specification of core/src/policies.

A policy sees one part of the budget, its experts numbered from 0. It keeps what it likes about their use and
names the *victim*: the candidate (resident, not pinned) whose rank is lowest. Here that is a `min` over all
candidates; the core gets the same answer from lists and heaps. Nothing here knows files, bytes or time; the
only clock is the token count of the uses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

# Before Python 3.11 the last bit may differ from the core's exp2, which matters only between exact ties.
exp2: Callable[[float], float] = getattr(math, "exp2", lambda x: 2.0**x)


class Policy(ABC):
    """`bank_of[e]`: bank (0..banks-1) of the part's expert e; `capacity`: the number of experts that fit."""

    def __init__(self, capacity: int, bank_of: list[int]) -> None:
        self.capacity = capacity
        self.bank_of = bank_of
        self.banks = max(bank_of) + 1
        self.resident: set[int] = set()
        self.pinned: set[int] = set()
        self.last_use = [0] * len(bank_of)  # 0: never; else the number of the use, counted over all experts
        self.uses = 0

    def use(self, expert: int, token: int, tokens: int, count: int) -> None:
        """A step of `tokens` tokens, the first being number `token`, routed `count` of them to `expert`."""
        self.uses += 1
        self.last_use[expert] = self.uses

    def admit(self, expert: int) -> None:
        self.resident.add(expert)

    def forget(self, expert: int) -> None:
        self.resident.remove(expert)

    def pin(self, expert: int, pinned: bool) -> None:
        (self.pinned.add if pinned else self.pinned.discard)(expert)

    def victim(self, incoming: int) -> int | None:
        """Who gives its place to `incoming`; None when there is no candidate."""
        return self.lowest(self.resident - self.pinned)

    def lowest(self, candidates: set[int]) -> int | None:
        return min(candidates, key=self.rank, default=None)

    @abstractmethod
    def rank(self, expert: int) -> tuple[Any, ...]:
        """Higher stays. Ends in (last use, number), so that ranks are never equal."""


class Lru(Policy):
    """The expert whose last use is longest ago leaves; loading alone is no use."""

    def rank(self, expert: int) -> tuple[Any, ...]:
        return (self.last_use[expert], expert)


class NoRetention(Policy):
    """Nothing is kept on purpose: frames are reused in the order they were filled, whatever was used."""

    def __init__(self, capacity: int, bank_of: list[int]) -> None:
        super().__init__(capacity, bank_of)
        self.admitted = [0] * len(bank_of)
        self.admissions = 0

    def admit(self, expert: int) -> None:
        super().admit(expert)
        self.admissions += 1
        self.admitted[expert] = self.admissions

    def rank(self, expert: int) -> tuple[Any, ...]:
        return (self.admitted[expert],)


class LruLayer(Lru):
    """LRU inside equal shares: a bank that has its quota pays for its own, else the one furthest above."""

    def quota(self, bank: int) -> int:
        return self.capacity // self.banks + (bank < self.capacity % self.banks)

    def excess(self, bank: int) -> int:
        return sum(self.bank_of[e] == bank for e in self.resident) - self.quota(bank)

    def victim(self, incoming: int) -> int | None:
        of_bank: dict[int, set[int]] = {}
        for expert in self.resident - self.pinned:
            of_bank.setdefault(self.bank_of[expert], set()).add(expert)
        own = self.bank_of[incoming]
        if own in of_bank and self.excess(own) >= 0:
            return self.lowest(of_bank[own])
        above = [bank for bank in of_bank if self.excess(bank) > 0]
        if above:
            return self.lowest(of_bank[max(above, key=lambda bank: (self.excess(bank), -bank))])
        return super().victim(incoming)


class LfuDecay(Policy):
    """The smallest decayed frequency leaves: a use counts 1, half of that after `half_life` tokens.

    The frequency f is known at the expert's last use, at token t. All decay at one rate, so f moved to
    token 0, log2(f) + t / half_life, orders the experts at all times. Absent experts keep their history.
    """

    def __init__(self, capacity: int, bank_of: list[int], half_life: float = 16.0) -> None:
        super().__init__(capacity, bank_of)
        self.half_life = half_life
        self.frequency = [0.0] * len(bank_of)
        self.last_token = [0] * len(bank_of)

    def use(self, expert: int, token: int, tokens: int, count: int) -> None:
        super().use(expert, token, tokens, count)
        since = max(0, token + tokens - 1 - self.last_token[expert])  # to the step's last token
        kept = self.frequency[expert] * exp2(-(since / self.half_life))
        self.frequency[expert] = kept + count * self.weight(tokens)
        self.last_token[expert] += since

    def weight(self, tokens: int) -> float:
        """The mean decay, by the step's end, of uses spread evenly over its tokens."""
        if tokens == 1:
            return 1.0
        return self.half_life / (tokens * math.log(2)) * (1.0 - exp2(-(tokens / self.half_life)))

    def rank(self, expert: int) -> tuple[Any, ...]:
        if self.frequency[expert] == 0.0:
            return (-math.inf, 0, expert)
        key = math.log2(self.frequency[expert]) + self.last_token[expert] / self.half_life
        return (key, self.last_use[expert], expert)


def make_policy(text: str, capacity: int, bank_of: list[int]) -> Policy:
    """`none`, `lru`, `lru-layer`, `lfu-decay` or `lfu-decay:H`."""
    name, _, argument = text.partition(":")
    if name == "lfu-decay":
        return LfuDecay(capacity, bank_of, float(argument or 16))
    plain: dict[str, type[Policy]] = {"none": NoRetention, "lru": Lru, "lru-layer": LruLayer}
    return plain[name](capacity, bank_of)
