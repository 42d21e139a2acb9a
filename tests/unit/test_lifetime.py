"""Who is inside is waited for, who comes later is refused, and whoever is inside may go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from moestream.errors import UsageError
from moestream.lifetime import Closed, Lifetime, Turn, inside


class Parent:
    def __init__(self) -> None:
        self._lifetime = Lifetime()

    def twice(self) -> int:
        return 2 * self.once()

    def once(self) -> int:
        return 1

    def items(self) -> Iterator[int]:
        yield from (1, 2)

    def close(self) -> None:
        self._lifetime.end()


@inside(besides=("close",))
class Child(Parent):
    def once(self) -> int:
        return 21


def test_the_end_waits_for_those_inside_and_refuses_the_next() -> None:
    lifetime = Lifetime()
    entered, leave, hurried, ended = (threading.Event() for _ in range(4))

    def use() -> None:
        with lifetime:
            entered.set()
            assert leave.wait(30)
            with lifetime:  # what is inside goes on, though the end has begun
                assert not ended.is_set()

    def hurry() -> None:
        assert lifetime.ended  # whoever forgets what it is told sees that
        hurried.set()

    def end() -> None:
        lifetime.end(hurry)
        ended.set()

    user, closer = threading.Thread(target=use), threading.Thread(target=end)
    user.start()
    assert entered.wait(30)
    closer.start()
    assert hurried.wait(30)
    with pytest.raises(UsageError, match=Closed.SAID), lifetime:
        pass
    assert not ended.is_set()
    leave.set()
    user.join(30)
    closer.join(30)
    assert ended.is_set()


def test_from_within_nobody_waits_for_himself() -> None:
    lifetime = Lifetime()
    with lifetime:
        lifetime.end()
        lifetime.end()
    with pytest.raises(UsageError):
        lifetime.check()


def test_methods_of_the_parent_and_overridden_ones_are_inside() -> None:
    child = Child()
    assert child.twice() == 42
    items = child.items()
    assert next(items) == 1
    child.close()  # while the caller has an item nobody is inside
    for refused in (child.twice, child.once, lambda: next(items), lambda: next(child.items())):
        with pytest.raises(UsageError, match=Closed.SAID):
            refused()


def test_who_waits_for_its_turn_gives_up_at_the_end() -> None:
    lifetime, lock = Lifetime(), threading.Lock()
    turn = Turn(lock, lifetime)
    with turn, pytest.raises(UsageError, match=Closed.SAID):
        lifetime.end()
        turn.__enter__()
    with turn:  # whoever finds it free looks for itself
        assert lock.locked()
    assert not lock.locked()
