"""What `lfu-adapt` decides, in plain Python: the specification of core/src/policies/lfu_adapt.cpp and moments.h.

What is expected of an expert is worked out when its bank's route is complete, and holds until the bank's next:
the mean of its decayed frequency and of how often it was used after moments like this one. A *moment* is a
pass of one token; how alike two are is the decayed share of a route's experts that were used there too.
"""

from __future__ import annotations

import math
from typing import Any

from reference.policies import Policy, exp2

HALF_LIVES = (4.0, 16.0, 64.0, 256.0)  # tokens
FREQUENCY_SHARE = 0.4
MOST_EXPECTED = 0.98
FORGOTTEN = 1e-30

MOMENTS = 256  # remembered
AHEAD = 4  # passes after a moment that count as what followed it
AHEAD_DECAY = 0.6
ROUTE_DECAY = 0.7
SHARPNESS = 20.0  # bits
AGE_HALF_LIFE = 64.0  # passes


class Moments:
    """The experts of each bank that each single-token pass used, and how like the present each pass is."""

    def __init__(self) -> None:
        self.used: list[dict[int, set[int]]] = []  # pass -> bank -> experts
        self.alike: list[float] = []

    def begin(self) -> None:
        self.used.append({})
        self.alike.append(0.0)

    def add(self, bank: int, expert: int) -> None:
        self.used[-1].setdefault(bank, set()).add(expert)

    def expect(self, bank: int) -> dict[int, float]:
        """How often each expert of the bank (absent: never) was used after moments like this one, 0 to 1."""
        now = len(self.used) - 1
        first = max(0, now + 1 - MOMENTS)
        route = self.used[now][bank]
        weight = [0.0] * (now + AHEAD)  # of each moment; none before the first
        for moment in range(first, now):
            common = len(route & self.used[moment].get(bank, set())) / len(route)
            self.alike[moment] = self.alike[moment] * ROUTE_DECAY + common * (1.0 - ROUTE_DECAY)
            weight[moment] = exp2(-((now - moment) / AGE_HALF_LIFE)) * exp2(self.alike[moment] * SHARPNESS)
        total, expected = 0.0, dict[int, float]()
        for moment in range(first, now + 1):
            after, share = 0.0, 1.0
            for before in range(moment - 1, moment - 1 - AHEAD, -1):
                after += (weight[before] if before >= 0 else 0.0) * share
                share *= AHEAD_DECAY
            total += after
            for expert in self.used[moment].get(bank, set()):
                expected[expert] = expected.get(expert, 0.0) + after
        return {expert: value / total for expert, value in expected.items()} if total > 0.0 else {}


class LfuAdapt(Policy):
    """The least expected leaves; banks that the pass has yet to reach count as a pass nearer."""

    def __init__(self, capacity: int, bank_of: list[int]) -> None:
        super().__init__(capacity, bank_of)
        self.moments = Moments()
        self.frequency = [[0.0] * len(HALF_LIVES) for _ in bank_of]
        self.count = [0] * len(bank_of)  # uses in the open route
        self.expected = [0.0] * len(bank_of)
        self.decayed_to = [0] * self.banks  # token
        self.passed: set[int] = set()  # banks that this pass has reached
        self.pass_of: tuple[int, int] | None = None  # (token, tokens)
        self.open: int | None = None

    def use(self, expert: int, token: int, tokens: int, count: int) -> None:
        super().use(expert, token, tokens, count)
        bank = self.bank_of[expert]
        if self.open != bank or self.pass_of != (token, tokens):
            self.close()
            if self.pass_of != (token, tokens) or bank in self.passed:
                self.pass_of = (token, tokens)
                self.passed = set()
                if tokens == 1:
                    self.moments.begin()
            self.open = bank
            self.passed.add(bank)
        self.count[expert] += count
        if tokens == 1:
            self.moments.add(bank, expert)

    def pin(self, expert: int, pinned: bool) -> None:
        if not pinned and self.bank_of[expert] == self.open:
            self.close()
        super().pin(expert, pinned)

    def close(self) -> None:
        """The open route is complete: what is expected of its bank's experts from now on."""
        if self.open is None or self.pass_of is None:
            return
        token, tokens = self.pass_of
        after = self.moments.expect(self.open) if tokens == 1 else {}
        now = max(self.decayed_to[self.open], token + tokens - 1)
        since = now - self.decayed_to[self.open]
        self.decayed_to[self.open] = now
        for expert in [e for e, bank in enumerate(self.bank_of) if bank == self.open]:
            frequent = self.rate(expert, since, tokens)
            self.count[expert] = 0
            alike = after.get(expert, 0.0) if after else frequent
            both = frequent * FREQUENCY_SHARE + alike * (1.0 - FREQUENCY_SHARE)
            self.expected[expert] = min(both, MOST_EXPECTED)
        self.open = None

    def rate(self, expert: int, since: int, tokens: int) -> float:
        """Uses a token, averaged over the half-lives; `since`: tokens since the bank's last route."""
        rate = 0.0
        for i, half_life in enumerate(HALF_LIVES):
            added = 1.0
            if tokens > 1:  # the mean decay, by the step's end, of uses spread evenly over its tokens
                added = half_life / (tokens * math.log(2)) * (1.0 - exp2(-(tokens / half_life)))
            value = self.frequency[expert][i] * exp2(-(since / half_life)) + self.count[expert] * added
            self.frequency[expert][i] = value if value >= FORGOTTEN else 0.0
            rate += self.frequency[expert][i] * ((1.0 - exp2(-(1.0 / half_life))) / len(HALF_LIVES))
        return rate

    def victim(self, incoming: int) -> int | None:
        passed = self.passed | {self.bank_of[incoming]}

        def worth(expert: int) -> tuple[Any, ...]:
            p = self.expected[expert]
            near = self.bank_of[expert] not in passed
            return (p / (1.0 - p) if near else p, self.last_use[expert], expert)

        # Of a bank the first in its own order, then of those the first.
        heads = {self.bank_of[e]: e for e in sorted(self.resident - self.pinned, key=self.rank, reverse=True)}
        return min(heads.values(), key=worth, default=None)

    def rank(self, expert: int) -> tuple[Any, ...]:
        return (self.expected[expert], self.last_use[expert], expert)
