"""The command line: which commands there are, and the one place that prints errors and picks exit codes.

A command's module is imported when that command runs, so that ``--help`` and wrong words are answered at
once.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from moestream.cli.start import INTERRUPTED
from moestream.errors import MoestreamError, RefusedError, UsageError
from moestream.files import lack_of_room
from moestream.nearest import did_you_mean

#: Each command, a function (or a group of commands) of that name in a module of that name, and its line in the help.
COMMANDS = {
    "run": "Generate text from a prompt within a memory cap.",
    "plan": "Say how a memory cap would be divided, and how fast that can be.",
    "probe": "Measure what this box's disk, memory and processors can do.",
    "bench": "Run mechanisms in turns under a cap; which is faster?",
    "lab": "Ask a canned question of this box: lab list, lab run NAME.",
    "inspect": "Show a model's expert table: what streams and what stays.",
    "mechanisms": "List every part of a mechanism, and what this box has.",
    "trace": "Show a recorded run, export it, or finish one cut short.",
    "replay": "Say what other policies and budgets would have read.",
    "analyze": "Show a trace's skew and locality, and what could be foreseen.",
    "fit": "Fit a predictor to traces.",
    "report": "Show what benches measured, as text or one HTML page.",
    "demo-model": "Build the demo model, 3.2 GB, from an installed package.",
    "make-model": "Write a model of any shape with random weights.",
}
#: The base of the parser's complaints, whichever copy of click this typer brings.
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]


#: A range of numbers as the parser writes it.
_RANGE = re.compile(r"(?:(?P<least>[\d.]+)<=x<=(?P<most>[\d.]+)|x>=(?P<alone>[\d.]+))")
#: What follows a name there.
_TYPE = re.compile(r" <[^>]*>$")
_MOST_TOLD = 1 << 20


class _ReaderGone(Exception):
    """Whoever read stdout has left. Not an OSError: the parser turns a broken pipe into exit code 1."""


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Inside, a broken pipe becomes _ReaderGone; what is still buffered is written before it is left."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise _ReaderGone from error
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich has seen it first
            raise _ReaderGone from end
        raise


class _Commands(TyperGroup):
    """Commands that are imported when they are called."""

    def make_context(self, *words: Any, **options: Any) -> Any:
        with _reader_may_leave():
            return super().make_context(*words, **options)

    def invoke(self, ctx: Any) -> Any:
        with _reader_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            near = did_you_mean(cmd_name, COMMANDS, most=2)
            raise UsageError(f"no command {cmd_name!r}{near} (there are: {', '.join(COMMANDS)})")
        function = cmd_name.replace("-", "_")
        module = importlib.import_module(f"moestream.cli.{function}")
        found = getattr(module, function)
        if not isinstance(found, typer.Typer):
            one = typer.Typer(add_completion=False, rich_markup_mode=None)
            one.command(cmd_name)(found)
            found = one
        return _with_plain_help(typer.main.get_command(found))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _with_plain_help(command: Any) -> Any:
    """The command, its help saying ``MODEL`` where the parser's says ``{MODEL}`` and ``MODEL <str>``, and ``1 to 512``
    where that says ``1<=x<=512``."""
    for one in getattr(command, "commands", {}).values():
        _with_plain_help(one)
    format_usage, format_options = command.format_usage, command.format_options

    def usage(context: Any, formatter: Any) -> None:
        write = formatter.write_usage
        formatter.write_usage = lambda program, words: write(program, re.sub("[{}]", "", words))
        format_usage(context, formatter)

    def options(context: Any, formatter: Any) -> None:
        write = formatter.write_dl
        formatter.write_dl = lambda rows: write(
            [(_TYPE.sub("", name), _RANGE.sub(_plain_range, text)) for name, text in rows]
        )
        format_options(context, formatter)

    command.format_usage, command.format_options = usage, options
    return command


def _plain_range(match: re.Match[str]) -> str:
    least = (match["least"] or match["alone"]).removesuffix(".0")
    # Larger bounds only keep numbers from wrapping round.
    if match["most"] and float(match["most"]) <= _MOST_TOLD:
        return f"{least} to {match['most'].removesuffix('.0')}"
    return f"{least} or more"


app = typer.Typer(cls=_Commands, add_completion=False, rich_markup_mode=None, no_args_is_help=True)


def _print_version(asked: bool) -> None:
    if asked:
        # Asking for the installed package's metadata takes longer than all the rest of the help.
        from moestream.version import __version__

        print(f"moestream {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Run a mixture-of-experts GGUF that is larger than memory, at the speed of the disk.

    Exit codes: 0 done, 2 wrong words, 3 refused with a reason, 4 failed, 130 stopped before there was
    anything to show. MODEL is a GGUF file (any shard of a split model) or the word demo.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (None: the process's own) and exit with its code."""
    _open_standard_streams()
    # While llama.cpp loads a model the binding points descriptor 2 elsewhere; errors must not go there.
    errors = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
    code = _exit_code(arguments, errors)
    # What a terminal that is gone refused when it was said it refuses once more.
    with contextlib.suppress(OSError):
        errors.close()
    sys.exit(code)


def _open_standard_streams() -> None:
    """Let a closed stdin, stdout or stderr lead nowhere: a file opened later would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    # A file's name or a text that this terminal cannot show is escaped, as stderr does anyway.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _exit_code(arguments: Sequence[str] | None, errors: Any) -> int:
    def complain(text: str, error: BaseException | None = None) -> None:
        if _too_many_files(error):  # wherever it struck, the remedy is the same
            text = f"{os.strerror(errno.EMFILE).lower()}: raise `ulimit -n`"
        # One line, whatever a file's name or another library's message holds; a terminal that is gone shows none.
        with contextlib.suppress(OSError):
            print("moestream: " + " ".join(text.split()), file=errors, flush=True)

    try:
        command = typer.main.get_command(app)
        result = command.main(args=arguments, prog_name="moestream", standalone_mode=False)
    except MoestreamError as error:
        complain(str(error), error)
        return error.exit_code
    except _ClickError as error:
        return _wrong_words(error, complain)
    except (KeyboardInterrupt, typer.Abort):
        complain("stopped")
        _leave_now(INTERRUPTED)
    except _ReaderGone:
        # As in `moestream inspect demo | head`: it has read what it wanted.
        forget_stdout()
        return 0
    except OSError as error:
        lack = lack_of_room(error)
        if lack is None:
            complain(f"internal error: {type(error).__name__}: {error}", error)
        else:  # every file of ours says so itself
            complain(f"standard output took no more, {lack}")
            forget_stdout()
        return MoestreamError.exit_code
    except Exception as error:
        if _interrupted(error):
            complain("stopped")
            _leave_now(INTERRUPTED)
        if isinstance(error, ImportError) and error.name == "moestream._core":
            complain(
                f"its core cannot be loaded ({error}): a zip or a source tree has none, `pip install .` (or "
                "`make setup`) in a clone builds it",
                error,
            )
            return RefusedError.exit_code
        complain(f"internal error: {type(error).__name__}: {error}", error)
        return MoestreamError.exit_code
    # Typer turns a Ctrl-C that nobody caught into the exit code it returns here.
    if result == INTERRUPTED:
        complain("stopped")
        _leave_now(INTERRUPTED)
    return result if isinstance(result, int) else 0


def _too_many_files(error: BaseException | None) -> bool:
    """Did it come of a file too many? An error of ours still holds the system's as its context; of a library that
    cannot be loaded there are only the loader's words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return True
        if isinstance(error, ImportError) and os.strerror(errno.EMFILE) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _interrupted(error: BaseException | None) -> bool:
    """Is it what Python made of a Ctrl-C? While a class is made, 3.10 and 3.11 wrap whatever is raised."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _wrong_words(error: Any, complain: Any) -> int:
    """A complaint of the parser's, in our one line; without a word on the command line, the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
    else:
        context = getattr(error, "ctx", None)
        where = f" (see {context.command_path} --help)" if context is not None else ""
        complain(error.format_message().rstrip(".") + where)
    return UsageError.exit_code


def forget_stdout() -> None:
    """Let stdout lead nowhere, once its reader is gone: what is still buffered must go somewhere when the
    interpreter exits."""
    forget(1)


def forget(descriptor: int) -> None:
    """Let it lead nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor, inheritable=descriptor <= 2)
    os.close(nowhere)


def _leave_now(code: int) -> NoReturn:
    """Exit without running finalisers: another thread may still be inside llama.cpp."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)
