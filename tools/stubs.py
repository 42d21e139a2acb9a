"""The core's stub, from the built module: written, or with `--check` only compared."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

import moestream._core

STUB = Path(__file__).parent.parent / "src" / "moestream" / "_core.pyi"


def _with_any(line: re.Match[str]) -> str:
    return "from typing import " + ", ".join(sorted({"Any", *line[1].split(", ")}))


def main() -> int:
    generator = StubGen(moestream._core)
    generator.put(moestream._core)
    text = generator.get().replace("-> dict:", "-> dict[str, Any]:")
    # The generator imports what its own types need, and knows nothing of ours.
    text = re.sub(r"^from typing import (?!Any)(.*)$", _with_any, text, count=1, flags=re.MULTILINE)
    if "--check" not in sys.argv:
        STUB.write_text(text)
    elif not STUB.exists() or STUB.read_text() != text:
        print("src/moestream/_core.pyi is not fresh: run tools/stubs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
