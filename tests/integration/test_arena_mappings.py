"""An arena where mappings are few, and where the kernel keeps strict accounts of what may be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from children import python
from conftest import evicted, load, same_answer, told_otherwise

# -- mappings --


def test_vacated_ranges_are_mapped_again_where_mappings_are_few(tiny, stock, monkeypatch) -> None:
    """The limit is the machine's: what is read of it is replaced, what follows from it is real."""
    grown = []
    for most in (1 << 20, 400):
        with monkeypatch.context() as patch:
            told_otherwise(patch, lambda arguments, most=most: arguments.update(max_mappings=most))
            llama = load(tiny("olmoe"), "arena+sync+lru", threads=1)
        with llama:
            before = _mappings()
            same_answer(llama, stock, 12, steps=3)
            assert evicted(llama)
            grown.append(_mappings() - before)
    assert grown[1] < 100 < grown[0]


_LOWERED = """
import resource, sys
sys.path.append(sys.argv[4])
import moestream
from answers import answer
from moestream import assembly
path, limit, closed = sys.argv[1], getattr(resource, sys.argv[2]), sys.argv[3] == "closed"
real = assembly._core.Engine
assembly._core.Engine = lambda **told: real(**{**told, "closed": closed})
with moestream.Llama(path, ram="1GiB", mechanism="arena", n_ctx=64, n_batch=4, n_threads=1, n_threads_batch=1,
                     _expert_bytes=2 << 20) as llama:
    tokens = list(range(10, 26))
    expected = answer(llama, tokens, 3)
    limits = resource.getrlimit(limit)
    resource.setrlimit(limit, (1 << 20, limits[1]))
    said = set()
    for _ in range(3):
        llama.reset()
        try:
            llama.eval(tokens)
        except moestream.MoestreamError as error:
            said.add(str(error))
    resource.setrlimit(limit, limits)
    assert answer(llama, tokens, 3) == expected
(line,) = said
print(line)
"""


@pytest.mark.parametrize(
    ("limit", "arena", "named"),
    [("RLIMIT_AS", "open", "-v"), ("RLIMIT_AS", "closed", "-v"), ("RLIMIT_DATA", "closed", "-d")],
)
def test_address_space_that_is_taken_away_from_a_running_model_is_named(
    limit: str, arena: str, named: str, tiny
) -> None:
    """The kernel says the same of too many mappings; the model goes on once there is room again."""
    said = python(_LOWERED, tiny("olmoe"), limit, arena, Path(__file__).parents[1])
    assert said.startswith(
        f"moving an expert's pages: Cannot allocate memory (raise `ulimit {named}` or vm.max_map_count)"
    )


# -- strict accounts of what may be written (vm.overcommit_memory 2) --


@contextmanager
def closed(monkeypatch: pytest.MonkeyPatch, mechanism: str, path: Path, **arguments: Any) -> Iterator[Any]:
    """An arena as it is where the kernel keeps strict accounts: the setting is the whole machine's, so it is told."""
    with monkeypatch.context() as patch:
        told_otherwise(patch, lambda told: told.update(closed=True))
        llama = load(path, mechanism, threads=1, **arguments)
    with llama:
        yield llama


@pytest.mark.parametrize(
    "mechanism",
    [
        "arena+sync+lru",
        "arena+lru+gate:1",
        "arena/fresh+threads:2",
        "arena/populate+sync",
        "arena+sync+dontneed",
    ],
)
@pytest.mark.parametrize("interpose", [True, False])
def test_a_closed_arena_gives_stocks_answer(
    interpose: bool, mechanism: str, tiny, stock, monkeypatch
) -> None:
    with closed(monkeypatch, mechanism, tiny("olmoe"), n_batch=1, _interpose=interpose) as llama:
        same_answer(llama, stock, 12, steps=3)
        assert evicted(llama)
        fewer = [max(2, capacity // 2) for capacity in llama.plan.capacities]
        for capacities in (fewer, llama.plan.capacities):
            llama._engine.resize(list(capacities))
            same_answer(llama, stock, 12, steps=3)


def test_a_closed_arena_commits_what_it_holds(tiny, monkeypatch) -> None:
    """VmData counts what the kernel would commit: private and writable, touched or not."""
    path = tiny("olmoe")
    with closed(monkeypatch, "arena+sync+lru", path) as llama:
        llama.eval(list(range(1, 13)))
        little = _writable()
    with load(path, "arena+sync+lru", threads=1) as llama:
        llama.eval(list(range(1, 13)))
        much = _writable()
    assert much - little > llama.model_info.expert_bytes // 2


def _writable() -> int:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == "VmData:")


def _mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())
