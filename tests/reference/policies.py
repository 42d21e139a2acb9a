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
        self.elastic = True  # can it do with a smaller capacity than it was made for?

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

    def keep(self, expert: int) -> bool:
        """May it stay once its matmuls are over?"""
        return True

    @abstractmethod
    def rank(self, expert: int) -> tuple[Any, ...]:
        """Higher stays. Ends in (last use, number), so that ranks are never equal."""


class Lru(Policy):
    """The expert whose last use is longest ago leaves; loading alone is no use."""

    def rank(self, expert: int) -> tuple[Any, ...]:
        return (self.last_use[expert], expert)


class Fifo(Policy):
    """Frames are reused in the order they were filled, whatever was used."""

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


class Lfu(Policy):
    """The expert used least often since it was loaded leaves."""

    def __init__(self, capacity: int, bank_of: list[int]) -> None:
        super().__init__(capacity, bank_of)
        self.count = [0] * len(bank_of)

    def use(self, expert: int, token: int, tokens: int, count: int) -> None:
        super().use(expert, token, tokens, count)
        self.count[expert] += count

    def admit(self, expert: int) -> None:
        super().admit(expert)
        self.count[expert] = 0

    def rank(self, expert: int) -> tuple[Any, ...]:
        return (self.count[expert], self.last_use[expert], expert)


class Sieve(Policy):
    """A queue in the order of loading, and a hand that sweeps it from old to new, again and again.

    The hand clears the mark of each expert used again since it last passed and takes the first without one.
    It passes pinned experts and leaves their marks.
    """

    def __init__(self, capacity: int, bank_of: list[int]) -> None:
        super().__init__(capacity, bank_of)
        self.queue: list[int] = []
        self.hand = 0  # a place in the queue
        self.used: set[int] = set()  # since it was loaded
        self.marked: set[int] = set()

    def use(self, expert: int, token: int, tokens: int, count: int) -> None:
        super().use(expert, token, tokens, count)
        (self.marked if expert in self.used else self.used).add(expert)

    def admit(self, expert: int) -> None:
        super().admit(expert)
        self.marked.discard(expert)
        self.used.discard(expert)
        if self.hand == len(self.queue):  # it has passed the newest: it starts anew at the oldest
            self.hand = 0
        self.queue.append(expert)

    def forget(self, expert: int) -> None:
        super().forget(expert)
        place = self.queue.index(expert)
        self.queue.remove(expert)
        self.hand -= place < self.hand

    def victim(self, incoming: int) -> int | None:
        if not self.resident - self.pinned:
            return None
        while True:
            self.hand %= len(self.queue)
            expert = self.queue[self.hand]
            if expert not in self.pinned:
                if expert not in self.marked:
                    return expert
                self.marked.remove(expert)
            self.hand += 1

    def rank(self, expert: int) -> tuple[Any, ...]:
        raise NotImplementedError("sieve ranks nobody")


class S3Fifo(Policy):
    """A small queue on trial, a main one, and the ghosts of who failed the trial.

    Newcomers join the small queue, ghosts the main one. The oldest of the small queue goes on to the main one
    when it was used twice more, else it leaves. The oldest of the main one joins it anew for each time it was
    used again, three at most, else it leaves. Until the first victim, newcomers overflow into the main queue.
    """

    def __init__(self, capacity: int, bank_of: list[int]) -> None:
        super().__init__(capacity, bank_of)
        self.small_room = max(1, capacity // 10)
        self.ghost_room = capacity * 9 // 10
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.returns: set[int] = set()  # was a ghost when its place was made
        self.used: set[int] = set()  # since it was loaded
        self.again = [0] * len(bank_of)  # uses after the first
        self.has_evicted = False

    def use(self, expert: int, token: int, tokens: int, count: int) -> None:
        super().use(expert, token, tokens, count)
        self.again[expert] = min(3, self.again[expert] + (expert in self.used))
        self.used.add(expert)

    def admit(self, expert: int) -> None:
        super().admit(expert)
        overflow = not self.has_evicted and len(self.small) >= self.small_room
        known = expert in self.returns or expert in self.ghosts
        (self.main if known or overflow else self.small).append(expert)
        self.recall(expert)
        self.returns.discard(expert)
        self.used.discard(expert)
        self.again[expert] = 0

    def recall(self, expert: int) -> None:
        if expert in self.ghosts:
            self.ghosts.remove(expert)
            self.returns.add(expert)

    def forget(self, expert: int) -> None:
        super().forget(expert)
        if expert in self.main:
            self.main.remove(expert)
            return
        self.small.remove(expert)
        if expert in self.used and self.ghost_room:
            self.ghosts = [*self.ghosts, expert][-self.ghost_room :]

    def victim(self, incoming: int) -> int | None:
        if not self.resident - self.pinned:
            return None
        self.has_evicted = True
        self.recall(incoming)
        main_gives = len(self.main) > self.capacity - self.small_room or not self.small
        turns = [self.of_main, self.of_small] if main_gives else [self.of_small, self.of_main]
        for turn in [*turns, self.of_main]:
            expert = turn()
            if expert is not None:
                return expert
        raise AssertionError("a candidate is in neither queue")

    def of_small(self) -> int | None:
        for expert in [e for e in self.small if e not in self.pinned]:
            if self.again[expert] < 2:
                return expert
            self.small.remove(expert)
            self.main.append(expert)
            self.again[expert] = 0
        return None

    def of_main(self) -> int | None:
        while True:
            expert = next((e for e in self.main if e not in self.pinned), None)
            if expert is None or self.again[expert] == 0:
                return expert
            self.again[expert] -= 1
            self.main.remove(expert)
            self.main.append(expert)

    def rank(self, expert: int) -> tuple[Any, ...]:
        raise NotImplementedError("s3fifo ranks nobody")


class Pinned(Lru):
    """The experts of highest priority never leave, LRU for the rest.

    Kept are as many as leave frames for the largest bank, so that any route fits, and none of priority 0.
    """

    def __init__(self, capacity: int, bank_of: list[int], priority: list[float]) -> None:
        super().__init__(capacity, bank_of)
        room = max(bank_of.count(bank) for bank in range(self.banks))
        hottest = sorted(range(len(bank_of)), key=lambda e: (-priority[e], e))
        self.elastic = False
        self.kept = {e for e in hottest[: max(0, capacity - room)] if priority[e] > 0}

    def victim(self, incoming: int) -> int | None:
        return self.lowest(self.resident - self.pinned - self.kept)


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


class DontNeed(LfuDecay):
    """Only the `hot` experts of each bank that were used most of late may stay after a use."""

    def __init__(self, capacity: int, bank_of: list[int], hot: int) -> None:
        super().__init__(capacity, bank_of, 64.0)
        self.hot = hot

    def keep(self, expert: int) -> bool:
        used = [e for e, b in enumerate(self.bank_of) if b == self.bank_of[expert] and self.last_use[e]]
        return expert in sorted(used, key=self.rank, reverse=True)[: self.hot]


def make_policy(text: str, capacity: int, bank_of: list[int], priority: list[float] | None = None) -> Policy:
    """By the core's text. `priority`: per expert of the part, for `pinned`."""
    name, _, argument = text.partition(":")
    if name == "lfu-decay":
        return LfuDecay(capacity, bank_of, float(argument or 16))
    if name == "lfu-adapt":
        from reference.adapt import LfuAdapt  # it builds on this module

        return LfuAdapt(capacity, bank_of)
    if name == "dontneed":
        return DontNeed(capacity, bank_of, int(argument or 0))
    if name == "pinned":
        assert priority is not None
        return Pinned(capacity, bank_of, priority)
    plain: dict[str, type[Policy]] = {
        "none": Fifo,
        "fifo": Fifo,
        "lfu": Lfu,
        "lru": Lru,
        "lru-layer": LruLayer,
        "s3fifo": S3Fifo,
        "sieve": Sieve,
    }
    return plain[name](capacity, bank_of)
