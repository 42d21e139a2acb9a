"""Compute by threads: which counts run, what is left out and why, and the smaller model of the same work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moestream.box import Box
from moestream.errors import RefusedError
from moestream.make import make_model
from moestream.model import Model, read_model
from moestream.probe.compute import FULL, doublings, measure_compute, run_worker, thread_counts
from moestream.probe.shrink import cut_tensors, kept_experts, shrunk_bytes, write_shrunk


def answer(decode: list[float], prefill: list[tuple[int, float]]) -> str:
    return json.dumps({"load_s": 1.0, "decode_s": decode, "prefill": prefill})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return read_model(make_model("deepseek2", "tiny,experts=32", "Q4_K", path))


class Worker:
    """Stands for the process: an answer by count of threads, taking so many seconds of a clock that it moves."""

    def __init__(self, answers: dict[int, tuple[int | None, str, str]], takes: float = 1.0) -> None:
        self.answers, self.takes, self.now = answers, takes, 0.0
        self.asked: list[int] = []
        self.paths: list[str] = []

    def clock(self) -> float:
        return self.now

    def __call__(self, command: Sequence[str], seconds: float) -> tuple[int | None, str, str]:
        count = int(command[command.index("--threads") + 1])
        self.asked.append(count)
        self.paths.append(command[3])
        assert Path(command[3]).exists()
        self.now += min(self.takes, seconds)
        return self.answers[count]


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def be(count: int, available: int = 64 << 30) -> None:
        monkeypatch.setattr(Box, "cpus", lambda self: count)
        monkeypatch.setattr(Box, "available_memory", lambda self: available)

    return be


def test_all_processors_come_first_and_then_one() -> None:
    assert thread_counts(1, True) == [1]
    assert thread_counts(2, True) == [2, 1]
    assert thread_counts(6, True) == [6, 1, 2, 4, 3, 5]
    assert thread_counts(8, True) == [8, 1, 2, 4, 3, 5, 6, 7]
    assert thread_counts(8, False) == [8]
    assert doublings(6) == [6, 1, 2, 4]


def test_the_best_count_is_that_of_the_shortest_median(model: Model, cpus: Callable[..., None]) -> None:
    cpus(2)
    worker = Worker(
        {
            2: (0, answer([0.5, 0.2, 0.3], [(16, 0.5), (128, 1.0), (128, 2.0)]), ""),
            1: (0, answer([0.25, 0.25], [(64, 1.0)]), ""),
        }
    )
    found = measure_compute(model, FULL, run=worker, clock=worker.clock)
    assert worker.asked == [2, 1]
    assert found["best"] == {"threads": 1, "s_per_token": 0.25, "prefill_tok_per_s": 64.0}
    assert found["by_threads"]["2"]["s_per_token"]["median"] == 0.3
    assert found["by_threads"]["2"]["prefill_tok_per_s"] == 96.0
    assert (found["model"], found["reason"], found["not_measured"]) == ("itself", None, {})


def test_a_count_that_would_end_too_late_is_left_out(model: Model, cpus: Callable[..., None]) -> None:
    cpus(4)
    worker = Worker({4: (0, answer([0.1], []), "")}, takes=40.0)
    found = measure_compute(model, replace(FULL, seconds=70), run=worker, clock=worker.clock)
    assert worker.asked == [4]
    assert found["not_measured"] == dict.fromkeys(("1", "2", "3"), "the time was up before its turn")
    assert found["best"] == {"threads": 4, "s_per_token": 0.1, "prefill_tok_per_s": None}


def test_a_worker_that_was_stopped_still_gave_its_last_line(model: Model, cpus: Callable[..., None]) -> None:
    cpus(1)
    worker = Worker({1: (None, answer([0.1], []) + '\n{"load_s": 1.0, "deco', "")})
    found = measure_compute(model, FULL, run=worker, clock=worker.clock)
    assert found["best"]["s_per_token"] == 0.1
    worker = Worker({1: (None, "", "")})
    found = measure_compute(model, replace(FULL, seconds=9), run=worker, clock=worker.clock)
    assert found["best"] is None
    assert found["model"] is None
    assert found["reason"] == "loading and a first token took longer than 9 s"


def test_what_the_engine_says_is_the_reason(model: Model, cpus: Callable[..., None]) -> None:
    cpus(1)
    worker = Worker({1: (4, "", "warning\nthe disk is gone\n")})
    found = measure_compute(model, FULL, run=worker, clock=worker.clock)
    assert found["best"] is None
    assert found["reason"] == "the disk is gone"


def test_a_model_that_does_not_fit_is_measured_by_a_smaller_one(
    model: Model, cpus: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpus(1, (1 << 30) + model.bytes - 1)
    worker = Worker({1: (0, answer([0.1], []), "")})
    found = measure_compute(model, FULL, run=worker, clock=worker.clock)
    assert found["model"] == "a smaller one of the same work"
    assert worker.paths[0] != str(model.paths[0])
    assert not Path(worker.paths[0]).exists()
    assert list((tmp_path / "moestream").iterdir()) == []


def test_where_not_even_that_fits_nothing_is_started(model: Model, cpus: Callable[..., None]) -> None:
    cpus(1, 1 << 20)
    worker = Worker({})
    found = measure_compute(model, FULL, run=worker, clock=worker.clock)
    assert worker.asked == []
    assert found["best"] is None
    assert "even a smaller model" in found["reason"]


def test_a_worker_past_its_time_is_killed_and_its_output_kept() -> None:
    script = "import time; print('first', flush=True); time.sleep(60)"
    code, out, _ = run_worker([sys.executable, "-c", script], 3.0)
    assert code is None
    assert out in ("first\n", "")  # a box too busy to start an interpreter in three seconds has said nothing
    assert run_worker([sys.executable, "-c", "raise SystemExit(3)"], 60.0)[0] == 3


def test_the_smaller_model_does_the_same_work_for_a_token(model: Model, tmp_path: Path) -> None:
    small = read_model(write_shrunk(model, tmp_path / "small.gguf"))
    assert small.demand_bytes_per_token == model.demand_bytes_per_token
    assert small.n_experts == kept_experts(model) == 2 * model.n_experts_used
    assert small.n_vocab == model.n_vocab
    assert abs(small.bytes - shrunk_bytes(model)) < 1 << 16
    assert list(tmp_path.iterdir()) == [tmp_path / "small.gguf"]
    ours, theirs = small.paths[0].read_bytes(), model.paths[0].read_bytes()
    for cut, tensor in zip(cut_tensors(model), small.tensors, strict=True):
        assert (tensor.name, tensor.shape, tensor.nbytes) == (cut.tensor.name, cut.shape, cut.nbytes)
        begin = cut.tensor.offset
        assert ours[tensor.offset : tensor.offset + tensor.nbytes] == theirs[begin : begin + cut.nbytes]


def test_experts_chosen_by_groups_stay_even(model: Model) -> None:
    grouped = replace(model, metadata={**model.metadata, "deepseek2.expert_group_count": 3})
    assert kept_experts(grouped) == 6


def test_layers_that_differ_cannot_be_cut_alike(model: Model) -> None:
    first, *rest = model.banks
    with pytest.raises(RefusedError, match="layers differ"):
        kept_experts(replace(model, banks=(replace(first, used=1), *rest)))
