"""One measurement of compute, in a process of its own: ``python -m moestream.probe.worker MODEL --threads N``.

The model is loaded with all its experts resident, so that no token waits for a byte. Prints a JSON object a line, each
with what the one before it had: a reader that cannot wait longer takes the last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moestream.engine import Llama
from moestream.errors import MoestreamError

CTX = 512
#: Most tokens of the prompt that is timed.
PROMPT = 128
SHORT_PROMPT = 16
PROMPTS = 3
#: Decoding that is not timed: the first tokens find caches and frequencies as they were.
WARM_UP = 3


def prompt_tokens(count: int, n_vocab: int) -> list[int]:
    """The same tokens each time, spread over the vocabulary, so that experts are chosen widely."""
    return [(7919 * i + 13) % n_vocab for i in range(count)]


def measure(path: Path, threads: int, tokens: int, seconds: float) -> Iterator[dict[str, Any]]:
    """``decode_s``: seconds of each decoded token, about ``seconds`` of them at most; then also ``prefill``: tokens and
    seconds of each prompt."""
    start = time.perf_counter()
    settings: dict[str, Any] = {
        "n_ctx": CTX,
        "n_batch": PROMPT,
        "n_threads": threads,
        "n_threads_batch": threads,
    }
    with Llama(path, mechanism="resident", strict=True, **settings) as llama:
        found: dict[str, Any] = {"threads": threads, "load_s": time.perf_counter() - start, "prefill": []}
        words = prompt_tokens(CTX, llama.n_vocab())
        llama.eval(words[:4])
        found["decode_s"] = _decode(llama, words, tokens, seconds)
        yield found
        # The first prompt is short: it says how long one may be to end in time.
        count = SHORT_PROMPT
        for _ in range(PROMPTS):
            llama.reset()
            begun = time.perf_counter()
            llama.eval(words[:count])
            took = time.perf_counter() - begun
            found["prefill"].append((count, took))
            yield found
            count = max(SHORT_PROMPT, min(PROMPT, int(SHORT_PROMPT / found["prefill"][0][1] * seconds)))


def _decode(llama: Llama, words: list[int], tokens: int, seconds: float) -> list[float]:
    decode: list[float] = []
    for number in range(WARM_UP + tokens):
        begun = time.perf_counter()
        llama.eval([words[number + 4]])
        if number >= WARM_UP:
            decode.append(time.perf_counter() - begun)
        if sum(decode) >= seconds:
            break
    return decode


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast a model computes once it is in memory.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=4.0, help="about as long for each phase")
    options = parser.parse_args()
    try:
        for found in measure(options.model, options.threads, options.tokens, options.seconds):
            print(json.dumps(found), flush=True)
    except MoestreamError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
