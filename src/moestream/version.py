"""The one place that states the package's version at run time; the metadata of the installed package is its source."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("moestream")
