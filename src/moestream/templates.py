"""Chat templates: programs of a model's maker, all of which the binding reads as it loads the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moestream.binding import llama_cpp
from moestream.errors import ModelError


@contextmanager
def templates_read_late(path: str | Path) -> Iterator[None]:
    """While inside, a template that cannot be read ends no load of this thread's: plain text needs none. Whoever asks
    for a chat with it gets a ModelError that names the model, at ``path``, and the cause."""
    formats = llama_cpp.llama_chat_format
    original = formats.Jinja2ChatFormatter
    thread = threading.get_ident()

    class Formatter(original):  # type: ignore[misc, valid-type]
        refusal: ModelError | None = None

        def __init__(self, *args: Any, **options: Any) -> None:
            try:
                super().__init__(*args, **options)
            except Exception as error:  # whatever a program that is none is told by who reads it
                if threading.get_ident() != thread:
                    raise
                said = " ".join(str(error).split())
                self.refusal = ModelError(
                    f"{path}: a chat template in it is none ({type(error).__name__}: {said}): name another "
                    "(chat_format), or write the prompt as the model expects it"
                )

        def __call__(self, **options: Any) -> Any:
            if self.refusal is not None:
                raise self.refusal
            return super().__call__(**options)

    formats.Jinja2ChatFormatter = Formatter
    try:
        yield
    finally:
        formats.Jinja2ChatFormatter = original
