"""A greedy run as a value that can be compared bit for bit, and the program of a process that makes one.

Run as a program it takes a question as JSON (see ``children.child_command``) and prints what happened.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

CONTEXT = 384


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and a digest of all logits of each step."""

    tokens: tuple[int, ...]
    digests: tuple[str, ...]


def prompt_tokens(length: int, vocab: int, seed: int = 0) -> list[int]:
    """A prompt of any tokens; models with random weights do not mind which."""
    return [int(t) for t in np.random.RandomState(seed).randint(1, min(vocab, 256), length)]


def last_logits(llama: Any) -> np.ndarray:
    from moestream.binding import low

    row = low.llama_get_logits_ith(llama._ctx.ctx, -1)
    return np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (llama.n_vocab(),)).copy()


def answer(llama: Any, tokens: list[int], steps: int) -> Answer:
    """What a model (stock's or ours) makes of a prompt, from an empty context."""
    llama.reset()
    llama._ctx.kv_cache_clear()
    chosen: list[int] = []
    digests: list[str] = []
    feed = tokens
    for _ in range(steps + 1):
        llama.eval(feed)
        logits = last_logits(llama)
        digests.append(hashlib.sha256(logits.tobytes()).hexdigest()[:16])
        feed = [int(logits.argmax())]
        chosen += feed
    return Answer(tuple(chosen), tuple(digests))


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Load a model, answer, say what happened. Imports nothing the command line would not: it is measured."""
    exec(question["first"], {})
    import moestream
    from moestream.box import process_memory

    peak = 0
    try:
        from moestream.binding import libllama_path

        with moestream.Llama(
            question["path"],
            ram=question["ram"],
            mechanism=question["mechanism"],
            strict=question["strict"],
            i_know=question["i_know"],
            governor=question["governor"],
            n_ctx=CONTEXT,
            n_batch=64,
            n_threads=2,
            n_threads_batch=2,
        ) as llama:
            decode = llama._ctx.decode

            def step(batch: Any) -> None:
                nonlocal peak
                decode(batch)
                peak = max(peak, process_memory().anon_bytes)

            llama._ctx.decode = step
            print("loaded", file=sys.stderr, flush=True)
            got = answer(llama, prompt_tokens(question["length"], llama.n_vocab()), question["steps"])
            return {
                "digests": got.digests,
                "libllama": libllama_path(),
                "fallbacks": llama.fallbacks,
                "mechanism": str(llama.mechanism),
                "n_batch": llama.n_batch,
                "peak_anon_bytes": peak,
                "locked_bytes": process_memory().locked_bytes,
                "counters": llama._engine.counters,
                "engagement": llama._engine.engagement,
                "governor": [vars(change) for change in llama.governor.changes] if llama.governor else None,
                "capacities": llama.plan.capacities if llama.plan is not None else None,
            }
    except moestream.MoestreamError as error:
        smallest = getattr(error, "smallest_bytes", None)
        return {"error": type(error).__name__, "text": str(error), "smallest_bytes": smallest}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
