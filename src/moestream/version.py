"""The one place that states the package's version at run time, whose source is the installed package's metadata, and
the versions it is tested with."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("moestream")

#: The versions of llama-cpp-python whose llama.cpp the identity tests have passed with, as pip writes them.
TESTED_VERSIONS = ">=0.3.36,<0.3.37"
INSTALL_TESTED = f"pip install 'llama-cpp-python{TESTED_VERSIONS}'"
