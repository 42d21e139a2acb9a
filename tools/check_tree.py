"""What no linter knows: the changelog names the version, files stay small, and nothing built or large is tracked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 450
MAX_BYTES = 1 << 20
SOURCES = {".py", ".cpp", ".h"}


def tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def main() -> int:
    problems = []
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if version is None or f"## {version[1]}" not in changelog:
        problems.append("CHANGELOG.md has no section for the version of pyproject.toml")
    for path in tracked():
        name = path.relative_to(ROOT)
        if path.stat().st_size > MAX_BYTES:
            problems.append(f"{name}: {path.stat().st_size} bytes, over {MAX_BYTES}")
        if path.suffix in SOURCES and len(path.read_text().splitlines()) > MAX_LINES:
            problems.append(f"{name}: over {MAX_LINES} lines: does it do two jobs?")
        if path.suffix == ".gguf":
            problems.append(f"{name}: models are made, not committed")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
