"""A look at training along the way that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from slangvi_reproduction.experiments._cells import Arrays
from slangvi_reproduction.experiments._regression import Scores

__all__ = ["Watch"]


class Watch:
    """Scores after some of the steps, from draws of their own: training does not depend on how often one looks.

    Args:
        marks: steps after which to look, counted from 1; none for a run that nobody watches.
        seed: of the draws after a step.
    """

    def __init__(self, marks: Sequence[int] = (), seed: Callable[[int], int] = lambda step: 0) -> None:
        self.marks, self.seed = list(marks), seed
        self.taken = 0
        self.seen: list[Scores] = []

    def step(self, generator: torch.Generator, look: Callable[[], Scores]) -> None:
        """Count a step, and look if it is marked.

        Args:
            generator: of training, from which `look` draws too; afterwards it is where it was.
            look: how well the networks predict now.
        """
        self.taken += 1
        if self.taken in self.marks:
            before = generator.get_state()
            generator.manual_seed(self.seed(self.taken))
            self.seen.append(look())
            generator.set_state(before)

    def values(self, name: str) -> np.ndarray:
        """One of the scores, float64, (T, K)."""
        return np.array([getattr(scores, name).double().cpu().numpy() for scores in self.seen])

    def arrays(self) -> Arrays:
        """What was seen so far, to go on from; nothing when nobody watches."""
        if not self.marks:
            return {}
        seen = {f"seen_{name}": self.values(name) for name in Scores.__dataclass_fields__}
        return seen | {"watched": np.array(self.taken)}

    def restore(self, arrays: Arrays) -> None:
        """Go on from there."""
        if self.marks:
            self.taken = int(arrays["watched"])
            columns = [torch.from_numpy(arrays[f"seen_{name}"]) for name in Scores.__dataclass_fields__]
            self.seen = [Scores(*row) for row in zip(*columns, strict=True)]
