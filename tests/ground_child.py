"""The program that ``grounds`` runs beside models on many file systems: all that is asked, in one process.

It takes a JSON list of tasks, an object for each ``grounds.Visit``, and prints what came of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import answers

#: Tokens of a step that wants most experts of every layer.
LONG = 64
QUESTION = {"first": "", "strict": False, "length": 7, "steps": 4, "governor": False, "i_know": True}


@contextlib.contextmanager
def _into(descriptor: int, file: Any) -> Iterator[None]:
    kept = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def command(words: list[str]) -> dict[str, Any]:
    """A command line of ours, in this process."""
    from moestream.cli.main import main

    code: Any = 0
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _into(1, out), _into(2, err):
            try:
                main(words)
            except SystemExit as ended:
                code = ended.code
            sys.stdout.flush()
            sys.stderr.flush()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
    return {"code": code, "out": texts[0], "err": texts[1]}


def seen(path: Path) -> dict[str, Any]:
    """How the probe sees the file: in what multiples it is read directly, and what keeps it from being cold."""
    from moestream.box import direct_io_alignment
    from moestream.model import read_model
    from moestream.probe.disk import QUICK, Disk
    from moestream.probe.sample import model_sample

    sample = model_sample(read_model(path))
    disk = Disk(sample, replace(QUICK, rounds=1), None, uring=False, huge_pages=False)
    found = direct_io_alignment(path)
    return {
        "alignment": found.alignment,
        "reason": found.reason,
        "direct": sample.direct,
        "warm": sample.make_cold(sample.ranges),
        "not_mapped": disk.measure(groups=("mapped-warm",)).reasons,
    }


def cancelled(path: str, mechanism: str, tally: Path) -> dict[str, Any]:
    """A step that is stopped while experts are read, and the same step again: how the first ended, how many reads there
    had been when it was stopped, by its end, and by the end of the second, and the second's logits."""
    import moestream

    def reads() -> int:
        return int(tally.read_text()) if tally.exists() else 0

    with moestream.Llama(
        path,
        ram="1GiB",
        mechanism=mechanism,
        n_ctx=answers.CONTEXT,
        n_batch=64,
        n_threads=2,
        n_threads_batch=2,
    ) as llama:
        tokens = answers.prompt_tokens(LONG, llama.n_vocab())
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(llama.eval, tokens)
            while not llama._engine.counters["routes"] and not step.done():
                time.sleep(0.001)
            routed = reads()
            while reads() == routed and not step.done():
                time.sleep(0.001)
            llama.cancel()
            counts = [reads()]
            ended = step.exception()
        counts.append(reads())
        digests = answers.answer(llama, tokens, 0).digests
        counts.append(reads())
    return {"ended": type(ended).__name__, "reads": counts, "digests": digests}


def visit(task: dict[str, Any]) -> dict[str, Any] | str:
    """What is asked of one ground, or why it could not be mounted."""
    failed, path = Path(task["failed"]), task["model"]
    if failed.exists():
        return f"it cannot be mounted here: {failed.read_text().strip()[-300:]}"
    os.environ["XDG_CACHE_HOME"] = task["cache"]
    question = {**QUESTION, "path": path, "ram": "1GiB"}
    commands = [[path if word == "MODEL" else word for word in words] for words in task["commands"]]
    return {
        "model": path,
        "answers": {name: answers.main({**question, "mechanism": name}) for name in task["mechanisms"]},
        "commands": [command(words) for words in commands],
        "cancelled": {name: cancelled(path, name, Path(task["tally"])) for name in task["cancelled"]},
        "seen": seen(Path(path)) if task["look"] else None,
    }


if __name__ == "__main__":
    print(json.dumps([visit(task) for task in json.loads(sys.argv[1])]))
