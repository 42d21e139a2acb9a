"""How much of the way from LRU to Belady each policy goes, on recorded routes.

``python tests/record_routes.py DIR && python tools/policy_gap.py DIR``. A row is a recording (``FAMILY-NUMBER.npz``)
and a budget; a figure is the share of LRU's avoidable misses that the policy avoids, in percent: 0 is LRU, 100 is
Belady, which knows what comes, below 0 is worse than LRU. The budget is a share of all experts. Every use counts, the
prompt's too, from an empty cache. Then the means over the prompts of a family, over the *held-out* ones (those of an
odd number, on which no constant was chosen) and over all; and in how many rows a policy misses more often than LRU.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np

from moestream import _core

POLICIES = ["lru-layer", "lfu-decay:16", "sieve", "s3fifo", "lfu-adapt"]
BUDGETS = [15, 25, 40]


class Recorded:
    """One file of ``tests/record_routes.py`` as ``_core.replay`` takes it: the prompt at once, then each token."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            chosen, prompt, self.per_layer = file["chosen"], int(file["prompt"]), int(file["experts"])
        tokens, self.layers, _ = chosen.shape
        bounds = np.array([0, *range(prompt, tokens + 1)])
        routes = [
            np.unique(chosen[a:b, layer], return_counts=True)
            for a, b in itertools.pairwise(bounds)
            for layer in range(self.layers)
        ]
        layer_of = np.tile(np.arange(self.layers, dtype=np.uint32), len(bounds) - 1)
        sizes = [len(experts) for experts, _ in routes]
        self.arrays = {
            "bank": layer_of,
            "token": np.repeat(bounds[:-1], self.layers).astype(np.uint64),
            "tokens": np.repeat(np.diff(bounds), self.layers).astype(np.uint32),
            "start": np.cumsum([0, *sizes]).astype(np.uint64),
            "experts": np.concatenate([e for e, _ in routes]).astype(np.uint32)
            + np.repeat(layer_of * self.per_layer, sizes).astype(np.uint32),
            "counts": np.concatenate([n for _, n in routes]).astype(np.uint32),
        }

    def misses(self, policy: str, budget: float) -> int:
        """Misses with ``budget`` percent of all experts in memory."""
        experts = self.layers * self.per_layer
        empty = {"wish_start": np.empty(0, np.uint64), "wishes": np.empty(0, np.uint32)}
        done = _core.replay(
            **self.arrays,
            **empty,
            parts=[(list(range(experts)), int(experts * budget / 100))],
            part_bytes=[1],
            bank_of=[expert // self.per_layer for expert in range(experts)],
            policy=policy,
            priority=[],
            counted_from=0,
        )
        return int(done["counters"]["misses"])


def groups_of(name: str) -> list[str]:
    """What a recording counts for: its family, and all, and the held-out ones."""
    family, _, number = name.partition("-")
    return [family, *(["held out"] if int(number) % 2 else []), "all"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where tests/record_routes.py wrote its files")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="POLICY")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="PERCENT")
    args = parser.parse_args()
    paths = sorted(args.directory.glob("*.npz"))
    if not paths:
        parser.error(f"{args.directory} holds no recordings: python tests/record_routes.py {args.directory}")

    print(f"| prompt | budget | LRU | Belady | {' | '.join(args.policies)} |")
    print("|---|---" + "|---" * (2 + len(args.policies)) + "|")
    shares: dict[tuple[str, float], list[list[float]]] = {}
    behind = dict.fromkeys(args.policies, 0)
    for path in paths:
        recorded = Recorded(path)
        used = len(recorded.arrays["experts"])
        for budget in args.budgets:
            lru, belady = (recorded.misses(policy, budget) for policy in ("lru", "belady"))
            misses = [recorded.misses(policy, budget) for policy in args.policies]
            row = [100 * (lru - count) / max(1, lru - belady) for count in misses]
            for policy, count in zip(args.policies, misses, strict=True):
                behind[policy] += count > lru
            for group in groups_of(path.stem):
                shares.setdefault((group, budget), []).append(row)
            rates = f"{1 - lru / used:.3f} | {1 - belady / used:.3f}"
            print(f"| {path.stem} | {budget:g} % | {rates} | {' | '.join(f'{share:.0f}' for share in row)} |")
    for (family, budget), rows in shares.items():
        mean = np.mean(rows, axis=0)
        print(
            f"| **{family}** ({len(rows)}) | {budget:g} % | | | {' | '.join(f'{share:.0f}' for share in mean)} |"
        )
    rows = len(paths) * len(args.budgets)
    print(", ".join(f"{policy} behind LRU in {count} of {rows} rows" for policy, count in behind.items()))


if __name__ == "__main__":
    main()
