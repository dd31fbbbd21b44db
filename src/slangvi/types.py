"""Words that the layers share: how a user wants rows to be held, and a method as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

__all__ = ["Routes", "Transform"]


@dataclass(frozen=True)
class Routes:
    """Choices of the factored engine. Every choice gives the same result, at another cost.

    Args:
        layers: "auto" forms the gradients of a layer or keeps them as factors, whichever counts fewer operations and
            fits `form_bytes`; "form" and "factor" insist. A dict of parameter names or globs to these words chooses by
            parameter.
        spectrum: "auto" decomposes the Gram matrix of all rows in full where it is small, that of the parameters where
            that is smaller, and iterates where they are large; "gram" always decomposes the Gram matrix in full,
            "randomized" never takes that of the parameters.
        form_bytes: largest tensor of formed gradients; more columns are formed piece by piece, twice a step. None takes
            256 MB, or a quarter of what the state takes if that is more.
        chunk_bytes: largest temporary of a product.

    Example:
        >>> Routes(layers={"conv1.*": "form"}).layer("conv1.weight")
        'form'
    """

    layers: str | Mapping[str, str] = "auto"
    spectrum: str = "auto"
    form_bytes: int | None = None
    chunk_bytes: int = 1 << 26

    def __post_init__(self) -> None:
        words = self.layers.values() if isinstance(self.layers, Mapping) else [self.layers]
        for word in words:
            if word not in ("auto", "form", "factor"):
                raise ValueError(f"layers must say 'auto', 'form' or 'factor', got {word!r}.")
        if self.spectrum not in ("auto", "gram", "randomized"):
            raise ValueError(f"spectrum must be 'auto', 'gram' or 'randomized', got {self.spectrum!r}.")
        for name in ("form_bytes", "chunk_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must be a number of bytes ≥ 0, got {getattr(self, name)}.")

    def within(self, memory_limit: int | None) -> Routes:
        """Return the routes with nothing larger than a number of bytes."""
        if memory_limit is None:
            return self
        form = memory_limit if self.form_bytes is None else min(self.form_bytes, memory_limit)
        chunk = min(self.chunk_bytes, memory_limit)
        return replace(self, form_bytes=form, chunk_bytes=chunk)

    def layer(self, name: str) -> str:
        """Return the word for a parameter; the first name or glob that fits counts."""
        if isinstance(self.layers, str):
            return self.layers
        return next((word for key, word in self.layers.items() if fnmatchcase(name, key)), "auto")


class Transform(NamedTuple):
    """A variational method as pure functions over an immutable state.

    Args:
        init: params, a dict of tensors → state.
        update: (state, batch, generator=None) → state, info.
        sample: (state, shape=(), generator=None) → name → draws.
        posterior: state → a torch distribution over the flat vector.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    sample: Callable[..., Any]
    posterior: Callable[..., Any]
