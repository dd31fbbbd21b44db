"""Exceptions and warnings that slangvi adds to Python's own."""

__all__ = ["NumericalError", "UnsupportedModuleError", "UnverifiedGradientsWarning"]


class NumericalError(ArithmeticError):
    """A step met NaN or Inf; the state is what it was before the step."""


class UnsupportedModuleError(TypeError):
    """A module or parameter for which per-example gradients do not exist."""


class UnverifiedGradientsWarning(UserWarning):
    """Per-example gradients were captured, but nothing was there to check them against."""
