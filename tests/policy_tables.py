"""Writes ``golden/policy_tables.json``: hits, misses and bytes of each policy at eight budgets on the recorded routes.

The plain-Python reference works them out, so the file says what the core must do, not what it does. Run
``python tests/policy_tables.py`` after a change of the recording or of a policy's specification.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from record_routes import RECORDED
from reference.belady import belady_misses
from reference.cache import ReferenceCache

TABLES = Path(__file__).parent / "golden" / "policy_tables.json"

with np.load(RECORDED) as recorded:
    CHOSEN = recorded["chosen"]  # (tokens, layers, used)
    PROMPT = int(recorded["prompt"])
    EXPERTS = int(recorded["experts"])
TOKENS, LAYERS, USED = CHOSEN.shape
BANK_OF = [expert // EXPERTS for expert in range(LAYERS * EXPERTS)]
#: What ``pinned`` is seeded with: how often the prompt and the first half of the answer used each expert.
PRIORITY = [0.0] * len(BANK_OF)
for layer, expert in itertools.product(range(LAYERS), range(EXPERTS)):
    half = CHOSEN[: (PROMPT + TOKENS) // 2, layer]
    PRIORITY[layer * EXPERTS + expert] = float((half == expert).sum())

#: Movable bytes of one of the demo model's experts: what a miss reads.
FRAME_BYTES = 1_646_592
#: Frames: from two a layer to nearly all 1920 experts.
BUDGETS = [64, 192, 288, 480, 768, 960, 1440, 1900]
POLICIES = [
    "none",
    "fifo",
    "lru",
    "lru-layer",
    "lfu",
    "lfu-decay:4",
    "lfu-decay:16",
    "lfu-decay:64",
    "lfu-adapt",
    "sieve",
    "s3fifo",
    "pinned:FILE",
    "dontneed:4",
]


def steps() -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """(token, tokens, route): the prompt at once, then each token; every layer in turn."""
    bounds = [0, *range(PROMPT, TOKENS + 1)]
    for start, end in itertools.pairwise(bounds):
        for layer in range(LAYERS):
            experts, counts = np.unique(CHOSEN[start:end, layer], return_counts=True)
            route = [(layer * EXPERTS + int(e), int(n)) for e, n in zip(experts, counts, strict=True)]
            yield start, end - start, route


def parts_of(budget: int, parts: int = 1) -> list[tuple[list[int], int]]:
    """The layers dealt out to parts in turn, the frames in equal shares."""
    return [
        ([e for e, bank in enumerate(BANK_OF) if bank % parts == part], budget // parts)
        for part in range(parts)
    ]


def count(make: Any, policy: str, budget: int) -> list[int]:
    """Hits, misses and bytes read; a route wider than the budget is neither."""
    cache = make(parts_of(budget), BANK_OF, policy, PRIORITY)
    for token, tokens, route in steps():
        cache.route(route, token, tokens)
    counters = cache.counters()
    return row(int(counters["hits"]), int(counters["misses"]))


def row(hits: int, misses: int) -> list[int]:
    return [hits, misses, misses * FRAME_BYTES]


def belady(budget: int) -> list[int]:
    routes = [[expert for expert, _ in route] for _, _, route in steps() if len(route) <= budget]
    misses = belady_misses(routes, budget)
    return row(sum(map(len, routes)) - misses, misses)


def main() -> None:
    table = {policy: [count(ReferenceCache, policy, budget) for budget in BUDGETS] for policy in POLICIES}
    table["belady"] = [belady(budget) for budget in BUDGETS]
    rows = [f"    {json.dumps(policy)}: {json.dumps(row)}" for policy, row in table.items()]
    budgets = f'  "budgets": {json.dumps(BUDGETS)},\n  "hits_misses_bytes": {{\n'
    TABLES.write_text("{\n" + budgets + ",\n".join(rows) + "\n  }\n}\n")
    print(f"{TABLES}: {len(rows)} policies at {len(BUDGETS)} budgets")


if __name__ == "__main__":
    main()
