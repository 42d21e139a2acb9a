"""What this machine lacks to build the core, in one line; asked before pip's or CMake's pages of it.

Knows nothing of pip and needs nothing but Python: `make setup` and the build backend both ask here.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

COMPILERS = "g++ 11, clang 14, or newer"
#: What the core uses of C++20, library included, that compilers learned last.
_PROBE = """
#include <bit>
#include <concepts>
#include <span>
#include <string_view>
#include <thread>
template <std::integral T> constexpr T twice(T value) { return value + value; }
struct Pair { int left; int right; };
static_assert(twice(Pair{.left = 1, .right = 2}.right) == 4 && std::string_view("ab").starts_with('a'));
static_assert(std::bit_ceil(3u) == 4 && std::span<const int>{}.empty());
"""


def lacks() -> str | None:
    """The first thing that is missing, with its remedy; None when the core can be built."""
    return _wrong_machine() or _lacks_compiler() or _lacks_headers()


def _wrong_machine() -> str | None:
    found = f"{platform.system()} on {platform.machine()}"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or sys.maxsize < 1 << 32:
        return f"moestream runs on 64-bit Linux, x86-64 or aarch64; this is {found}"
    if sys.implementation.name != "cpython":
        return f"moestream needs CPython; this is {sys.implementation.name}"
    return None


def _lacks_compiler() -> str | None:
    if "CMAKE_CXX_COMPILER=" in os.environ.get("CMAKE_ARGS", ""):
        return None  # CMake is told which one, and says itself what is wrong with it
    asked = shlex.split(os.environ.get("CXX", ""))
    names = [asked[0]] if asked else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        where = f"CXX={asked[0]} is no program" if asked else "none was found"
        return (
            f"moestream needs a C++20 compiler ({COMPILERS}), and {where}: "
            "apt install g++, or the like (llama-cpp-python needs one, too)"
        )
    command = [found, *asked[1:], "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(command, input=_PROBE, capture_output=True, text=True).returncode != 0:
        return f"moestream needs a C++20 compiler ({COMPILERS}), which {found} is not: name another with CXX"
    return None


def _lacks_headers() -> str | None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return None
    return f"moestream needs Python's headers, and there is no {header}: apt install python3-dev, or the like"
