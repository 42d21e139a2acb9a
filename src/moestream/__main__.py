"""``python -m moestream``: the same as the command ``moestream``."""

from __future__ import annotations

from moestream.cli.start import main

if __name__ == "__main__":
    main()
