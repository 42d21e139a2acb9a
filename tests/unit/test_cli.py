"""The command line without a model: help, wrong words, exit codes, and what `run` says and writes."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ggufs import write_gguf
from moestream import __version__, errors
from moestream.box import ProcessMemory
from moestream.cli import main as cli
from moestream.cli.banner import Bar, held_bytes, summary
from moestream.report import check_writable, write_json
from typed import typed


def moestream(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moestream", *words], capture_output=True, text=True, timeout=120, **options
    )


def refusal(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of an error, after a look at the exit code and that nothing else was said."""
    assert done.returncode == code, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("moestream: ")
    return lines[0]


def test_help_names_every_command() -> None:
    done = moestream("--help")
    assert done.returncode == 0
    for name, line in cli.COMMANDS.items():
        assert any(row.split() == [name, *line.split()] for row in done.stdout.splitlines()), name


def test_help_imports_no_command_and_neither_rich_nor_numpy() -> None:
    script = (
        "import sys\n"
        "from moestream.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"rich", "numpy", "llama_cpp", "gguf", "moestream.cli.run", "moestream.cli.plan"}


def test_the_version() -> None:
    done = moestream("--version")
    assert (done.returncode, done.stdout) == (0, f"moestream {__version__}\n")


def test_without_a_word_the_help() -> None:
    done = moestream()
    assert done.returncode == 2
    assert "Commands:" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnu"], "did you mean run"),
        (["--nope"], "No such option: --nope"),
        (["run"], "Missing argument"),
        (["run", "x.gguf"], "Missing option '-p'"),
        (["run", "x.gguf", "-p", "a", "-n", "many"], "--tokens"),
        (["run", "x.gguf", "-p", "a", "-n", "-1"], "--tokens"),
        (["run", "x.gguf", "-p", "a", "--threads", "0"], "--threads"),
        (["run", "x.gguf", "-p", "a", "--ram", "lots"], "not a size: 'lots'"),
        (["run", "x.gguf", "-p", "a", "--ram", "4"], "write 4GB or 4GiB"),
        (["plan", "x.gguf", "--ram", "4"], "write 4GB or 4GiB"),
        (["bench", "x.gguf", "--ram", "4"], "write 4GB or 4GiB"),
        (["lab", "run", "all", "--ram", "4"], "write 4GB or 4GiB"),
        (["run", "x.gguf", "-p", "a", "--json", "absent/out.json"], "no directory absent"),
        (["run", "x.gguf", "-p", "a", "--json", "."], "is a directory"),
    ],
)
def test_wrong_words(words: list[str], says: str, tmp_path: Path) -> None:
    assert says in refusal(typed(*words, cwd=tmp_path), 2)


def test_the_demo_model_that_is_not_made(tmp_path: Path) -> None:
    done = moestream("run", "demo", "-p", "a", env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert "moestream demo-model" in refusal(done, 3)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.MoestreamError, 4),
        (errors.ReadError, 4),
        (errors.Cancelled, 4),
        (errors.UsageError, 2),
        (errors.MechanismError, 3),
        (errors.ModelError, 3),
        (errors.BudgetError, 3),
        (errors.AbiError, 3),
        (errors.EngagementError, 3),
    ],
)
def test_errors_become_one_line_and_their_code(
    error: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(model: Any) -> None:
        raise error(f"{model}: broken\n  in two lines")

    monkeypatch.setattr("moestream.cli.inspect.locate", fail)
    with pytest.raises(SystemExit) as left:
        cli.main(["inspect", "some.gguf"])
    assert left.value.code == code
    assert capfd.readouterr() == ("", "moestream: some.gguf: broken in two lines\n")


def test_what_nobody_foresaw_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(model: Any) -> None:
        raise ZeroDivisionError("by nothing\n  at all")

    monkeypatch.setattr("moestream.cli.inspect.locate", fail)
    with pytest.raises(SystemExit) as left:
        cli.main(["inspect", "some.gguf"])
    assert left.value.code == 4
    said = "moestream: internal error: ZeroDivisionError: by nothing at all\n"
    assert capfd.readouterr() == ("", said)


@pytest.mark.parametrize(
    "words",
    [["--help"], ["run", "--help"], ["inspect", "m.gguf", "--json"], ["inspect", "m.gguf"], ["mechanisms"]],
)
def test_a_reader_that_has_left_is_no_error(words: list[str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "moestream", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("words", [["--help"], ["inspect", "m.gguf", "--json"], ["inspect", "m.gguf"]])
def test_a_stdout_that_takes_nothing_is_told_in_one_line(words: list[str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "moestream", *words]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=120
        )
    said = "moestream: standard output took no more, the disk filled up: free some space\n"
    assert (done.returncode, done.stderr) == (4, said)


def test_a_name_too_long_is_refused_before_any_work(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    for words in (["--json", "a" * 300], ["--json", "a" * 250], ["--trace", "a" * 240 + ".parquet"]):
        said = refusal(typed("run", tmp_path / "m.gguf", "-p", "x", *words, cwd=tmp_path), 2)
        assert words[0] in said
        assert "a name of at most" in said


def test_a_policy_on_run_explains_itself() -> None:
    said = refusal(typed("run", "m.gguf", "-p", "x", "--policy", "belady"), 2)
    assert "moestream replay TRACE --policy belady" in said
    said = refusal(typed("run", "m.gguf", "-p", "x", "--mechanism", "arena+belady"), 3)
    assert "moestream replay TRACE --policy belady" in said
    said = refusal(typed("run", "m.gguf", "-p", "x", "--policy", "lru"), 2)
    assert "--mechanism arena+lru" in said


#: A model that never finishes loading, and says when it has begun.
_ENDLESS_LOAD = """
import threading, sys, types
engine = types.ModuleType("moestream.engine")
class Llama:
    def __init__(self, *words, **options):
        print("loading", flush=True)
        threading.Event().wait()
engine.Llama = Llama
sys.modules["moestream.engine"] = engine
from moestream.cli.main import main
main(["run", "x.gguf", "-p", "a"])
"""


def test_an_interrupt_while_loading_leaves_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ENDLESS_LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "loading\n"
        os.kill(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (130, "moestream: stopped\n")


#: Sends itself a Ctrl-C as soon as a module is asked for.
_INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["moestream", "mechanisms"]
from moestream.cli.start import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "moestream.cli.main", "moestream.cli.mechanisms"])
def test_an_interrupt_while_it_is_imported_is_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT.format(module=module)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "moestream: stopped\n")


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT.format(module="typer")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "arena" in done.stdout


def test_an_interrupt_while_a_class_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of that Python 3.11 makes a RuntimeError."""

    def left(code: int) -> None:
        raise SystemExit(code)

    def make(*words: Any) -> None:
        class Name:
            def __set_name__(self, owner: type, name: str) -> None:
                raise KeyboardInterrupt

        type("Class", (), {"name": Name()})

    monkeypatch.setattr(cli, "_leave_now", left)
    monkeypatch.setattr(cli._Commands, "get_command", make)
    said = io.StringIO()
    with pytest.raises(SystemExit) as end:
        cli._exit_code(["mechanisms"], said)
    assert (end.value.code, said.getvalue()) == (130, "moestream: stopped\n")


def test_no_bar_where_nobody_looks() -> None:
    stream = io.StringIO()
    bar = Bar(stream, "load")
    bar.update(1, 10)
    bar.close()
    assert stream.getvalue() == ""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_for_what_takes_long_and_only_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("moestream.cli.banner.time.monotonic", lambda: now)
    quick, slow = _Terminal(), _Terminal()
    short, long = Bar(quick, "load"), Bar(slow, "load")
    now = 0.5
    short.update(50, 100)
    long.update(10, 100)
    now = 30.0
    long.update(20, 100)
    for bar in (short, long):
        bar.close()
        bar.update(60, 100)
    assert quick.getvalue() == ""
    assert "load" in slow.getvalue()
    assert "10 %" in slow.getvalue()
    assert "0:00:04 left" in slow.getvalue()
    assert "0:02:00 left" in slow.getvalue()
    assert "60 %" not in slow.getvalue()


def phase(**values: Any) -> dict[str, Any]:
    zero = dict.fromkeys(
        ("tokens", "hits", "misses", "bytes_read", "stall_s", "compute_s", "memory_work_s", "read_bytes_os"),
        0,
    )
    return {**zero, "tok_per_s": None, **values}


def test_the_summary() -> None:
    document = {
        "prefill": phase(tokens=7, tok_per_s=21.04),
        "decode": phase(
            tokens=2,
            tok_per_s=5.0,
            hits=3,
            misses=1,
            bytes_read=4000,
            stall_s=0.1,
            compute_s=0.2,
            memory_work_s=0.01,
        ),
        "budget": {"cap_bytes": 1_100_000_000},
        "governor": None,
        "swapped": {"in_bytes": 0, "out_bytes": 0},
        "ended": "stopped",
    }
    assert summary(document, 1_050_000_000) == (
        "prompt 7 tokens at 21.0 tok/s; text 2 tokens at 5.00 tok/s (hit rate 75%, 2.00 kB a token, "
        "stall 50.0 ms, compute 100.0 ms, memory 5.0 ms: bound by compute, 65%); memory held 1.05 GB of 1.10 GB; "
        "stopped"
    )
    document["decode"] |= {"stall_s": 0.5}
    assert "stall 250.0 ms, compute 100.0 ms, memory 5.0 ms: bound by disk, 70%); memory" in summary(
        document, 0
    )
    document["decode"] = phase(tokens=2, tok_per_s=10.0, compute_s=0.2, read_bytes_os=2000)
    said = summary(document, 0)
    assert "10.0 tok/s (1.00 kB a token by the kernel's account, compute 100.0 ms); memory" in said
    document["decode"] = phase()
    document["budget"], document["ended"] = {"cap_bytes": None}, "tokens"
    said = summary(document, 1_050_000_000)
    assert said == "prompt 7 tokens at 21.0 tok/s; text 0 tokens; memory held 1.05 GB"
    document["swapped"] = {"in_bytes": 1_000_000, "out_bytes": 2_000_000}
    assert summary(document, 0).endswith("; the machine swapped 2.00 MB out, 1.00 MB in")


def test_locked_pages_are_held_once() -> None:
    memory = ProcessMemory(
        rss_bytes=160,
        anon_bytes=50,
        file_bytes=100,
        shared_bytes=10,
        locked_bytes=30,
        huge_bytes=0,
        peak_bytes=200,
    )
    assert held_bytes(memory, "arena+uring:8+lru+none+mlock") == 60
    assert held_bytes(memory, "mapped+fault+none+none+mlock") == 90
    assert held_bytes(memory, None) == 90


def test_a_document_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    write_json(out, {"a": 1})
    write_json(out, {"a": 2})
    assert json.loads(out.read_text()) == {"a": 2}
    with pytest.raises(TypeError):
        write_json(out, {"a": object()})
    assert json.loads(out.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(errors.RefusedError, match="cannot be written"):
        write_json(tmp_path / "absent/run.json", {})


def test_a_place_for_the_document_is_looked_at_first(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    with pytest.raises(errors.UsageError, match="is a directory"):
        check_writable(tmp_path)
    with pytest.raises(errors.UsageError, match="no directory"):
        check_writable(tmp_path / "absent/new.json")


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_are_no_internal_error(closed: tuple[int, ...]) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    words = [sys.executable, "-m", "moestream", "inspect", "no-such-model.gguf"]
    done = subprocess.run(words, capture_output=True, preexec_fn=close, timeout=60)
    assert done.returncode == 3
    assert b"internal error" not in done.stderr


def test_numbers_beyond_reason_are_wrong_words() -> None:
    for option, value in (("--threads", "100000"), ("--ctx", str(2**32))):
        done = typed("run", "x.gguf", "-p", "a", option, value)
        assert (done.returncode, option in done.stderr) == (2, True)


@pytest.mark.parametrize("most", [5, 6, 7, 8])
def test_too_few_open_files_wherever_it_strikes(most: int, tmp_path: Path) -> None:
    """While a library is imported, a name looked up or a file opened: the remedy is the same."""
    done = moestream(
        *("inspect", str(write_gguf(tmp_path / "m.gguf"))),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)),
    )
    assert done.returncode in (0, 3, 4)
    if done.returncode:
        assert done.stderr == "moestream: too many open files: raise `ulimit -n`\n"
