"""``moestream run MODEL -p TEXT``: generate text within a memory cap.

The model runs in a worker thread and the main thread waits, because only the main thread hears Ctrl-C and
it must be free to tell the engine. The text goes to stdout as it comes, everything else to stderr.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from moestream.box import MOST_THREADS, Box, disk_rate, process_memory
from moestream.cli.banner import Bar, banner, held_bytes, reads_nothing, summary
from moestream.cli.main import forget, forget_stdout
from moestream.errors import Cancelled, RefusedError, UsageError
from moestream.mechanism import Mechanism
from moestream.members import ELSEWHERE
from moestream.model import locate
from moestream.report import Generated, check_writable, run_document, write_json
from moestream.units import parse_size

if TYPE_CHECKING:
    from moestream.engine import Llama

#: Signals that end a run with the text so far.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: How often the main thread looks after a bar and a stop that came too early to be heard.
_LOOK_S = 0.1
#: A pipe without a reader, and a terminal that was closed.
_READER_GONE = (errno.EPIPE, errno.EIO)
#: Longest piece of text one token can be; a longer one is asked for again with the room it needs.
_PIECE_BYTES = 256


@dataclass(frozen=True)
class Request:
    """What was asked on the command line, checked as far as that goes without the model."""

    path: Path
    prompt: str
    n_tokens: int
    cap_bytes: int | None
    mechanism: str | None
    strict: bool
    i_know: bool
    governor: bool
    trace: Path | None
    chat: bool
    temp: float
    seed: int | None
    quiet: bool
    arguments: dict[str, Any]


@dataclass
class Job:
    """A run under way, shared by the two threads: the worker fills it, the main thread reads it."""

    request: Request
    stderr: TextIO
    generated: Generated = field(default_factory=Generated)
    llama: Llama | None = None
    bar: Bar | None = None
    error: BaseException | None = None
    stopping: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def say(self, text: str) -> None:
        try:
            print(text, file=self.stderr, flush=True)
        except OSError:  # a terminal that was closed: nobody listens any more
            forget(self.stderr.fileno())


def run(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of a split model, or demo.")
    ],
    prompt: Annotated[str, typer.Option("-p", "--prompt", metavar="TEXT", help="The text to go on from.")],
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", min=0, metavar="N", help="Most tokens to generate.")
    ] = 128,
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for the whole process: 4GiB, 1.1GB. Left out: what is free."
        ),
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            metavar="MECHANISM", help="How experts travel. Left out: in memory if it fits, else the arena."
        ),
    ] = None,
    ctx: Annotated[
        int,
        typer.Option(
            min=0, max=2**31 - 1, metavar="N", help="Tokens of context; 0: what the model was trained with."
        ),
    ] = 4096,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_THREADS, metavar="N", help="Compute threads. Left out: one for each CPU."
        ),
    ] = None,
    temp: Annotated[
        float, typer.Option(min=0.0, metavar="NUMBER", help="Sampling temperature; 0: the likeliest token.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Seed of the sampling.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Most tokens of a prompt in one step. Left out: by the cap."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what happened to this file, as JSON.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Record routes, reads and steps in this Parquet file; no governor then."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the text, and errors.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A mechanism that does not engage as asked is an error.")
    ] = False,
    i_know: Annotated[
        bool,
        typer.Option(
            "--i-know",
            help="Run a mechanism that grows without bound outside an enforced cap, or an untested llama.cpp.",
        ),
    ] = False,
    governor: Annotated[
        bool,
        typer.Option("--governor/--no-governor", help="Give expert pages back while others need memory."),
    ] = True,
    policy: Annotated[str | None, typer.Option(hidden=True)] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's own chat template.")
    ] = False,
) -> None:
    """Generate text from a prompt, within a memory cap.

    The text goes to stdout, the rest to stderr. Ctrl-C (and SIGTERM, SIGHUP) ends with the text so far and the
    summary; a second one at once.
    """
    if policy is not None:  # an option of `replay`, tried here by habit
        raise UsageError(
            ELSEWHERE.get(policy, f"a policy is a part of the mechanism: --mechanism arena+{policy}")
        )
    if mechanism is not None:
        Mechanism.parse(mechanism)
    cap = parse_size(ram) if ram is not None else None
    if json is not None:
        check_writable(json, [locate(model)])
    n_threads = threads or Box().compute_threads()
    request = Request(
        path=locate(model),
        prompt=prompt,
        n_tokens=tokens,
        cap_bytes=cap,
        mechanism=mechanism,
        strict=strict,
        i_know=i_know,
        governor=governor,
        trace=trace,
        chat=chat,
        temp=temp,
        seed=seed,
        quiet=quiet,
        arguments={
            "n_ctx": ctx,
            **({"n_batch": batch, "n_ubatch": batch} if batch is not None else {}),
            "n_threads": n_threads,
            "n_threads_batch": n_threads,
        },
    )
    # While a model loads the binding points descriptor 2 elsewhere; the bar is to be seen then too.
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as stderr:
        _finish(_supervise(Job(request, stderr)), json)


def _finish(job: Job, json: Path | None) -> None:
    """Summary, document, and the error if there was one."""
    llama, generated = job.llama, job.generated
    if generated.text and not generated.text.endswith(b"\n"):
        _write(job, b"\n")
    if llama is None or (job.error is not None and not generated.tokens):
        assert job.error is not None
        raise job.error
    document = run_document(
        llama, generated, job.request.mechanism, job.request.cap_bytes, kept=json is not None
    )
    held = held_bytes(process_memory(), document["mechanism"]["effective"])
    llama.close()
    if not job.request.quiet:
        job.say(summary(document, held))
    if job.error is not None:
        raise job.error
    if json is not None:
        write_json(json, document)


# -- the main thread ----------------------------------------------------------------------------------------


def _supervise(job: Job) -> Job:
    """Run the job in a thread until it has ended or was stopped. Raises KeyboardInterrupt on a Ctrl-C that
    comes while the model loads, or on a second one."""
    with _interrupts(job):
        # A daemon: after a second Ctrl-C nobody waits for it.
        threading.Thread(target=_work, args=(job,), name="generate", daemon=True).start()
        while not job.done.wait(_LOOK_S):
            if job.stopping and job.llama is not None:
                # Again, should the call have begun only after the signal.
                job.llama.cancel()
            _show_prompt(job)
    return job


@contextmanager
def _interrupts(job: Job) -> Iterator[None]:
    """While inside, Ctrl-C stops the job, and so do a polite kill and a terminal that is closed; what this process was
    started to ignore (``nohup``) it ignores. Outside the main thread signals are not ours to take."""

    terminals = [number for number in (1, 2, job.stderr.fileno()) if os.isatty(number)]

    def stop(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:  # it is gone, and every line to it would be an error
            for terminal in terminals:
                forget(terminal)
        if job.stopping or job.llama is None:
            raise KeyboardInterrupt
        job.stopping = True
        job.llama.cancel()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = {number: signal.getsignal(number) for number in _STOPPING}
    for number, before in heard.items():
        if before is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, before in heard.items():
            signal.signal(number, before)


def _show_prompt(job: Job) -> None:
    """Move the prompt's bar on; the worker takes it away before the first text."""
    if job.bar is not None and job.llama is not None:
        job.bar.update(sum(step.tokens for step in job.llama.last_steps), job.generated.prompt_tokens)


# -- the worker ---------------------------------------------------------------------------------------------


def _work(job: Job) -> None:
    """Load, then generate; whatever goes wrong is left in the job for the main thread."""
    try:
        _load(job)
        _generate(job)
    except Cancelled:
        job.generated.ended = "stopped"
    except BaseException as error:
        job.error = error
    finally:
        job.done.set()


def _load(job: Job) -> None:
    # The binding takes a while to import: wrong words are to be told at once.
    from moestream.engine import Llama

    request = job.request
    bar = Bar(job.stderr, "load")
    begun = time.process_time()
    try:
        llama = Llama(
            request.path,
            ram=request.cap_bytes,
            mechanism=request.mechanism,
            strict=request.strict,
            i_know=request.i_know,
            governor=request.governor,
            trace=request.trace,
            on_progress=(lambda done, total: None) if request.quiet else bar.update,
            **request.arguments,
        )
    finally:
        bar.close()
    # From here on its log holds remarks on stopped steps, which are not for whoever reads the text.
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
    job.generated.cpu_s["load"] = time.process_time() - begun
    if request.seed is not None:
        llama.set_seed(request.seed)
    if not request.quiet:
        waits = llama.plan is not None and reads_nothing(llama) is None
        rate = disk_rate(llama.model_info.paths[0]) if waits else None
        for line in banner(llama, request.cap_bytes, rate):
            job.say(line)
        if llama.governor is not None:
            llama.governor.on_change = lambda change: job.say(f"\nmemory: {change}")
    job.llama = llama


def _generate(job: Job) -> None:
    """Stream the text to stdout and account for it."""
    llama, request, generated = job.llama, job.request, job.generated
    assert llama is not None
    prompt = _prompt_tokens(llama, request)
    generated.prompt_tokens = len(prompt)
    # llama.cpp rounds a context up, the binding's own record of its tokens stays as asked.
    n_ctx = min(llama.n_ctx(), len(llama.input_ids))
    room = n_ctx - len(prompt)
    if room < 0:
        raise UsageError(
            f"the prompt is {len(prompt)} tokens and the context {n_ctx}: "
            f"--ctx {len(prompt) + request.n_tokens} holds it and {request.n_tokens} more"
        )
    # The last token is not fed back, so it needs no place in the context.
    limit = min(request.n_tokens, room + 1)
    phase, begun = "prefill", time.process_time()
    bar = Bar(job.stderr, "prompt")
    job.bar = None if request.quiet else bar
    try:
        if limit == 0:
            llama.eval(prompt)
            return
        for token in llama.generate(prompt, temp=request.temp):
            if phase == "prefill":
                bar.close()
                now = time.process_time()
                generated.cpu_s["prefill"], phase, begun = now - begun, "decode", now
            if _is_end(llama, token):
                generated.ended = "end of text"
                return
            piece = _piece(llama, token)
            generated.tokens.append(token)
            generated.text += piece
            _write(job, piece)
            if len(generated.tokens) == limit or job.stopping:
                break
        generated.ended = (
            "stopped" if job.stopping else "tokens" if limit == request.n_tokens else "context full"
        )
    finally:
        bar.close()
        generated.cpu_s[phase] = time.process_time() - begun


def _prompt_tokens(llama: Llama, request: Request) -> list[int]:
    """The prompt as the model's tokens. Raises UsageError when there is none to begin with."""
    text = _chat_prompt(llama, request.prompt) if request.chat else request.prompt
    # A template writes the beginning-of-text token itself, and its marks are tokens of their own.
    tokens = llama.tokenize(
        text.encode("utf-8", "surrogateescape"), add_bos=not request.chat, special=request.chat
    )
    if not tokens and llama.token_bos() >= 0:
        tokens = [llama.token_bos()]
    if not tokens:
        raise UsageError(
            "an empty prompt, and this model has no token that begins a text: give some text with -p"
        )
    return list(tokens)


def _chat_prompt(llama: Llama, text: str) -> str:
    """One user's message in the model's own chat template."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    template = llama.metadata.get("tokenizer.chat_template")
    if not template:
        raise RefusedError(f"{llama.model_info.paths[0]} has no chat template: leave out --chat")
    eos, bos = (
        llama.detokenize([token], special=True).decode("utf-8", "replace") if token >= 0 else ""
        for token in (llama.token_eos(), llama.token_bos())
    )
    try:
        formatter = Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
        return str(formatter(messages=[{"role": "user", "content": text}]).prompt)
    except Exception as error:  # a template is a program of the model's maker, and raises what it likes
        said = " ".join(str(error).split())
        raise RefusedError(
            f"{llama.model_info.paths[0]}: its chat template does not work ({type(error).__name__}: {said}): "
            "leave out --chat, and write the prompt as the model expects it"
        ) from None


def _is_end(llama: Llama, token: int) -> bool:
    from moestream.binding import low

    return bool(low.llama_vocab_is_eog(llama._model.vocab, token))


def _piece(llama: Llama, token: int) -> bytes:
    """A token's bytes. The binding's own ``detokenize`` loses tokens of more than 32 bytes."""
    import ctypes

    from moestream.binding import low

    size = _PIECE_BYTES
    while True:
        buffer = (ctypes.c_char * size)()
        length = low.llama_token_to_piece(llama._model.vocab, token, buffer, size, 0, False)
        if length >= 0:
            return buffer.raw[:length]
        size = -length


def _write(job: Job, text: bytes) -> None:
    """Text to stdout, at once. When its reader is gone the run stops, as on Ctrl-C."""
    try:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno not in _READER_GONE:
            raise
        job.stopping = True
        forget_stdout()
