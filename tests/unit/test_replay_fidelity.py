"""What the engine did is what replay says it did, step by step: its own routes, its own wishes, its own counters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from answers import answer, prompt_tokens
from conftest import evicted, load
from moestream.cli.main import main
from moestream.replay import BELADY, check_fidelity, parse_budgets, prepare, replay
from moestream.trace import Trace
from moestream.trace.trace import SLAB_KINDS
from replay_traces import Kept


def traced(path: Path, mechanism: str, prompt: int, experts: int = 0, **arguments: Any) -> tuple[Trace, bool]:
    """The trace of a prompt and twelve tokens, and whether anything had to leave."""
    sink = Kept()
    llama = load(path, mechanism, experts=experts, trace=sink, **arguments)
    answer(llama, prompt_tokens(prompt, llama.n_vocab()), 12)
    left = evicted(llama)
    llama.close()
    return sink.builder.build(), left


@pytest.mark.parametrize(
    ("arch", "quant", "mechanism", "prompt"),
    [
        ("olmoe", "Q4_K", "arena+uring:8+lru+none", 5),
        ("olmoe", "Q4_K", "arena+uring:8+lfu-decay:16+gate:2", 5),
        ("olmoe", "Q4_K", "arena+sync+sieve+previous:4", 3),
        ("olmoe", "Q4_K", "arena+uring:8+s3fifo+random:4", 3),
        ("qwen2moe", "Q4_K", "arena+uring:8+fifo+gate:4", 20),
        ("olmoe", "Q4_K", "arena+uring:8+dontneed:1+gate:2", 5),
        ("olmoe", "Q4_K", "arena+uring:8+lfu-adapt+gate:2", 5),
        # Two parts; a prompt whose every layer is read early.
        ("olmoe", "Q4_K_M", "arena+threads:2+lru-layer+gate:8", 40),
        ("olmoe", "Q4_K", "arena+sync+lfu+none", 5),
        ("olmoe", "Q4_K", "arena/buffered+threads:3x4+none+none", 5),
        ("olmoe", "Q4_K", "arena/fresh+sync+lru+previous:2", 5),
        ("olmoe", "Q4_K", "arena/populate+uring:4+fifo+none", 5),
        ("olmoe", "Q4_K", "cow+sync+lru+none", 5),
        ("olmoe", "Q4_K", "shared+threads:2+lfu-adapt+none", 5),
        # Layers without experts before those with.
        ("deepseek2", "Q4_K", "arena+uring:8+lfu-decay:16+gate:2", 5),
    ],
)
def test_replay_of_the_recorded_mechanism_is_the_record(
    tiny: Callable[..., Path], arch: str, quant: str, mechanism: str, prompt: int
) -> None:
    trace, left = traced(tiny(arch, quant=quant), mechanism, prompt, i_know=True)
    assert left
    recording = prepare(trace)
    fidelity = check_fidelity(trace, recording)
    assert fidelity is not None
    assert fidelity.different_steps == 0, fidelity
    assert (fidelity.hits, fidelity.misses) == (fidelity.recorded_hits, fidelity.recorded_misses)
    assert fidelity.misses > 0
    done = replay(recording, trace.meta["mechanism"].split("+")[2], recording.capacities)
    table = done.per_step()
    for name in ("early", "bytes", "early_bytes"):
        assert len(table[name]) == len(trace.steps["step"])
    assert table["early"].tolist() == trace.steps["speculative_issued"].tolist()
    assert not done.refused.any()


@pytest.mark.parametrize("seeded", ["pinned:{}+none", "lru+oracle:{}"])
def test_what_a_mechanism_reads_from_a_trace_is_replayed_too(
    seeded: str, tiny: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, first, second = tiny("olmoe"), tmp_path / "first.parquet", tmp_path / "second.parquet"
    for file, mechanism in ((first, "lru+none"), (second, seeded.format(first))):
        llama = load(path, f"arena+uring:8+{mechanism}", trace=str(file))
        answer(llama, prompt_tokens(5, llama.n_vocab()), 12)
        llama.close()
    policy = seeded.format(first).partition("+")[0]
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(second), "--policy", policy, "--budget", "recorded", "--json", "-"])
    assert ended.value.code == 0
    document = json.loads(capfd.readouterr().out)
    (recorded,) = [trace["recorded"] for trace in document["traces"]]
    assert recorded["different_steps"] == 0 < recorded["misses"]


def test_bytes_are_those_of_the_slabs_read(tiny: Callable[..., Path]) -> None:
    """Without early reads there is no read that was taken back: every byte is a miss's."""
    trace, _ = traced(tiny("olmoe"), "arena+uring:8+lru+none", 5)
    done = replay(prepare(trace), "lru", prepare(trace).capacities)
    assert done.per_step()["bytes"].tolist() == trace.steps["bytes_read"].tolist()
    demand = trace.slabs.kind == SLAB_KINDS.index("demand")
    assert done.bytes.sum() == trace.slabs.bytes[demand].sum()


def test_a_recorded_file_says_so_itself(
    tiny: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.parquet"
    llama = load(tiny("olmoe"), "arena+uring:8+lfu-decay:16+gate:2", trace=str(file))
    answer(llama, prompt_tokens(5, llama.n_vocab()), 12)
    llama.close()
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(file), "--policy", "lru,belady", "--json", "-"])
    assert ended.value.code == 0
    document = json.loads(capfd.readouterr().out)
    (recorded,) = [trace["recorded"] for trace in document["traces"]]
    assert recorded["different_steps"] == 0 < recorded["misses"]


def test_recorded_budget_is_split_as_the_engine_did(tiny: Callable[..., Path]) -> None:
    trace, _ = traced(tiny("olmoe"), "arena+uring:8+lru+none", 5, experts=6 << 20)
    recording = prepare(trace)
    by_bytes, as_recorded = parse_budgets(f"{trace.meta['budget']['expert_bytes']},recorded", [recording])
    assert by_bytes.capacities(recording) == as_recorded.capacities(recording) == recording.capacities


def test_a_mapped_store_can_be_replayed_too(tiny: Callable[..., Path]) -> None:
    """It kept nothing itself, so there is nothing to reproduce; what an arena would have done can be said."""
    trace = traced_mapped(tiny("olmoe"))
    recording = prepare(trace)
    assert check_fidelity(trace, recording) is None
    (budget,) = parse_budgets("50%", [recording])
    assert replay(recording, BELADY, budget.capacities(recording)).counters["hits"] > 0


def traced_mapped(path: Path) -> Trace:
    sink = Kept()
    llama = load(path, "mapped+willneed", trace=sink)
    answer(llama, prompt_tokens(5, llama.n_vocab()), 6)
    llama.close()
    return sink.builder.build()
