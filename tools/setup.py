"""Install what the project needs into the environment this runs in; reuse what is there.

    .venv/bin/python tools/setup.py

Needs nothing but pip. llama.cpp is built from source so that it uses this CPU's own instructions; pip keeps the
wheel, so that is paid once a machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from needs import lacks

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command).returncode != 0:
        sys.exit("setup: pip could not install what is needed; its own lines above say why")


def main() -> None:
    lack = lacks()
    if lack is not None:
        sys.exit(f"setup: {lack}")
    if shutil.which("cmake") is None:
        sys.exit("setup: no CMake was found: install 3.25 or newer")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    requirements = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        requirements += [line for line in extra if not line.startswith("moestream")]
    print(
        "installing dependencies: llama.cpp is built from source, about 6 minutes on 2 cores, once",
        flush=True,
    )
    pip("--upgrade", "pip")
    pip(*requirements)


if __name__ == "__main__":
    main()
