"""The command line: `slangvi …`, also `python -m slangvi …`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what to install if the [cli] extra is missing."""
    try:
        from slangvi.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"slangvi: the command line needs {error.name}: pip install 'slangvi[cli]'")
    app()
