"""The directory of an experiment: what it holds, and when it is gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab_fakes import Fake
from moestream.cli.main import main
from moestream.lab import session
from moestream.lab.experiment_plan import Job
from moestream.lab.runs import RUNS, append


def test_a_directory_holds_its_verdict_and_is_gone_on_with_or_begun_anew_only_when_told(
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fakes: list[Fake] = []

    def fake(model: Any, out: Path) -> Fake:
        class Writing(Fake):
            def run(self, job: Job, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
                record = super().run(job, earlier)
                append(out / RUNS, record)
                return record

        fakes.append(Writing({"steps-of-64": 10.0}))
        return fakes[-1]

    monkeypatch.setattr(session, "BoxExecutor", fake)
    monkeypatch.setattr(session, "end_on_sigterm", lambda: None)
    out = tmp_path / "out"

    def lab(*more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "lab",
                    "run",
                    "prefill-batch",
                    "--model",
                    str(tiny("olmoe")),
                    "--quick",
                    "--out",
                    str(out),
                    *more,
                ]
            )
        return int(ended.value.code or 0)

    assert lab() == 0
    assert "verdict: disagrees" in capfd.readouterr().out
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["verdict"] == "disagrees" and verdict["model"]["name"].endswith(".gguf")
    runs = len(fakes[-1].ran)
    assert runs == len((out / RUNS).read_text().splitlines()) == 9

    assert lab() == 2
    assert "--resume goes on with it, --force begins anew" in capfd.readouterr().err
    whole = (out / RUNS).read_text().splitlines(keepends=True)
    (out / RUNS).write_text("".join(whole[:4]) + whole[4][:30])
    assert lab("--resume") == 0
    assert len(fakes[-1].ran) == runs - 4
    assert len((out / RUNS).read_text().splitlines()) == runs
    assert lab("--resume", "--ram", "9GB") == 3
    assert "begun with another setup: cap_bytes" in capfd.readouterr().err
    assert lab("--force") == 0
    assert len(fakes[-1].ran) == runs
