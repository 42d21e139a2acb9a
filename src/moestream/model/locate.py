"""The word a user gives for a model, as a path."""

from __future__ import annotations

from pathlib import Path

from moestream.errors import ModelError

#: The word for the demo model.
DEMO = "demo"


def locate(model: str) -> Path:
    """The path of a model named on a command line: a path, or ``demo`` for the demo model (``./demo`` for a
    file of that name). Raises ModelError when the demo model was not made yet; other paths are not looked
    at."""
    if model != DEMO:
        return Path(model).expanduser()
    # Only this word needs to know where models are made; reading one does not.
    from moestream.make import demo_path

    path = Path(demo_path())
    if not path.exists():
        raise ModelError(f"the demo model is not made yet ({path}); run: moestream demo-model")
    return path
