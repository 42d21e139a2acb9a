"""Budgets that change while a model runs, and a neighbour that wants memory: the text stays, nobody is killed."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moestream
from answers import answer, prompt_tokens
from children import child_command, child_result, run_child
from conftest import load, same_answer
from moestream.box import Box, Cage, Limit, process_memory
from moestream.errors import BudgetError
from moestream.geometry import slab_geometry, split_budget

SHAPE = "tiny,experts=64,layers=8,ff=1024"


@pytest.mark.parametrize("arch", ["olmoe", "deepseek2"])
@pytest.mark.parametrize(
    "mechanism",
    [
        "arena",
        "arena+sync+lru-layer+previous",
        "arena/fresh+threads:2+sieve",
        "arena/populate+uring:8+s3fifo+random",
        "arena/buffered+uring:8+lfu-decay:16+gate:2",
    ],
)
def test_a_budget_that_changes_on_the_fly_changes_no_bit(
    mechanism: str, arch: str, tiny: Any, stock: Any
) -> None:
    with load(tiny(arch), mechanism, experts=16 << 20) as llama:
        geometry = slab_geometry(llama.model_info)
        least, most = geometry.bytes_of(geometry.smallest(llama.plan.n_batch)), llama.plan.expert_bytes
        chance = random.Random(7)
        for seed in range(6):
            wanted = split_budget(geometry, chance.randint(least, most), llama.plan.n_batch)
            reached = llama._engine.resize(wanted)
            assert all(now <= planned for now, planned in zip(reached, llama.plan.capacities, strict=True))
            same_answer(llama, stock, 20, seed=seed)


def test_what_is_given_back_is_the_system_s_again(tiny: Any) -> None:
    with load(tiny("olmoe", SHAPE), "arena+uring:8+lru", experts=48 << 20) as llama:
        answer(llama, prompt_tokens(60, llama.n_vocab()), 40)
        geometry = slab_geometry(llama.model_info)
        before = process_memory().anon_bytes
        least = geometry.smallest(llama.plan.n_batch)
        llama._engine.resize(least)
        given = geometry.bytes_of(llama.plan.capacities) - geometry.bytes_of(least)
        assert before - process_memory().anon_bytes > 0.8 * given
        llama._engine.resize(list(llama.plan.capacities))
        answer(llama, prompt_tokens(60, llama.n_vocab(), seed=1), 60)
        assert process_memory().anon_bytes > before - 0.5 * given


#: Takes memory in small steps, so many seconds apart, until it has what it wants, keeps it, and says so.
_HOG = """
import sys, time
held = []
for _ in range(int(sys.argv[1]) // (2 << 20)):
    held.append(bytearray(b"x") * (2 << 20))
    time.sleep(float(sys.argv[2]))
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("free", "pause_s"), [(24 << 20, 0.05), (384 << 20, 0.0)])
def test_a_neighbour_that_wants_memory_gets_it(free: int, pause_s: float, tiny: Any, stock: Any) -> None:
    """Both in one cgroup that is too small for what both want; the second takes it as fast as it can be had."""
    available, why = Cage.available()
    if not available:
        pytest.skip(f"no memory cgroup: {why}")
    path = tiny("olmoe", SHAPE)
    cap = run_child(path, 1, "arena")["smallest_bytes"] + (48 << 20)
    hog_bytes = free + (16 << 20)
    with Cage(cap + free) as cage:
        question = child_command(path, cap, "arena", length=20, steps=300, governor=True)
        with cage.popen(question, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as model:
            assert model.stderr is not None
            assert model.stderr.readline() == "loaded\n"
            wants = [sys.executable, "-c", _HOG, str(hog_bytes), str(pause_s)]
            with cage.popen(wants, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hog:
                assert hog.stdout is not None
                said = hog.stdout.readline()
                out, err = model.communicate(timeout=300)
                hog.communicate(timeout=60)
        assert cage.oom_kills() in (0, None)
    assert said == "has it\n"
    result = child_result(subprocess.CompletedProcess([], model.returncode, out, err))
    assert "error" not in result, result
    assert any(change["bytes"] < change["before_bytes"] for change in result["governor"]), result["governor"]
    expected = stock(path, prompt_tokens(20, 320), 300, 2, result["n_batch"], result["n_batch"])
    assert tuple(result["digests"]) == expected.digests


#: A machine that is short of memory at first and has plenty after: what the governor decides, by its looks.
_SHORT_AT_FIRST = """
import itertools, sys
from moestream.cli.main import main
from moestream.governor import Decision
looks = itertools.count()
Decision.__call__ = lambda self, *_: self.floor if next(looks) < 4 else self.planned
main(sys.argv[1:])
"""


def test_a_run_has_one_and_says_what_it_gives_and_takes(tiny: Any, tmp_path: Path) -> None:
    words = ["run", str(tiny("olmoe", SHAPE)), "-p", "Once", "-n", "400", "--ctx", "512", "--json"]
    words += [str(tmp_path / "run.json"), "--mechanism", "arena", "--ram", "1GiB"]

    def run(*more: str) -> tuple[str, list[str], dict[str, Any]]:
        command = [sys.executable, "-c", _SHORT_AT_FIRST, *words, *more]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("memory: ")]
        return done.stdout, said, json.loads((tmp_path / "run.json").read_text())

    text, said, document = run()
    gave, took = said
    assert re.match(r"memory: gave back .* of expert pages: .* for experts now$", gave)
    assert re.match(r"memory: took again .* of expert pages: .* for experts now$", took)
    assert len(document["governor"]) == 2
    without, said, document = run("--no-governor")
    assert (without, said, document["governor"]) == (text, [], None)


def test_the_labs_runs_have_none(tiny: Any, tmp_path: Path) -> None:
    words = [
        str(tiny("olmoe")),
        "-p",
        "ab",
        "-n",
        "2",
        "--ctx",
        "64",
        "--ram",
        "1GiB",
        "--mechanism",
        "arena",
    ]
    command = [sys.executable, "-m", "moestream.lab.worker", *words, "--json", str(tmp_path / "run.json")]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads((tmp_path / "run.json").read_text())["governor"] is None


def test_a_cap_above_what_there_is_now(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a governor, which would give it back at once, what there is is taken; without one the cap is as asked."""
    path = tiny("olmoe")
    monkeypatch.setattr(Box, "room", lambda box: Limit(3 << 30, "MemAvailable"))
    asked = {"ram": "8GiB", "mechanism": "arena", "n_ctx": 256}
    with moestream.Llama(path, **asked) as llama:
        assert llama.plan.cap_bytes < (3 << 30) + process_memory().anon_bytes
        (said,) = llama.fallbacks
        assert re.fullmatch(
            r"the cap 8\.\S+ GB is above the 3\.\S+ GB there are for this process now \(MemAvailable\): "
            r"[23]\.\S+ GB is taken instead",
            said,
        )
    # A container of one's own is taken whole, and a cap that is its limit is no cap above it.
    group = Limit(3 << 30, "memory.max")
    monkeypatch.setattr(Box, "room", lambda box: group)
    with moestream.Llama(path, **asked) as llama:
        assert llama.plan.cap_bytes >= 3 << 30 and "3." in llama.fallbacks[0]
    asked["ram"] = (3 << 30) + process_memory().anon_bytes + (1 << 20)
    with moestream.Llama(path, **asked) as llama:
        assert (llama.plan.cap_bytes, llama.fallbacks) == (asked["ram"], [])
    asked["ram"] = "8GiB"
    with moestream.Llama(path, governor=False, **asked) as llama:
        assert llama.plan.cap_bytes == 8 << 30
        assert llama.fallbacks == []
        assert any("is more than there is" in line for line in llama.plan.warnings)
    monkeypatch.setattr(Box, "room", lambda box: Limit(10 << 20, "MemAvailable"))
    with pytest.raises(
        BudgetError, match=r"is above the .* there are for this process now .*: .* is too little"
    ):
        moestream.Llama(path, **asked)
