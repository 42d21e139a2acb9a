"""How a run ends before it is through, and what it does not begin."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from ggufs import rewrite
from moestream.box import Box
from moestream.make import make_model
from moestream.model import read_model
from run_command import CONTEXT, PROMPT, command, evicting_cap, refusal, run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("olmoe", "tiny,experts=32", "Q8_0", tmp_path_factory.mktemp("model") / "tiny.gguf")


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


def test_cow_is_refused_where_no_cap_is_enforced(tiny: Path) -> None:
    box = Box()
    if box.memory_limit().bytes < box.ram_bytes():
        pytest.skip("a memory cap is enforced on this process")
    words = (tiny, "-p", PROMPT, "-n", 4, "--mechanism", "cow+sync+lru", "--ctx", CONTEXT)
    assert "--i-know" in refusal(run(*words), 3)


#: Chat templates, and what is said of them where they do not work.
TEMPLATES = {
    "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}": None,
    "{% for %}": "its chat template does not work (TemplateSyntaxError: ",
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


def test_files_that_are_no_model(tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html><body>Not found</body></html>")
    assert "HTML" in refusal(run(page, "-p", PROMPT), 3)
    assert "no such file" in refusal(run(tmp_path / "absent.gguf", "-p", PROMPT), 3)
    assert "directory" in refusal(run(tmp_path, "-p", PROMPT), 3)


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
    done = run(tiny, "-p", "a", "-n", 1, "--json", out)
    assert done.returncode == 2
    assert done.stderr.startswith(f"moestream: --json {out}: ")
    assert tiny.read_bytes() == before
    assert Path("/dev/null").is_char_device()
