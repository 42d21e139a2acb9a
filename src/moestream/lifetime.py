"""Who is inside a model, so that it can be closed from any thread at any moment; and whose call it is.

``close`` frees what llama.cpp made. Whatever reads that, the text of a token as much as a step, is inside while it
does: close waits for those who are, and lets nobody in after it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from types import FunctionType
from typing import Any, TypeVar

from moestream.errors import UsageError

_Class = TypeVar("_Class", bound=type)
#: Who waits for its turn looks as often whether the model is being closed.
_LOOK_S = 0.1


class Closed:
    """What stands for llama.cpp's objects once they are freed: any use of one is a UsageError."""

    SAID = "this model is closed: load it again"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(self.SAID)


class Call:
    """One call that makes text. ``running``: until it has ended, or another took the model's context from it."""

    SAID = (
        "one call at a time: another of this model began before this one had ended, and has its context now"
    )

    def __init__(self, running: bool) -> None:
        self.running = running
        self._within = False

    def check(self) -> None:
        """Raises UsageError once it no longer has the context."""
        if not self.running:
            raise UsageError(self.SAID)

    def __enter__(self) -> None:
        """From here to the exit what uses the context does so for this call."""
        self._within = True

    def __exit__(self, *exc: object) -> None:
        self._within = False

    def yield_context(self) -> None:
        """Somebody uses the context: unless it is for this call, the call has it no longer."""
        if not self._within:
            self.running = False


class Lifetime:
    """A context for each use of a model. Whoever is inside may enter again; raises UsageError once it has ended."""

    def __init__(self) -> None:
        self.ended = False
        self._changed = threading.Condition()
        self._depths: dict[int, int] = {}

    def check(self) -> None:
        """Raises UsageError once it has ended."""
        if self.ended:
            raise UsageError(Closed.SAID)

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            depth = self._depths.get(me, 0)
            if not depth:
                self.check()
            self._depths[me] = depth + 1

    def __exit__(self, *exc: object) -> None:
        me = threading.get_ident()
        with self._changed:
            self._depths[me] -= 1
            if not self._depths[me]:
                del self._depths[me]
                self._changed.notify_all()

    def end(self, hurry: Callable[[], None] = lambda: None) -> None:
        """Let nobody in any more, ``hurry`` the other threads inside and wait for them. From within, it does not wait
        for its own."""
        me = threading.get_ident()
        with self._changed:
            self.ended = True
        hurry()
        with self._changed:
            self._changed.wait_for(lambda: not self._depths.keys() - {me})


class Turn:
    """A context for each use of what one at a time may use (``lock``, reentrant). Who waits for it gives up once the
    model has ended, with a UsageError: it is waited for then, perhaps by who has the lock."""

    def __init__(self, lock: Any, lifetime: Lifetime) -> None:
        self._lock, self._lifetime = lock, lifetime

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=_LOOK_S):
            self._lifetime.check()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def inside(besides: Collection[str]) -> Callable[[_Class], _Class]:
    """A class whose parent's methods, as they are or overridden, run inside its ``_lifetime``; those that yield are
    inside while they run up to the next item, and not while the caller has it. ``besides``: what sees to it itself."""

    def change(cls: _Class) -> _Class:
        for name, method in vars(cls.__base__).items():
            if isinstance(method, FunctionType) and not name.startswith("__") and name not in besides:
                wrap = _each_item if inspect.isgeneratorfunction(method) else _whole
                setattr(cls, name, wrap(getattr(cls, name)))
        return cls

    return change


def alone(*names: str, only_look: Collection[str]) -> Callable[[_Class], _Class]:
    """A class whose methods of these ``names`` run while nobody else uses its context (``_turn``), and take that
    from a call of somebody else's (``_call``), but for those that ``only_look`` at it."""

    def change(cls: _Class) -> _Class:
        for name in (*names, *only_look):
            setattr(cls, name, _alone(getattr(cls, name), takes=name in names))
        return cls

    return change


def _alone(method: Callable[..., Any], takes: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            if takes:
                self._call.yield_context()
            return method(self, *args, **kwargs)

    return run


def _whole(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lifetime:
            return method(self, *args, **kwargs)

    return run


def _each_item(method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        running = method(self, *args, **kwargs)
        while True:
            with self._lifetime:
                try:
                    item = next(running)
                except StopIteration:
                    return
            yield item

    return run
