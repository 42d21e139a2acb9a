"""What the tests of the engine share: small models made once, caps that force evictions, and stock's answers.

An *answer* is every logit of a greedy run, bit for bit: of the prompt's last token and of each token after it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moestream
from moestream.box import process_memory
from moestream.errors import BudgetError
from moestream.make import make_model
from moestream.plan import HUGE_PAGE

#: Many experts of few pages: a budget of one huge page holds nine of the 128, so nearly every route evicts.
SHAPE = "tiny,experts=32"
CONTEXT = 384


def quant_of(arch: str) -> str:
    return "MXFP4" if arch == "gpt-oss" else "Q4_K"


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A small model of an architecture, made once a session."""
    directory = tmp_path_factory.mktemp("models")
    made: dict[tuple[str, str], Path] = {}

    def get(arch: str, shape: str = SHAPE) -> Path:
        if (arch, shape) not in made:
            out = directory / f"{arch}-{len(made)}.gguf"
            made[arch, shape] = make_model(arch, shape, quant_of(arch), out)
        return made[arch, shape]

    return get


@pytest.fixture(scope="session")
def stock() -> Iterator[Callable[..., Answer]]:
    """The answer of a plain ``llama_cpp.Llama`` without repacking, computed once for each question.

    The last model stays open: questions about one model come together.
    """
    from moestream.binding import llama_cpp, wrapped_defaults

    answers: dict[Any, Answer] = {}
    opened: dict[Any, Any] = {}

    def plain(params: Any) -> None:
        params.use_extra_bufts = False

    def ask(path: Path, tokens: list[int], steps: int, threads: int, n_batch: int, n_ubatch: int) -> Answer:
        which = (path, threads, n_batch, n_ubatch)
        question = (*which, tuple(tokens), steps)
        if question not in answers:
            if which not in opened:
                for llama in opened.values():
                    llama.close()
                opened.clear()
                with wrapped_defaults(model=plain):
                    opened[which] = llama_cpp.Llama(
                        str(path), n_ctx=CONTEXT, n_batch=n_batch, n_ubatch=n_ubatch, n_threads=threads,
                        n_threads_batch=threads, verbose=False,
                    )  # fmt: skip
            answers[question] = answer(opened[which], tokens, steps)
        return answers[question]

    yield ask
    for llama in opened.values():
        llama.close()


def smallest_cap(path: Path, mechanism: str, **arguments: Any) -> int:
    """The least ``ram`` a plan accepts."""
    with pytest.raises(BudgetError) as refused:
        moestream.Llama(path, ram=1, mechanism=mechanism, **arguments)
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


def load(path: Path, mechanism: str, experts: int = 0, threads: int = 2, **arguments: Any) -> moestream.Llama:
    """Our ``Llama`` with at most ``experts`` bytes of experts (in an arena; 0: the fewest that work).

    A test process is larger than the one a plan reckons with, and grows: a first load tells by how much, and the
    cap that leaves what was asked for is found from there.
    """
    settings = {"n_ctx": CONTEXT, "n_batch": 64, "n_threads": threads, "n_threads_batch": threads, **arguments}
    ram = smallest_cap(path, mechanism, n_ctx=settings["n_ctx"], n_batch=settings["n_batch"]) + experts
    if not mechanism.startswith("arena"):
        return moestream.Llama(path, ram=ram, mechanism=mechanism, **settings)
    ram += process_memory().anon_bytes
    wanted = max(experts, HUGE_PAGE)
    for _ in range(6):
        try:
            llama = moestream.Llama(path, ram=ram, mechanism=mechanism, **settings)
        except BudgetError as error:
            assert error.smallest_bytes is not None
            ram = error.smallest_bytes + HUGE_PAGE // 2
            continue
        assert llama.plan is not None
        whole = sum(llama.plan.capacities) == sum(bank.count for bank in llama.model_info.banks)
        surplus = llama.plan.expert_bytes - wanted
        if surplus < HUGE_PAGE * len(llama.plan.capacities):
            return llama
        llama.close()
        ram -= (_unused(llama) if whole else 0) + surplus - HUGE_PAGE // 2
    raise AssertionError(f"no cap found that leaves {wanted} bytes for experts")


def _unused(llama: moestream.Llama) -> int:
    """What a cap leaves when every expert has its place."""
    plan = llama.plan
    assert plan is not None
    fixed = plan.other_bytes + plan.dense_bytes + plan.boundary_bytes + plan.kv_bytes + plan.compute_bytes
    return plan.cap_bytes - fixed - plan.margin_bytes - plan.expert_bytes
