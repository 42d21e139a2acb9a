"""The core's stub, from the built module: written, or with `--check` only compared."""

from __future__ import annotations

import sys
from pathlib import Path

from nanobind.stubgen import StubGen

import moestream._core

STUB = Path(__file__).parent.parent / "src" / "moestream" / "_core.pyi"


def main() -> int:
    generator = StubGen(moestream._core)
    generator.put(moestream._core)
    text = generator.get().replace("-> dict:", "-> dict[str, Any]:")
    text = text.replace("from typing import Final\n", "from typing import Any, Final\n")
    if "--check" not in sys.argv:
        STUB.write_text(text)
    elif not STUB.exists() or STUB.read_text() != text:
        print("src/moestream/_core.pyi is not fresh: run tools/stubs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
