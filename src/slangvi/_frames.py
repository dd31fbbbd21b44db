"""Where a warning is to point: at the line of the user that led to it."""

from __future__ import annotations

import sys

__all__ = ["outside_frames"]


def outside_frames() -> int:
    """How far up the user's own line is, so that the warning points there."""
    frame, level = sys._getframe(1), 1
    inside = (__name__.split(".")[0], "contextlib", "torch")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    return level
