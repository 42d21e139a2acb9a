"""The canned experiments: their files, their plans, and their verdicts on planted figures; nothing is run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab_fakes import Fake, made_record
from moestream.cli.main import main
from moestream.errors import UsageError
from moestream.lab.experiment import (
    Claim,
    Experiment,
    budget_bytes,
    experiments,
    find,
    parse,
)
from moestream.lab.experiment_figures import FIGURES
from moestream.lab.experiment_plan import DEMO, Job, check_cap, jobs, seconds
from moestream.lab.experiment_run import run_experiment
from moestream.lab.experiment_text import markdown, outcome_lines, total_seconds
from moestream.mechanism import Mechanism

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "moestream" / "lab" / "experiments"
ALL = list(experiments().values())
MINIMAL: dict[str, Any] = {
    "question": "Is it so?",
    "kind": "runs",
    "source": "open question",
    "found": "not stated",
    "measures": "speed",
    "measure": "tok_per_s",
    "arms": [{"key": "one", "mechanism": "arena"}, {"key": "two", "mechanism": "mapped+willneed"}],
    "claims": [{"says": "faster", "figure": "tok_per_s", "of": "one", "over": "two", "at_least": 1.1}],
}


def words(outcome: Mapping[str, Any]) -> list[str]:
    return [claim["word"] for claim in outcome["claims"]]


# -- the files ---------------------------------------------------------------------------------------------------


def test_every_file_is_listed_and_every_listed_one_is_there() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(experiments())


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_a_file_asks_its_question_on_its_first_line(one: Experiment) -> None:
    first = (FOLDER / f"{one.name}.toml").read_text().splitlines()[0]
    assert tomllib.loads(first) == {"question": one.question}
    assert one.question.endswith("?")


def test_every_question_of_the_two_documents_is_asked() -> None:
    """By the measure that answers it."""
    measures = {one.name: one.measure for one in ALL}
    assert measures["skew"] == "needed_80_share"
    assert measures["page-cache-hits"] == "found_in_page_cache"
    assert measures["fragmentation"] == "device_ops_per_read"
    caps = {arm.cap for arm in find("cache-or-page-cache").arms}
    assert caps == {0.25, 0.33, 0.5, 0.75}
    budgets = [arm.budget for arm in find("app-lru").arms if arm.mechanism.startswith("cow")]
    in_mb = [budget_bytes(text or "", DEMO.expert_bytes, DEMO.demand) / 1e6 for text in budgets]
    assert in_mb == pytest.approx([256, 512, 800, 1200], rel=0.01)


def test_all_of_them_take_an_hour_at_most_with_quick() -> None:
    assert total_seconds(ALL, quick=True) <= 3600
    assert total_seconds(ALL, quick=False) > total_seconds(ALL, quick=True)


def test_the_document_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lab", "list", "--markdown"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "experiments.md").read_text() == markdown(ALL)


def test_the_list_is_there_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lab", "list", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(experiments())
    assert all(row["seconds_quick"] <= row["seconds"] for row in rows)


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, "unknown key 'colour' in the experiment"),
        ({"settings": {"repeat": 3}}, "unknown key 'repeat' in [settings]: did you mean repeats?"),
        ({"settings": {"tokens": 0}}, "[settings] tokens cannot be 0"),
        ({"settings": {"cap": -1.0}}, "[settings] cap cannot be -1.0"),
        ({"settings": {"prompts": ["verse"]}}, "no prompt 'verse'"),
        (
            {"arms": [{"key": "a", "mechanism": "arena", "caps": 1}]},
            "unknown key 'caps' in [[arms]] number 1",
        ),
        ({"arms": [{"key": "a"}]}, "[[arms]] number 1 lacks one of: mechanism"),
        ({"arms": [{"key": "a", "mechanism": "arna"}]}, "arm a: unknown store 'arna': did you mean arena?"),
        ({"arms": [{"key": "a", "mechanism": "arena", "budget": "much"}]}, "not a size: 'much'"),
        ({"arms": [{"key": "a", "mechanism": "arena", "file": "other"}]}, "no file 'other'"),
        ({"arms": [{"key": "a", "mechanism": "arena"}] * 2}, "two arms have one key"),
        ({"arms": []}, "kind runs needs [[arms]]"),
        ({"claims": []}, "nothing to agree with"),
        ({"claims": [{"says": "x", "figure": "tok_per_s", "of": "one"}]}, "neither at_least nor at_most"),
        ({"claims": [{"says": "x", "figure": "tok_per_s", "of": "three", "at_least": 1}]}, "no arm 'three'"),
        (
            {"claims": [{"says": "x", "figure": "speed", "of": "one", "at_least": 1}]},
            "no figure 'speed' of runs",
        ),
        ({"measure": "overlap_1"}, "no figure 'overlap_1' of runs"),
        ({"kind": "guess"}, "kind 'guess': one of runs"),
        ({"question": ""}, "question is missing"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse({**MINIMAL, **change}, "wrong")
    assert said in str(refused.value)


def test_the_question_must_come_first() -> None:
    with pytest.raises(UsageError, match="first line"):
        parse({"kind": "runs", **{k: v for k, v in MINIMAL.items() if k != "kind"}}, "wrong")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no experiment 'skw': did you mean skew\?"):
        find("skw")


@pytest.mark.parametrize(
    "words_", [["lab", "run", "nothing-like-it"], ["lab", "run", "skew", "--ram", "lots"]]
)
def test_wrong_words_end_with_code_2_and_leave_nothing(
    words_: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words_)
    assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_ram_is_refused_where_every_cap_is_part_of_the_question() -> None:
    with pytest.raises(UsageError, match="about its own caps"):
        check_cap(find("cache-or-page-cache"), 10**9)
    check_cap(find("recycling"), 10**9)


# -- the plans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [one for one in ALL if one.kind != "probe"], ids=lambda one: one.name)
@pytest.mark.parametrize("quick", [True, False])
def test_a_plan_has_every_arm_in_every_cell_and_turns_round(one: Experiment, quick: bool) -> None:
    settings = one.quick if quick else one.settings
    order = jobs(one, settings, DEMO)
    cells = len(settings.prompts) * settings.repeats
    assert len(order) == cells * len(one.arms)
    assert len({job.key for job in order}) == len(order)
    each = [order[n * len(one.arms) : (n + 1) * len(one.arms)] for n in range(cells)]
    keys = [arm.key for arm in one.arms]
    for number, cell in enumerate(each):
        assert [job.arm.key for job in cell] == (keys[::-1] if number % 2 else keys)
        assert [job.position for job in cell] == list(range(len(keys)))
    assert all(job.trace == (one.kind in ("trace", "replay")) for job in order)
    assert seconds(one, quick) > 0


def test_caps_are_shares_and_ram_replaces_only_the_settings() -> None:
    one = find("app-lru")
    caps = {job.arm.key: job.cap_bytes for job in jobs(one, one.settings, DEMO, cap_bytes=2 << 30)}
    assert set(caps.values()) == {2 << 30}, "a cache pays or not under equal caps"
    without = {job.arm.key: job.cap_bytes for job in jobs(one, one.settings, DEMO)}
    assert set(without.values()) == {int(1.35 * DEMO.bytes) >> 20 << 20}
    resident = next(job for job in jobs(find("io-floor"), find("io-floor").quick, DEMO, cap_bytes=2 << 30))
    assert resident.arm.key == "resident" and resident.cap_bytes is None


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_every_claim_has_all_three_verdicts(one: Experiment) -> None:
    from moestream.lab.verdicts import Sample, judge

    for claim in one.claims:
        low = claim.at_least if claim.at_least is not None else claim.at_most / 4  # type: ignore[operator]
        high = claim.at_most if claim.at_most is not None else low * 4
        inside, outside = (low * high) ** 0.5 if low > 0 else high / 2, high * 10
        if claim.at_most is None:
            outside = low / 10
        elif inside == 0:
            inside = high
        if claim.larger == claim.figure:
            outside = 1.0  # of the larger over the smaller never below
        prompt = claim.prompt or "prose"

        def samples(values: list[float], claim: Claim = claim, prompt: str = prompt) -> list[Any]:
            sizes = {claim.larger: 2.0} if claim.larger not in (None, claim.figure) else {}
            ours = [
                Sample(claim.of, prompt, n, {**sizes, claim.figure: value}) for n, value in enumerate(values)
            ]
            less = {**{name: 1.0 for name in sizes}, claim.figure: 1.0}
            theirs = [Sample(claim.over or "", prompt, n, less) for n in range(len(values))]
            return [*ours, *theirs]

        assert judge(claim, samples([inside] * 3)).word in (
            ("agrees",) if not FIGURES[claim.figure].timed else ("agrees", "cannot tell")
        ), claim
        assert judge(claim, samples([outside] * 3)).word == "disagrees", claim
        assert judge(claim, samples([inside, outside])).word == "cannot tell", claim
        assert judge(claim, []).word == "cannot tell"


# -- whole experiments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [one for one in ALL if one.kind == "runs"], ids=lambda one: one.name)
def test_every_experiment_of_runs_ends_in_a_verdict_with_its_figures_side_by_side(one: Experiment) -> None:
    outcome = run_experiment(one, Fake(), DEMO, quick=True)
    assert outcome["verdict"] in ("agrees", "disagrees", "cannot tell")
    assert set(outcome["table"]) == {arm.key for arm in one.arms}
    assert json.loads(json.dumps(outcome)) == outcome
    text = "\n".join(outcome_lines(outcome))
    assert one.question in text and f"verdict: {outcome['verdict']}" in text
    assert all(arm.key in text for arm in one.arms)


def test_locking_the_dense_weights_in_all_three_verdicts() -> None:
    """+26 %, -55 % and a slower worker agree with Finding 7; equal arms do not; a noisy box cannot tell."""
    one = find("four-ways")
    as_found = {"no-mlock": 10.0, "mlock": 12.6, "write-in-place": 4.5, "moved-in": 20.0, "background": 9.0}
    agreed = run_experiment(one, Fake(as_found), DEMO)
    assert (agreed["verdict"], words(agreed)) == ("agrees", ["agrees"] * 4)
    assert agreed["claims"][0]["seen"]["value"] == pytest.approx(1.26)
    assert agreed["claims"][0]["found"] == 1.26
    other = run_experiment(one, Fake({**as_found, "mlock": 9.0, "background": 7.0}), DEMO)
    assert (other["verdict"], words(other)) == ("disagrees", ["disagrees", "agrees", "agrees", "agrees"])
    equal = run_experiment(one, Fake({**as_found, "mlock": 10.3, "background": 9.0}), DEMO)
    assert (equal["verdict"], words(equal)[0]) == ("cannot tell", "cannot tell")


def test_arms_of_different_lengths_are_compared_over_the_steps_both_made() -> None:
    """A long run that is slow in its first 7 steps and fast after is no faster than a short one as slow."""

    class Warming(Fake):
        def run(self, job: Job, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
            record = super().run(job, earlier)
            steps = record["document"]["decode"]["step_ms"]
            record["document"]["decode"]["step_ms"] = [200.0] * 7 + [10.0] * (len(steps) - 7)
            return record

    one = find("four-ways")
    outcome = run_experiment(one, Warming(), DEMO)
    assert {arm.key: arm.tokens for arm in one.arms}["write-in-place"] == 8
    assert outcome["claims"][1]["seen"]["value"] == pytest.approx(1.0)
    assert outcome["claims"][0]["seen"]["n"] == outcome["claims"][1]["seen"]["n"] == 9
    rates = {arm: of["tok_per_s"]["value"] for arm, of in outcome["table"].items()}
    assert rates["no-mlock"] > 10 * rates["write-in-place"]


@pytest.mark.parametrize("copy", [1.67, 0.6])
def test_a_larger_quantisation_is_found_whichever_file_it_is(copy: float) -> None:
    """Faults a GB double with the bytes; the copy has more of them or fewer than the model, and the claim holds."""

    class Sized(Fake):
        def run(self, job: Job, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
            size = copy if job.arm.file == "requantized" else 1.0
            larger = size >= 1 if job.arm.file == "requantized" else copy < 1
            steps = job.tokens - 1
            rate = 10.0 / (1.5 if larger else 1.0)
            faults = round(1000 * size * (2 if larger else 1)) * steps
            record = made_record(job, tok_per_s=rate, majflt=faults)
            record["document"]["model"]["demand_bytes_per_token"] = 1e9 * size
            return record

    ratio = max(copy, 1 / copy)
    faults = run_experiment(find("faults-and-bytes"), Sized(), DEMO)
    assert words(faults)[:2] == ["agrees", "agrees"]
    assert faults["claims"][0]["seen"]["value"] == pytest.approx(2.0)
    assert faults["claims"][1]["seen"]["value"] == pytest.approx(ratio)
    quants = run_experiment(find("two-quants"), Sized(), DEMO)
    assert [claim["seen"]["value"] for claim in quants["claims"][:2]] == pytest.approx([ratio, 1 / 1.5])
    assert words(quants)[:2] == ["agrees", "agrees"]


def test_the_memory_an_arena_leaves_is_the_page_caches_where_it_is_shared() -> None:
    one = find("cache-or-page-cache")
    shared = [arm for arm in one.arms if arm.budget is not None]
    assert {arm.key for arm in shared} == {"half-25", "half-33", "half-50", "half-75", "quarter-33"}
    assert all(Mechanism.parse(arm.mechanism).has("cached") for arm in shared)
    pairs = {(claim.of, claim.over) for claim in one.claims}
    for cap in (25, 33, 50, 75):
        assert {(f"half-{cap}", f"own-{cap}"), (f"half-{cap}", f"page-cache-{cap}")} <= pairs


def test_skew_in_all_three_verdicts() -> None:
    one = find("skew")

    def ran(*shares: float) -> str:
        layers = [{"needed_80_share": share, "distinct_in_64_share": 0.8} for share in shares]
        return str(run_experiment(one, Fake(layers=layers), DEMO, quick=True)["verdict"])

    assert ran(20.5 / 64, 25 / 64, 32 / 64) == "agrees"
    assert ran(60 / 64, 62 / 64, 63 / 64) == "disagrees"
    assert ran(10 / 64, 60 / 64) == "cannot tell"


def test_a_replay_compares_prompts_by_themselves() -> None:
    one = find("half-life")
    rates = {f"{p}@{b}": {"replayed_hit_rate": 0.5} for p in one.replay.policies for b in one.replay.budgets}
    for key, rate in {"lru@25%": 0.44, "lfu-decay:16@25%": 0.55, "lfu-decay:32@25%": 0.57}.items():
        rates[key] = {"replayed_hit_rate": rate}
    rates["lfu-decay:8@25%"] = {"replayed_hit_rate": 0.56}
    rates["lfu-adapt@25%"] = {"replayed_hit_rate": 0.56}
    outcome = run_experiment(one, Fake(replays=rates), DEMO, quick=True)
    assert words(outcome) == ["agrees", "agrees", "disagrees", "agrees"]
    assert [claim["seen"]["n"] for claim in outcome["claims"]] == [2, 1, 1, 2]


def test_a_probe_pairs_its_rounds() -> None:
    """The disk doubles its rate from round to round; the ratio of the two cases does not move."""
    one = find("alignment-alone")
    shots = {
        f"alignment-{state}/{where}": [{"bytes_per_s": rate * factor} for rate in (1e9, 2e9, 4e9)]
        for state, gain in (("warm", 3.6), ("cold", 1.0))
        for where, factor in (("align4k", 1.0), ("align2m", gain))
    }
    outcome = run_experiment(one, Fake(shots=shots), DEMO, quick=True)
    assert (outcome["verdict"], words(outcome)) == ("agrees", ["agrees", "agrees"])
    assert outcome["claims"][0]["seen"]["value"] == pytest.approx(3.6)


def test_runs_that_do_not_count_are_named_and_left_out_of_every_figure() -> None:
    fake = Fake({"moved": 10.0, "fresh": 5.0})
    fake.changes["fresh"] = {"valid": False, "invalid": ["swapped: 9 MB"], "document": None}
    fake.excuses["huge"] = "no huge pages"
    outcome = run_experiment(find("recycling"), fake, DEMO, quick=True)
    assert "fresh" not in outcome["table"] and "huge" not in outcome["table"]
    assert outcome["left_out"] == {"huge": "no huge pages"}
    assert outcome["not_counted"] == [f"fresh, prose, round {n}: swapped: 9 MB" for n in (1, 2)]
    assert outcome["verdict"] == "cannot tell"
    assert outcome["claims"][0]["why"] == "no valid value of fresh"


def test_what_the_engine_refuses_is_tried_once_and_left_out() -> None:
    fake = Fake()
    refusal = {"valid": False, "invalid": ["failed: exit code 3"], "document": None, "returncode": 3}
    fake.changes["huge"] = {**refusal, "error": "loading\narena/thp: no slab holds a whole 2 MiB page\n"}
    outcome = run_experiment(find("recycling"), fake, DEMO, quick=True)
    assert [job.arm.key for job in fake.ran].count("huge") == 1
    assert outcome["left_out"] == {"huge": "arena/thp: no slab holds a whole 2 MiB page"}
    assert outcome["not_counted"] == []


def test_only_a_reader_that_asks_first_knows_what_was_in_the_page_cache() -> None:
    outcome = run_experiment(find("mincore-hybrid"), Fake(), DEMO, quick=True)
    asked = {arm for arm, of in outcome["table"].items() if "found_in_page_cache" in of}
    assert asked == {"mincore", "cachestat"}


def test_what_was_run_before_is_not_run_again() -> None:
    one = find("recycling")
    order = jobs(one, one.quick, DEMO)
    earlier = [made_record(job) for job in order[:5]]
    earlier[1]["valid"] = False
    fake = Fake()
    again = run_experiment(one, fake, DEMO, quick=True, earlier=earlier)
    assert [job.key for job in fake.ran] == [order[1].key, *(job.key for job in order[5:])]
    assert fake.begun == [len(order)]
    whole = run_experiment(one, Fake(), DEMO, quick=True)
    assert again["table"] == whole["table"]
    finished = Fake()
    run_experiment(one, finished, DEMO, quick=True, earlier=[made_record(job) for job in order])
    assert finished.ran == [] and finished.begun == []


@pytest.mark.parametrize(
    "older",
    [{"asked": "arena/fresh"}, {"cap_bytes": 1 << 30}, {"tokens": 7}, {"threads": 3}, {"valid": False}],
)
def test_a_run_made_as_its_arm_was_asked_for_before_is_made_again(older: dict[str, Any]) -> None:
    one = find("recycling")
    order = jobs(one, one.quick, DEMO)
    earlier = [made_record(job) for job in order]
    earlier[2] = {**earlier[2], **older}
    fake = Fake()
    run_experiment(one, fake, DEMO, quick=True, earlier=earlier)
    assert [job.key for job in fake.ran] == [order[2].key]
    none = Fake()
    run_experiment(one, none, DEMO, quick=True, earlier=[*earlier, made_record(order[2])])
    assert none.ran == [], "what was made again is taken"


def test_a_single_time_says_nothing_and_a_single_count_does() -> None:
    document = {**MINIMAL, "settings": {"prompts": ["prose"], "repeats": 1}}
    timed = run_experiment(parse(document, "one"), Fake({"one": 99.0}), DEMO)
    assert timed["verdict"] == "cannot tell" and "1 value of a time" in timed["claims"][0]["why"]
    claims = [{"says": "half", "figure": "hit_rate", "of": "one", "at_least": 0.5, "at_most": 0.5}]
    counted = run_experiment(parse({**document, "claims": claims}, "one"), Fake(), DEMO)
    assert counted["verdict"] == "agrees"


def test_the_floor_takes_its_compute_from_the_arm_in_memory() -> None:
    """20 tokens a second in memory, 1000 bytes a token at 1 MB/s: 50 ms of compute rule, and 10 tokens a second are
    half of the floor's rate."""
    fake = Fake({"resident": 20.0, "default": 10.0, "study": 5.0})
    outcome = run_experiment(find("io-floor"), fake, DEMO, quick=True)
    shares = {arm: of["of_floor"]["value"] for arm, of in outcome["table"].items()}
    assert shares == pytest.approx({"resident": 1.0, "default": 0.5, "study": 0.25})


def test_a_rate_of_bytes_is_shown_as_one() -> None:
    shots = {f"advice/{how}": [{"bytes_per_s": 5e8}] * 3 for how in ("normal", "random", "willneed")}
    lines = outcome_lines(run_experiment(find("advice"), Fake(shots=shots), DEMO, quick=True))
    assert next(line for line in lines if line.startswith("advice/normal")).split()[1:3] == ["500", "MB/s"]
