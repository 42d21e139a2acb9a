"""What ``bench --trace`` writes beside its records: a trace of each streamed run, of the same steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from test_bench_run import _SHAPE, run

from moestream.lab.bench_journal import read_runs
from moestream.trace.read import read_trace


def test_each_streamed_run_has_its_trace(tiny: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(tiny("olmoe", _SHAPE, "Q4_K"), out, "--mechanisms", "arena/fresh+sync+lru", "--trace")
    assert done.returncode == 0, done.stderr
    traced = [record for record in read_runs(out / "runs.jsonl") if record.get("trace")]
    assert any(record["arm"].startswith("arena/fresh+sync+lru") for record in traced)
    for record in traced:
        trace = read_trace(out / record["trace"])
        assert trace.identity == record["model"]["identity"]
        document = record["document"]
        tokens = document["prefill"]["tokens"] + document["decode"]["tokens"]
        assert sum(trace.steps["tokens"].tolist()) == tokens > 5
