"""scikit-build-core, asked only after a look at what this machine lacks.

pip reads an sdist's needs before it builds any dependency, so that one line comes instead of llama.cpp's pages.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from needs import lacks
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(*arguments: Any, **options: Any) -> Any:
        lack = lacks()
        if lack is not None:
            sys.exit(lack)
        return hook(*arguments, **options)

    return call


# With build isolation pip asks for the needs first; without it, it goes straight to the build.
get_requires_for_build_wheel = _checked(get_requires_for_build_wheel)
get_requires_for_build_editable = _checked(get_requires_for_build_editable)
build_wheel = _checked(build_wheel)
build_editable = _checked(build_editable)
