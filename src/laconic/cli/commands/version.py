"""`laconic version`."""

import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class VersionCommand:
    """Print the version of laconic, Python and torch; laconic --version prints only laconic's.

    Example: laconic version
    """

    def run(self) -> int:
        from importlib.metadata import version

        import laconic

        print(f"laconic {laconic.__version__}, Python {platform.python_version()}, torch {version('torch')}")
        return 0
