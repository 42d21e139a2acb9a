"""What a caller hands in for the making of text: logits processors, which the binding calls from C, where an exception
of theirs would be lost; grammars, which llama.cpp crashes over when they are none; draft models; saved states."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from moestream.binding import low
from moestream.errors import UsageError


class Processors:
    """Logits processors as the binding takes them. The first exception is kept for ``reraise``, and nothing is asked
    of them after it."""

    def __init__(self, processors: Iterable[Callable[[Any, Any], Any]]) -> None:
        self._processors = list(processors)
        self._raised: BaseException | None = None

    def __iter__(self) -> Iterator[Callable[[Any, Any], Any]]:
        return iter([self._process])

    def _process(self, tokens: Any, scores: Any) -> Any:
        if self._raised is not None:
            return scores
        try:
            for process in self._processors:
                scores[:] = process(tokens, scores)
        except BaseException as error:
            self._raised = error
        return scores

    def reraise(self) -> None:
        """Raises what a processor raised, once."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised


def check_grammar(model: Any, grammar: Any) -> None:
    """Raises UsageError for a grammar that llama.cpp makes no sampler of: the binding would use what it got instead.
    ``model``, ``grammar``: the binding's."""
    text, root = grammar._grammar.encode("utf-8"), grammar._root.encode("utf-8")
    sampler = low.llama_sampler_init_grammar(model.vocab, text, root)
    if not sampler:
        raise UsageError(
            "this grammar is none: llama.cpp wants every rule that is named, a rule called root, and no rule that "
            "begins with itself"
        )
    low.llama_sampler_free(sampler)


class Drafts:
    """A draft model of whose proposals a step takes no more than it can hold: the logits of an earlier step are gone
    when the first of them is looked at. What is proposed changes no text."""

    def __init__(self, draft_model: Callable[..., Any], n_batch: int) -> None:
        self._draft_model = draft_model
        self._most = n_batch - 1  # beside the token they follow

    def __call__(self, tokens: Any, /, **options: Any) -> Any:
        return self._draft_model(tokens, **options)[: self._most]


def with_rows(state: Any, rows: int) -> Any:
    """The binding's ``state`` with as many rows of logits as a model that keeps ``rows`` has for its tokens: one that
    was saved with ``logits_all`` fits one without, and the other way round."""
    wanted = min(rows, state.n_tokens)
    if len(state.scores) == wanted:
        return state
    fitted = copy.copy(state)
    fitted.scores = np.zeros((wanted, state.scores.shape[1]), dtype=np.single)
    fitted.scores[: len(state.scores)] = state.scores[:wanted]
    return fitted


@contextlib.contextmanager
def written_rows(llama: Any) -> Iterator[None]:
    """Within: of the logits that the binding keeps only rows it writes, which are none without ``logits_all``. It would
    copy a step's rows, hundreds of MB that no cap has room for. ``llama``: the binding's."""
    kept = llama.scores
    if not llama._logits_all:
        llama.scores = kept[:0]
    try:
        yield
    finally:
        llama.scores = kept
