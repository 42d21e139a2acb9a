"""How far work is whose steps take about as long as each other."""

from __future__ import annotations

from collections.abc import Callable

#: Is told how many steps of how many are done.
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """For who does not want to know."""


class Steps:
    """``total`` steps, counted to ``told``."""

    def __init__(self, total: int, told: Progress) -> None:
        self._total, self._told = total, told
        self._done = 0

    def step(self) -> None:
        self._done += 1
        self._told(self._done, self._total)
