"""What every arm's process has in common: its command line, and greedy decoding that is accounted for."""

from __future__ import annotations

import argparse
import ctypes
import signal
import time
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
    parser.add_argument("-n", "--tokens", type=int, required=True, help="exactly this many are generated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=512, help="most tokens of the prompt in one step")
    parser.add_argument("--json", type=Path, required=True, help="where the document goes")
    return parser


def generate(llama: Any, prompt: str, n_tokens: int) -> Generated:
    """Exactly ``n_tokens`` greedy tokens (an end of text does not end it, so that arms do equal work).

    The first comes from the prompt's own step; the other ``n_tokens - 1`` each take a step of decoding.
    """
    tokens = llama.tokenize(prompt.encode(), add_bos=True, special=True)
    done = Generated(prompt_tokens=len(tokens))
    phase, begun = "prefill", time.process_time()
    for token in llama.generate(tokens, temp=0.0, repeat_penalty=1.0):
        if phase == "prefill":
            now = time.process_time()
            done.cpu_s["prefill"], phase, begun = now - begun, "decode", now
        done.tokens.append(int(token))
        if len(done.tokens) == n_tokens:
            break
    done.cpu_s[phase] = time.process_time() - begun
    done.text = llama.detokenize(done.tokens)
    return done
