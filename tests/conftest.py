"""What the tests of the engine share: small models made once, caps that force evictions, stock's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moestream
from answers import CONTEXT, Answer, answer, prompt_tokens
from moestream.box import process_memory
from moestream.errors import BudgetError
from moestream.geometry import slab_geometry
from moestream.make import make_model
from moestream.mechanism import Mechanism
from moestream.model import read_model

#: What a cap leaves for a context and its buffers, where a test makes only the experts scarce.
ROOM = 1 << 30
#: Many experts of few pages: a budget of one huge page holds nine of the 128, so nearly every route evicts.
SHAPE = "tiny,experts=32"


def quant_of(arch: str) -> str:
    return "MXFP4" if arch == "gpt-oss" else "Q4_K"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A small model of an architecture, made once a session."""
    directory = tmp_path_factory.mktemp("models")
    made: dict[tuple[str, str, str], Path] = {}

    def get(arch: str, shape: str = SHAPE, quant: str = "") -> Path:
        which = arch, shape, quant or quant_of(arch)
        if which not in made:
            made[which] = make_model(*which, directory / f"{arch}-{len(made)}.gguf")
        return made[which]

    return get


def plain(path: Path, threads: int = 2, **arguments: Any) -> Any:
    """Stock: ``llama_cpp.Llama`` as it is, but without repacking weights."""
    from moestream.binding import llama_cpp, wrapped_defaults

    def change(params: Any) -> None:
        params.use_extra_bufts = False

    settings = {
        "n_ctx": CONTEXT,
        "n_threads": threads,
        "n_threads_batch": threads,
        "verbose": False,
        **arguments,
    }
    with wrapped_defaults(model=change):
        return llama_cpp.Llama(str(path), **settings)


@pytest.fixture(scope="session")
def stock() -> Iterator[Callable[..., Answer]]:
    """Stock's answer to a prompt, computed once for each question.

    The last model stays open: questions about one model come together.
    """
    answers: dict[Any, Answer] = {}
    opened: dict[Any, Any] = {}

    def ask(path: Path, tokens: list[int], steps: int, threads: int, n_batch: int, n_ubatch: int) -> Answer:
        which = (path, threads, n_batch, n_ubatch)
        question = (*which, tuple(tokens), steps)
        if question not in answers:
            if which not in opened:
                for llama in opened.values():
                    llama.close()
                opened.clear()
                opened[which] = plain(path, threads, n_batch=n_batch, n_ubatch=n_ubatch)
            answers[question] = answer(opened[which], tokens, steps)
        return answers[question]

    yield ask
    for llama in opened.values():
        llama.close()


def same_answer(
    llama: moestream.Llama, stock: Callable[..., Answer], length: int, steps: int = 6, seed: int = 0
) -> None:
    """Asserts that ours equals stock's with the same threads and batches."""
    tokens = prompt_tokens(length, llama.n_vocab(), seed)
    n_ubatch = min(llama.n_batch, llama.context_params.n_ubatch)
    path = llama.model_info.paths[0]
    expected = stock(path, tokens, steps, llama.n_threads, llama.n_batch, n_ubatch)
    got = answer(llama, tokens, steps)
    assert got.tokens == expected.tokens
    assert got.digests == expected.digests


def evicted(llama: moestream.Llama) -> bool:
    """More was read than the budget holds: something had to leave."""
    assert llama.plan is not None
    assert llama.plan.capacities
    counters = llama._engine.counters
    return bool(counters["misses"] + counters["speculative_issued"] > sum(llama.plan.capacities))


def smallest_cap(path: Path, mechanism: str, **arguments: Any) -> int:
    """The least ``ram`` a plan accepts."""
    with pytest.raises(BudgetError) as refused:
        moestream.Llama(path, ram=1, mechanism=mechanism, i_know=True, **arguments)
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


def load(path: Path, mechanism: str, experts: int = 0, threads: int = 2, **arguments: Any) -> moestream.Llama:
    """Our ``Llama`` with at most ``experts`` bytes of experts in the engine's cache (0: the fewest that work).

    The cap is far above what the process needs, whatever else a test process holds: only the experts are scarce.
    """
    settings = {
        "n_ctx": CONTEXT,
        "n_batch": 64,
        "n_threads": threads,
        "n_threads_batch": threads,
        **arguments,
    }
    model = read_model(path, settings.get("kv_overrides"))
    # Asking for the smallest cap takes as long as the load itself.
    ram = process_memory().anon_bytes + model.dense_bytes + experts + ROOM
    if not Mechanism.parse(mechanism).cached:
        return moestream.Llama(path, ram=ram + model.expert_bytes, mechanism=mechanism, **settings)
    geometry = slab_geometry(model)
    limit = max(experts, geometry.bytes_of(geometry.smallest(1)))
    return moestream.Llama(path, ram=ram, mechanism=mechanism, _expert_bytes=limit, **settings)


def told_otherwise(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Have the engine built from a table that is not the model's."""
    from moestream import assembly

    real = assembly._core.Engine

    def build(**arguments: Any) -> Any:
        change(arguments)
        return real(**arguments)

    monkeypatch.setattr(assembly._core, "Engine", build)
