"""What is done around each step: the budget moves before it, it is recorded, and its failure is raised after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moestream.errors import Cancelled, MoestreamError, ReadError
from moestream.governor import Governor
from moestream.model import Model
from moestream.recorder import Recorder
from moestream.unchanged import Unchanged


class Steps:
    """The steps of one model, for as long as it is open. ``engine``: the core's, or None for a model without experts,
    whose steps are only recorded; ``files``: the model's. One step at a time; ``cancel`` from any thread."""

    def __init__(self, engine: Any, model: Model, files: Unchanged, recorder: Recorder) -> None:
        self._engine, self._model, self._files, self._recorder = engine, model, files, recorder
        self._cancelled = False
        self.governor: Governor | None = None

    def begin_call(self) -> list[str]:
        """Count anew, and forget a cancel of the call before. Returns remarks; raises ReadError for a file that has
        changed since."""
        remarks = self._files.check()
        self._recorder.begin_call()
        self._cancelled = False
        if self._engine is not None:
            self._engine.cancel(False)
        return remarks

    def cancel(self) -> None:
        """End the running step within one layer; lasts until the next call."""
        self._cancelled = True
        if self._engine is not None:
            self._engine.cancel(True)

    def take(self, tokens: int, run: Callable[[], Any]) -> Any:
        """What ``run`` returns, a step of ``tokens``. Raises Cancelled, and ReadError for bytes that could not be
        had or that somebody has written to meanwhile."""
        if self._engine is None:
            return self._recorder.measure(tokens, run)
        if self.governor is not None:
            self.governor.step(self._recorder.last_s)
        self._engine.begin_step()
        try:
            result = self._recorder.measure(tokens, run)
        except RuntimeError:
            if self._cancelled:
                raise Cancelled("stopped") from None
            if self._engine.failure is None:
                raise
        else:
            self._engine.end_step()
        if self._engine.failure is not None:
            raise self._failure()
        self._files.check_step()
        return result

    def _failure(self) -> MoestreamError:
        error, text, place = self._engine.failure
        self._engine.clear_failure()
        if place is not None:
            text = f"{self._model.tensor_at(*place)}: {text}"
        return ReadError(text) if error else MoestreamError(text)

    def end(self) -> None:
        """Move and record no more: what was recorded stays."""
        if self.governor is not None:
            self.governor.close()
        self._recorder.stop()
