"""What every arm's process has in common: its command line, and greedy decoding that is accounted for."""

from __future__ import annotations

import argparse
import ctypes
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moestream.report import Generated

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process with the thread that started it: a benchmark that is killed leaves no run that
    would disturb the next one. Where there is no prctl it goes on."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def arguments(description: str) -> argparse.ArgumentParser:
    """The options every arm takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="a GGUF file, the first shard of a split model")
    parser.add_argument("-p", "--prompt", required=True, help="taken as it is, special tokens included")
    parser.add_argument("-n", "--tokens", type=int, required=True, help="so many are generated")
    parser.add_argument(
        "--seconds", type=float, help="decoding ends after so long, its tokens all made or not"
    )
    parser.add_argument("--fewest", type=int, default=0, help="tokens that are made however long they take")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=512, help="most tokens of the prompt in one step")
    parser.add_argument("--json", type=Path, required=True, help="where the document goes")
    return parser


def generate(
    llama: Any, options: argparse.Namespace, end: Callable[[str], None] = lambda phase: None
) -> Generated:
    """``options.tokens`` greedy tokens (an end of text does not end it, so that arms do equal work), or where decoding
    takes longer than ``options.seconds`` as many as that allows, never less than ``options.fewest``.

    The first comes from the prompt's own step; each of the others takes a step of decoding. ``end`` is told when
    ``prefill`` and ``decode`` are over.
    """
    tokens = llama.tokenize(options.prompt.encode(), add_bos=True, special=True)
    done = Generated(prompt_tokens=len(tokens))
    phase, begun, deadline = "prefill", time.process_time(), math.inf
    for token in llama.generate(tokens, temp=0.0, repeat_penalty=1.0):
        if phase == "prefill":
            now = time.process_time()
            done.cpu_s["prefill"], phase, begun = now - begun, "decode", now
            end("prefill")
            if options.seconds is not None:
                deadline = time.monotonic() + options.seconds
        done.tokens.append(int(token))
        if len(done.tokens) == options.tokens:
            break
        if len(done.tokens) >= options.fewest and time.monotonic() >= deadline:
            done.ended = "time"
            break
    done.cpu_s[phase] = time.process_time() - begun
    end(phase)
    done.text = llama.detokenize(done.tokens)
    return done
