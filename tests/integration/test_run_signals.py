"""Signals to ``moestream run``: whatever stops it, the text so far, the summary and whole files are what is left."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moestream.trace.read import read_trace

TOKENS = 400


def begin(path: Path, *words: object, ignored: str = "", **options: Any) -> subprocess.Popen[bytes]:
    """A run that writes its first byte of text any moment; ``ignored``: a signal that it was started to ignore."""
    run = [sys.executable, "-m", "moestream", "run", str(path), "-p", "Once upon a time", "-n", str(TOKENS)]
    run += ["--ctx", "512", "--ram", "1GiB", "--mechanism", "arena", *map(str, words)]
    trap = ["sh", "-c", f'trap "" {ignored}; exec "$@"', "sh"] if ignored else []
    # Without a buffer, for what one holds after the first byte is lost to communicate(), which reads the pipe itself.
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    return subprocess.Popen([*trap, *run], **{**usual, **options})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_stops_a_run_leaves_the_text_and_whole_files(number: int, tiny: Any, tmp_path: Path) -> None:
    trace, out = tmp_path / "t.parquet", tmp_path / "run.json"
    with begin(tiny("olmoe"), "--trace", trace, "--json", out) as child:
        assert child.stdout is not None and child.stdout.read(1)
        child.send_signal(number)
        _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    assert said.decode().splitlines()[-1].endswith("; stopped")
    document = json.loads(out.read_text())
    assert document["ended"] == "stopped" and 0 < len(document["tokens"]) < TOKENS
    assert len(read_trace(trace).steps["step"]) >= len(document["tokens"]) - 1
    assert sorted(tmp_path.iterdir()) == [out, trace]


def test_a_run_under_nohup_outlives_its_terminal(tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    with begin(tiny("olmoe"), "--json", out, ignored="HUP") as child:
        assert child.stdout is not None and child.stdout.read(1)
        child.send_signal(signal.SIGHUP)
        _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    assert len(json.loads(out.read_text())["tokens"]) == TOKENS


@pytest.mark.parametrize("told", [True, False])
def test_a_terminal_that_is_closed(told: bool, tiny: Any, tmp_path: Path) -> None:
    """Nobody reads text and summary any more; what was to be written to files is. With and without a SIGHUP."""
    out = tmp_path / "run.json"
    ours, theirs = pty.openpty()
    with begin(tiny("olmoe"), "--json", out, stdout=theirs, stderr=theirs, start_new_session=True) as child:
        os.close(theirs)
        seen = b""
        while b"if none of it is in memory" not in seen and b"its rate is not known" not in seen:
            seen += os.read(ours, 4096)
        os.close(ours)
        if told:
            child.send_signal(signal.SIGHUP)
        code = child.wait(timeout=120)
    # Told while it still loads, it has nothing to show and nothing to write.
    assert code == 0 or (told and code == 130)
    assert (json.loads(out.read_text())["ended"] == "stopped") if code == 0 else not out.exists()


def test_a_run_that_is_halted_and_goes_on(tiny: Any, tmp_path: Path) -> None:
    """SIGSTOP interrupts system calls that nothing else does; a terminal's new size is nothing to it."""
    out = tmp_path / "run.json"
    texts = []
    for halts in (0, 20):
        with begin(tiny("olmoe"), "--quiet", "--json", out) as child:
            assert child.stdout is not None
            first = child.stdout.read(1)
            for _ in range(halts):
                child.send_signal(signal.SIGSTOP)
                assert os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT) is not None
                child.send_signal(signal.SIGWINCH)
                child.send_signal(signal.SIGCONT)
            rest, said = child.communicate(timeout=120)
        assert child.returncode == 0, said
        texts.append(first + rest)
        assert len(json.loads(out.read_text())["tokens"]) == TOKENS
    assert texts[0] == texts[1]
