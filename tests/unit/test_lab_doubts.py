"""How far an experiment trusts its own times: its floor from repeats, and the bench's doubts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lab_fakes import Fake
from moestream.lab.bench_doubts import Typed
from moestream.lab.experiment import Claim, find
from moestream.lab.experiment_doubts import noise_of
from moestream.lab.experiment_plan import DEMO, Job
from moestream.lab.experiment_run import run_experiment
from moestream.lab.experiment_text import outcome_lines
from moestream.lab.verdicts import NOISE, Sample, judge


def ran(arm: str, rates: Sequence[float], prompt: str = "prose") -> list[dict[str, Any]]:
    return [
        {
            "arm": arm,
            "prompt": prompt,
            "round": number,
            "document": {"decode": {"step_ms": [1000 / rate] * 16}},
        }
        for number, rate in enumerate(rates)
    ]


def test_repeats_that_differ_raise_the_floor() -> None:
    steady = [*ran("a", [10.0, 10.1]), *ran("b", [10.0, 10.0]), *ran("c", [5.0, 5.05])]
    assert noise_of(steady) == NOISE
    apart = [*ran("a", [10.0, 13.0]), *ran("b", [10.0, 13.0]), *ran("c", [5.0, 6.5])]
    assert noise_of(apart) == pytest.approx(0.3)
    assert noise_of([]) == noise_of(ran("a", [10.0, 20.0])) == NOISE, "one pair says nothing"


def test_repeats_are_paired_in_their_order_on_one_prompt() -> None:
    """Texts differ, and that is no noise; neither is the arms' difference; a third repeat is left over."""
    texts = [
        *ran("a", [10.0] * 3),
        *ran("a", [30.0] * 3, "code"),
        *ran("b", [2.0] * 3),
        *ran("b", [1.0] * 3, "code"),
    ]
    assert noise_of(texts[::-1]) == NOISE


def test_a_claim_inside_the_experiments_own_floor_cannot_tell() -> None:
    claim = Claim("faster", "tok_per_s", "a", "b", at_least=1.1)
    samples = [
        Sample(arm, "prose", n, {"tok_per_s": rate})
        for arm, rate in (("a", 12.0), ("b", 10.0))
        for n in (0, 1)
    ]
    assert judge(claim, samples).word == "agrees"
    assert judge(claim, samples, noise=0.3).word == "cannot tell"


def test_an_experiment_says_its_floor_and_judges_by_it() -> None:
    """Every second repeat is 40 % faster, of every arm: the ratio stands, and is not believed."""
    one = find("four-ways")
    rates = {arm.key: 10.0 for arm in one.arms} | {"mlock": 12.6}
    noisy = run_experiment(one, Fake(rates, rounds=(1.0, 1.4)), DEMO)
    steady = run_experiment(one, Fake(rates), DEMO)
    assert (steady["noise"], steady["claims"][0]["word"]) == (NOISE, "agrees")
    assert noisy["noise"] == pytest.approx(0.4, abs=0.01)
    assert noisy["claims"][0]["word"] == "cannot tell"
    assert "repeats of one run differ by 40%: no time is known better" in outcome_lines(noisy)
    assert not any("repeats of one run" in line for line in outcome_lines(steady))


class Conditioned(Fake):
    """Of every record the same is planted; of each round the speed is so many times the first's."""

    def __init__(self, *factors: float, **planted: Any) -> None:
        super().__init__({arm.key: 10.0 for arm in find("recycling").arms}, rounds=factors or (1.0,))
        self.planted = planted

    def run(self, job: Job, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**super().run(job, earlier), **self.planted}


@pytest.mark.parametrize(
    ("planted", "kind", "text"),
    [
        ({"conditions": {"other_cpu_share": 0.4}}, "other load", "others use up to 40% of the CPUs"),
        ({"conditions": {"throttled": 3}}, "throttled", "slowed for heat or by a quota in 8 of 8 runs"),
        ({"conditions": {"stolen_share": 0.1}}, "stolen time", "taken by the hypervisor"),
        ({"modified": True}, "modified code", "not that of its commit"),
        ({"cached_bytes_before": None}, "cold state unknown", "are not known to be cold"),
    ],
)
def test_the_benchs_doubts_are_the_experiments(planted: dict[str, Any], kind: str, text: str) -> None:
    typed = Typed("moestream lab run recycling --quick --out here", "demo", "demo.gguf")
    outcome = run_experiment(find("recycling"), Conditioned(**planted), DEMO, quick=True, typed=typed)
    assert [doubt["kind"] for doubt in outcome["doubts"]] == [kind]
    assert text in outcome["doubts"][0]["text"]
    lines = outcome_lines(outcome)
    assert (
        lines[lines.index(f"doubt: {kind}: {outcome['doubts'][0]['text']}") + 1].strip()
        == outcome["doubts"][0]["next"]
    )


def test_a_session_that_slows_down_is_doubted() -> None:
    typed = Typed("moestream lab run recycling --quick --out here", "demo", "demo.gguf")
    outcome = run_experiment(find("recycling"), Conditioned(1.0, 0.8), DEMO, quick=True, typed=typed)
    assert [doubt["kind"] for doubt in outcome["doubts"]] == ["drift"]
    assert "20 % slower than the first" in outcome["doubts"][0]["text"]
    assert outcome["doubts"][0]["next"].endswith("`moestream lab run recycling --quick --out here --force`")
    steady = run_experiment(find("recycling"), Conditioned(), DEMO, quick=True)
    assert steady["doubts"] == []
