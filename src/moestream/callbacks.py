"""A caller's logits processors: the binding calls them from C, where an exception of theirs would be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


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
