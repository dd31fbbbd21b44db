"""Exceptions and warnings that slangvi adds to Python's own, and where a warning is to point."""

import sys

import torch

__all__ = [
    "CheckpointError",
    "DataError",
    "DivergenceError",
    "DivergenceWarning",
    "MemoryExceededError",
    "NumericalError",
    "UnsupportedModuleError",
    "UnverifiedGradientsWarning",
    "user_stacklevel",
]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, cannot be read, or is of something else; nothing was changed by it."""


class DataError(RuntimeError):
    """A data file is missing, damaged, not what it should be, or could not be fetched; the message says what to do."""


class MemoryExceededError(torch.OutOfMemoryError):
    """Memory ran out inside slangvi; the message says what took it and which argument to change."""


class NumericalError(ArithmeticError):
    """A step met NaN or Inf; the state is what it was before the step."""


class DivergenceError(NumericalError):
    """A run goes to and fro instead of converging; all numbers are finite, and the state is that of the step before."""


class DivergenceWarning(UserWarning):
    """The same, where it does not end the run."""


class UnsupportedModuleError(TypeError):
    """A module or parameter for which per-example gradients do not exist."""


class UnverifiedGradientsWarning(UserWarning):
    """Warning of version 0.1 that is not given any more; the name stays for code that filters it."""


def user_stacklevel() -> int:
    """Return the `stacklevel` with which a warning points at the user's own line."""
    frame, level = sys._getframe(1), 1
    inside = (__name__.split(".")[0], "contextlib", "torch")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    return level
