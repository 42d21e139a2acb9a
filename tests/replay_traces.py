"""Traces made by hand, for tests of replay: from lists of routes, and from the demo model's recorded ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from moestream.stats import Step
from moestream.trace import EVENTS, Trace, TraceBuilder
from record_routes import RECORDED

#: (bank, rows of ids, wishes): one route of a step.
Route = tuple[int, list[list[int]], list[int]]


def events(routes: list[Route], token: int) -> dict[str, Any]:
    """What the engine would have recorded of one step."""
    arrays: dict[str, Any] = {name: np.empty(0, np.int64) for name in EVENTS}
    arrays["bank"] = np.array([bank for bank, _, _ in routes])
    arrays["rows"] = arrays["tokens"] = np.array([len(rows) for _, rows, _ in routes])
    arrays["k"] = np.array([len(rows[0]) if rows else 0 for _, rows, _ in routes])
    arrays["token"] = np.full(len(routes), token)
    arrays["wishes"] = np.array([len(wishes) for _, _, wishes in routes])
    arrays["ids"] = np.array([e for _, rows, _ in routes for row in rows for e in row], np.int32)
    arrays["wish_ids"] = np.array([e for _, _, wishes in routes for e in wishes], np.int32)
    return arrays


def meta(
    experts: list[int],
    used: int,
    parts: list[tuple[list[int], int]],
    capacities: list[int],
    mechanism: str = "arena+uring:8+lru+none+anon",
    identity: str = "0123456789abcdef",
) -> dict[str, Any]:
    """``experts``: of each bank; ``parts``: (banks, frame bytes) each."""
    return {
        "mechanism": mechanism,
        "model": {
            "identity": identity,
            "arch": "test",
            "name": "test",
            "layers": list(range(len(experts))),
            "experts": experts,
            "used": [used] * len(experts),
            "parts": [{"banks": banks, "frame_bytes": frame} for banks, frame in parts],
            "capacities": capacities,
        },
    }


def feed(
    sink: Any, about: dict[str, Any], steps: list[list[Route]], prompts: int = 1, **recorded: Any
) -> None:
    """Give a sink these steps, the first ``prompts`` of which read the prompt. ``recorded``: hits, misses by step."""
    sink.begin(about)
    token = 0
    for number, routes in enumerate(steps):
        tokens = max(len(rows) for _, rows, _ in routes)
        known = {name: int(values[number]) for name, values in recorded.items()}
        step = Step(**{**dict.fromkeys((field.name for field in fields(Step)), 0), "tokens": tokens, **known})
        sink.step(number, "prefill" if number < prompts else "decode", step, events(routes, token))
        token += tokens
    sink.close()


class Kept:
    """A sink that keeps the trace in memory."""

    def begin(self, meta: dict[str, Any]) -> None:
        self.builder = TraceBuilder(meta)

    def step(self, index: int, phase: str, step: Step, events: Mapping[str, Any]) -> None:
        self.builder.add(index, phase, asdict(step), events)

    def close(self, events: Mapping[str, Any] | None = None) -> None:
        pass

    def discard(self) -> None:
        pass


def build(about: dict[str, Any], steps: list[list[Route]], prompts: int = 1) -> Trace:
    """A trace in memory of these steps."""
    sink = Kept()
    feed(sink, about, steps, prompts)
    return sink.builder.build()


def demo_steps(
    capacity: int = 480, policy: str = "lru", parts: int = 1, wishes: bool = False
) -> tuple[dict[str, Any], list[list[Route]]]:
    """The demo model's recorded routes; the layers dealt out to parts in turn, a part's frames half the one before's.

    With ``wishes`` each route asks for the next layer's first two experts of the token before.
    """
    with np.load(RECORDED) as recorded:
        chosen, prompt, experts = recorded["chosen"], int(recorded["prompt"]), int(recorded["experts"])
    tokens, layers, used = chosen.shape
    steps: list[list[Route]] = []
    for start, end in itertools.pairwise([0, *range(prompt, tokens + 1)]):
        routes: list[Route] = []
        for layer in range(layers):
            after = (layer + 1) % layers
            guess = [after * experts + int(e) for e in chosen[max(0, start - 1), after, :2]] if wishes else []
            routes.append((layer, chosen[start:end, layer].astype(int).tolist(), guess))
        steps.append(routes)
    shapes = [([b for b in range(layers) if b % parts == p], (1 << 20) >> p) for p in range(parts)]
    about = meta(
        [experts] * layers, used, shapes, [capacity // parts] * parts, f"arena+uring:8+{policy}+none+anon"
    )
    return about, steps


def demo_trace(*words: Any, **options: Any) -> Trace:
    """``demo_steps`` as a trace in memory."""
    return build(*demo_steps(*words, **options))


def small_trace(layers: int = 3, tokens: int = 48) -> Trace:
    """One token a step; a layer has 8 experts, of which each token uses two that follow from the token before."""
    steps: list[list[Route]] = [
        [
            (
                layer,
                [[(token + layer) % 8, (3 * token + 5) % 8 if token % 8 else (token + layer + 1) % 8]],
                [],
            )
            for layer in range(layers)
        ]
        for token in range(tokens)
    ]
    return build(meta([8] * layers, 2, [(list(range(layers)), 1 << 20)], [12]), steps)
