"""What must not be run unguarded: a mechanism whose memory grows without bound, or lies where no cap counts it;
arguments that would put experts where nothing is streamed; and what llama.cpp would abort over."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Sequence
from typing import Any, SupportsIndex

from moestream.binding import llama_cpp, low
from moestream.box import MOST_THREADS, Box, cache_directory, place_of
from moestream.core import _core
from moestream.errors import BudgetError, ModelError, RefusedError, UsageError
from moestream.mechanism import Mechanism
from moestream.model import Model
from moestream.nearest import did_you_mean

#: Arguments of the parent that would put experts where the engine cannot stream them.
_REFUSED_ARGUMENTS = {
    "n_gpu_layers": "streamed experts stay on the CPU: leave n_gpu_layers at 0",
    "use_mlock": "llama.cpp's mlock would lock the experts too: use dense mlock (mechanism '...+mlock')",
    "lora_path": "llama.cpp does not map a model that has a LoRA: merge it into the file",
    "vocab_only": "a vocabulary has no experts to stream: use llama_cpp.Llama",
}


#: What ``moestream.Llama`` takes and its parent does not.
_OWN_ARGUMENTS = {"ram", "mechanism", "strict", "i_know", "trace", "on_progress", "governor"}
#: Smallest values of the parent's sizes, and the largest of all of them.
_SIZES = {"n_ctx": 0, "n_batch": 1, "n_ubatch": 0}
_LARGEST_SIZE = 2**31 - 1
#: llama.cpp's numbers of ways to pool embeddings and to attend. A rank is no embedding: the binding reads beyond it.
_WAYS = {
    "pooling_type": {-1: "the model's", 0: "none", 1: "mean", 2: "cls", 3: "last"},
    "attention_type": {-1: "the model's", 0: "causal", 1: "non-causal"},
}
#: ggml's numbers of the types that llama.cpp's own programs keep a cache in; others divide by zero or have no code.
_CACHE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip


def check_values(arguments: dict[str, Any]) -> None:
    """Raises UsageError for a value of the parent's arguments that llama.cpp would crash or hang over."""
    for name, least in _SIZES.items():
        value = arguments.get(name, least)
        if not isinstance(value, SupportsIndex) or not least <= value.__index__() <= _LARGEST_SIZE:
            raise UsageError(f"{name}={value!r}: a whole number is needed, {least} to {_LARGEST_SIZE}")
    for name in ("type_k", "type_v"):
        kind = arguments.get(name)
        if kind is not None and kind not in _CACHE_TYPES.values():
            known = ", ".join(f"{number} ({word})" for word, number in _CACHE_TYPES.items())
            raise UsageError(f"{name}={kind!r}: llama.cpp keeps its cache in one of {known}")
    for name, ways in _WAYS.items():
        value = arguments.get(name, -1)
        if not isinstance(value, SupportsIndex) or value.__index__() not in ways:
            known = ", ".join(f"{number} ({word})" for number, word in ways.items())
            raise UsageError(f"{name}={value!r}: llama-cpp-python knows {known}")
    for name in ("n_threads", "n_threads_batch"):
        value = arguments.get(name) or 0  # 0 and None: as many as there are
        if not isinstance(value, SupportsIndex) or value.__index__() > MOST_THREADS:
            raise UsageError(
                f"{name}={value!r}: a whole number is needed, of threads, of which ggml has {MOST_THREADS}"
            )


def check_names(model: Model) -> None:
    """Raises ModelError for a name that the binding, which hands llama.cpp UTF-8, cannot say."""
    for path in model.paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            remedy = "rename it, or make a link to it"
            with contextlib.suppress(UnicodeDecodeError):
                os.fsencode(path).decode()
                remedy = "this locale has another encoding: set LC_ALL=C.UTF-8"
            raise ModelError(
                f"{path}: its name is not UTF-8, which llama-cpp-python needs: {remedy}"
            ) from None


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raises UsageError for an argument of the parent that a streamed model cannot have."""
    for name, reason in _REFUSED_ARGUMENTS.items():
        if arguments.get(name):
            raise UsageError(f"{name}: {reason}")
    if arguments.get("use_mmap") is False:
        raise UsageError("use_mmap=False: the experts' addresses come from the mapping; leave it at True")


def ignored(arguments: dict[str, Any]) -> list[str]:
    """A remark for each of ``arguments`` that the parent has no name for: it takes any, in silence."""
    known = set(inspect.signature(llama_cpp.Llama.__init__).parameters)
    remarks = []
    for name in sorted(arguments.keys() - known):
        near = did_you_mean(name, sorted(known | _OWN_ARGUMENTS), most=1)
        remarks.append(f"{name} is no argument and was ignored{near}")
    return remarks


def check_store(mechanism: Mechanism, box: Box, i_know: bool) -> None:
    """Raises RefusedError for a store that would take memory beyond any cap."""
    _check_cow(mechanism, box, i_know)
    if mechanism.store == "shared" and (kind := place_of([cache_directory()], box).in_memory):
        raise RefusedError(
            f"store shared works on a copy of the model, and {cache_directory()} lies on {kind}, which is memory "
            "beyond the cap: set XDG_CACHE_HOME to a directory on a disk"
        )


def _check_cow(mechanism: Mechanism, box: Box, i_know: bool) -> None:
    """Raises RefusedError for ``cow`` where no memory cap is enforced on this process, unless ``i_know``."""
    if mechanism.store != "cow" or i_know or box.memory_limit().bytes < box.ram_bytes():
        return
    raise RefusedError(
        "cow keeps every page it has ever written, so its memory grows without bound: run it inside a memory cgroup "
        "(systemd-run --user --scope -p MemoryMax=4G ...), or say --i-know (i_know=True); it stops itself at the "
        "cap named"
    )


def check_threads(arguments: dict[str, Any]) -> None:
    """Raises RefusedError where fewer threads can be started than are to compute: OpenMP would end the process."""
    count = max(arguments["n_threads"], arguments["n_threads_batch"])
    there = _core.startable_threads(count)
    if there < count:
        raise RefusedError(
            f"{count} threads are to compute and this process can start {there}: raise `ulimit -u` (systemd: "
            "TasksMax=, docker: --pids-limit), or name fewer (--threads; n_threads, n_threads_batch)"
        )


def check_whole(llama: Any, tokens: Sequence[int], asked_batch: int) -> None:
    """Raises BudgetError for tokens that are to see each other, whichever comes first, and would not because a cap has
    cut the step of ``asked_batch`` tokens. ``llama``: the binding's."""
    whole = min(asked_batch, llama.context_params.n_ctx, len(tokens))
    if llama.context_params.attention_type == low.LLAMA_ATTENTION_TYPE_NON_CAUSAL and whole > llama.n_batch:
        raise BudgetError(
            f"{whole} tokens that attend to each other (attention_type) are one step, and the cap holds steps of "
            f"{llama.n_batch}: name more memory (ram), or fewer tokens"
        )


def check_memory(context: Any, model: Model) -> None:
    """Raises ModelError for text of a model that keeps nothing of a batch for the next. ``context``: the binding's."""
    if context.memory is None:
        raise ModelError(
            f"{model.paths[0]}: a {model.arch} has no memory (it is an encoder or a diffusion model), and "
            "llama-cpp-python makes no text with it: use embed (embedding=True), or llama_decode of whole batches"
        )


def check_rows(batch: Any, most: int) -> int:
    """How many rows of logits a batch of the binding's asks for. Raises UsageError for more than the context was made
    for (``most``; 0: any)."""
    asked = sum(map(bool, batch.batch.logits[: batch.n_tokens()]))
    if most and asked > most:
        raise UsageError(
            f"a batch asks for {asked} rows of logits and this context was made for {most}: load with logits_all=True"
        )
    return asked


def check_row(llama: Any, rows: int, place: int | None) -> None:
    """Raises UsageError for a token to be sampled where llama.cpp, which would end the process, has no logits: it has
    those of the last step's ``rows`` last tokens. ``place``: the token whose row is asked for (None: the last one)."""
    if not llama.n_tokens:
        return  # the binding says so
    back = 1 if place is None else llama.n_tokens - place
    if llama._requires_eval or not 1 <= back <= rows:
        asked = "the last token" if place is None else f"token {place}"
        raise UsageError(
            f"{asked} has no logits to sample from: eval it first, and for others than the last with logits_all=True "
            f"and at most n_batch={llama.n_batch} at once"
        )


def check_texts(llama: Any, texts: Sequence[str], asked_batch: int) -> None:
    """Raises UsageError for texts that the binding would crash over, and BudgetError for one that it would embed in
    part because a cap has cut the step of ``asked_batch`` tokens (0: none has). ``llama``: the binding's."""
    if not llama.context_params.embeddings:
        return  # the binding says so
    if not texts:
        raise UsageError("nothing to embed: give a text or more")
    whole = min(asked_batch, llama.context_params.n_ctx)
    for text in texts:
        tokens = len(llama.tokenize(text.encode("utf-8")))
        if not tokens:
            raise UsageError("an empty text has no tokens with this model, and so no embedding: leave it out")
        needed = min(tokens, whole)  # the binding cuts the rest off, whoever loads the model
        if needed > llama.n_batch:
            raise BudgetError(
                f"a text of {needed} tokens is embedded in one step, and the cap holds steps of {llama.n_batch}: "
                "name more memory (ram), or embed shorter texts"
            )


def check_tokens(tokens: Sequence[int], n_vocab: int) -> None:
    """Raises UsageError for a token whose text llama.cpp would end the process over."""
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise UsageError(f"{token} is no token of this model: 0 to {n_vocab - 1} are")
