"""What the cache decides, in plain Python: the specification of core/src/cache.cpp.

It knows which experts are present and who leaves for whom. It knows no bytes and does no I/O. A *move* is
(expert, victim): load `expert` into the frame of `victim`, or into a free frame when that is None.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.policies import make_policy

Move = tuple[int, "int | None"]


class Part:
    """Experts of equal size that share `capacity` frames; the policy has its own numbers for them."""

    def __init__(
        self,
        experts: list[int],
        capacity: int,
        bank_of: list[int],
        policy: str,
        priority: Sequence[float],
    ) -> None:
        self.experts = experts
        self.capacity = self.planned = capacity
        self.number = {expert: i for i, expert in enumerate(experts)}
        banks = sorted({bank_of[e] for e in experts})
        seed = [priority[e] for e in experts] if priority else None
        self.policy = make_policy(policy, capacity, [banks.index(bank_of[e]) for e in experts], seed)

    def full(self) -> bool:
        return len(self.policy.resident) == self.capacity

    def pin(self, expert: int, pinned: bool) -> None:
        self.policy.pin(self.number[expert], pinned)

    def victim(self, incoming: int) -> int | None:
        local = self.policy.victim(self.number[incoming])
        return None if local is None else self.experts[local]


class ReferenceCache:
    """`parts`: (experts, capacity) each; `bank_of[e]`: expert e's bank. Experts in no part always hit."""

    def __init__(
        self,
        parts: Sequence[tuple[list[int], int]],
        bank_of: list[int],
        policy: str,
        priority: Sequence[float] = (),
    ) -> None:
        self.bank_of = bank_of
        self.part_of: dict[int, Part] = {}
        self.parts: list[Part] = []
        for experts, capacity in parts:
            part = Part(experts, capacity, bank_of, policy, priority)
            self.parts.append(part)
            self.part_of.update(dict.fromkeys(experts, part))
        self.state = ["absent"] * len(bank_of)
        self.routed: list[int] = []  # the pinned route
        self.early: list[int] = []  # protected speculative experts in the order issued
        names = "hits misses evictions speculative_issued speculative_used speculative_wasted"
        self.count = dict.fromkeys(names.split(), 0)

    def route(self, experts: Sequence[tuple[int, int]], token: int, tokens: int) -> list[Move] | None:
        """One bank's (expert, count). The moves; or None, changing nothing: wider than its part."""
        cached = [(e, count) for e, count in experts if e in self.part_of]
        if cached and len(cached) > self.part_of[cached[0][0]].capacity:
            return None
        self.unpin_route()
        self.count["hits"] += len(experts) - len(cached)
        missing = [(e, count) for e, count in cached if self.state[e] == "absent"]
        for expert, count in cached:
            if self.state[expert] != "absent":
                self.count["hits"] += 1
                self._use(expert, count, token, tokens)
        moves: list[Move] = []
        for expert, count in missing:
            self.count["misses"] += 1
            moves.append((expert, self._make_room_for_demand(expert)))
            self._enter(expert, "resident")
            self._use(expert, count, token, tokens)
        return moves

    def speculate(self, expert: int) -> Move | None:
        """Load an absent expert early, at the cost of nobody who is pinned or protected."""
        if expert not in self.part_of or self.state[expert] != "absent":
            return None
        part, victim = self.part_of[expert], None
        if part.full():
            victim = part.victim(expert)
            if victim is None:
                return None
            self._evict(victim)
        self._enter(expert, "speculative")
        self.early.append(expert)
        self.count["speculative_issued"] += 1
        return (expert, victim)

    def release_speculative(self, bank: int) -> None:
        for expert in [e for e in self.early if self.bank_of[e] == bank]:
            self._unprotect(expert)

    def cancel(self, expert: int) -> None:
        """Take back an early load that was never started: it was not issued, its frame is free."""
        assert self.state[expert] == "speculative"
        if expert in self.early:
            self._unprotect(expert)
        self._leave(expert)
        self.count["speculative_issued"] -= 1

    def unpin_route(self) -> None:
        for expert in self.routed:
            self.part_of[expert].pin(expert, False)
        self.routed.clear()

    def drop(self, expert: int) -> None:
        """A resident expert that is not pinned leaves after its use: no eviction, its frame is free."""
        assert self.state[expert] == "resident"
        assert expert not in self.routed
        self._leave(expert)

    def set_capacity(self, part: int, capacity: int) -> tuple[int, list[int]]:
        """Fewer experts in a part, or again more, at most what it was made for: (the capacity reached, who left)."""
        self.unpin_route()
        chosen, left = self.parts[part], []
        if not chosen.policy.elastic:
            return chosen.capacity, left
        capacity = min(max(capacity, 1), chosen.planned)
        while len(chosen.policy.resident) > capacity:
            local = chosen.policy.victim(0)
            if local is None:
                break
            left.append(chosen.experts[local])
            self._evict(left[-1])
        chosen.capacity = max(capacity, len(chosen.policy.resident))
        return chosen.capacity, left

    def keep(self, expert: int) -> bool:
        part = self.part_of.get(expert)
        return part is None or part.policy.keep(part.number[expert])

    def residency(self, expert: int) -> str:
        return self.state[expert]

    def counters(self) -> dict[str, int]:
        return dict(self.count)

    def _use(self, expert: int, count: int, token: int, tokens: int) -> None:
        part = self.part_of[expert]
        if self.state[expert] == "speculative":
            self.count["speculative_used"] += 1
            self.state[expert] = "resident"
            if expert in self.early:
                self.early.remove(expert)
        part.pin(expert, True)
        part.policy.use(part.number[expert], token, tokens, count)
        self.routed.append(expert)

    def _make_room_for_demand(self, expert: int) -> int | None:
        part = self.part_of[expert]
        if not part.full():
            return None
        victim = part.victim(expert)
        if victim is None:  # demand outranks a guess: the early load issued first goes
            victim = next(e for e in self.early if self.part_of[e] is part)
            self._unprotect(victim)
        self._evict(victim)
        return victim

    def _unprotect(self, expert: int) -> None:
        self.early.remove(expert)
        self.part_of[expert].pin(expert, False)

    def _enter(self, expert: int, state: str) -> None:
        part = self.part_of[expert]
        part.policy.admit(part.number[expert])
        part.pin(expert, True)
        self.state[expert] = state

    def _evict(self, expert: int) -> None:
        self.count["evictions"] += 1
        self.count["speculative_wasted"] += self.state[expert] == "speculative"
        self._leave(expert)

    def _leave(self, expert: int) -> None:
        part = self.part_of[expert]
        part.policy.forget(part.number[expert])
        self.state[expert] = "absent"
