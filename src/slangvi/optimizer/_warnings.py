"""What an optimizer warns of at a step, once each."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from slangvi.errors import user_stacklevel
from slangvi.rows import RowGroup

__all__ = ["Warnings"]


@dataclass
class Warnings:
    """The warnings of an optimizer.

    Args:
        told_small_data: whether that of a batch larger than the data was given.
        told_lost_gradients: whether that of gradients outside blocks was given.
    """

    told_small_data: bool = False
    told_lost_gradients: bool = False

    def of_small_data(self, rows: Sequence[RowGroup], num_data: int) -> None:
        """Warn if a batch is larger than the training set is said to be."""
        largest = max(group.num_rows for group in rows)
        if largest > num_data and not self.told_small_data:
            self.told_small_data = True
            warnings.warn(
                f"a batch of {largest} examples is larger than num_data={num_data}. num_data is the size "
                "of the training set; the posterior is as wide as it says.",
                UserWarning,
                stacklevel=user_stacklevel(),
            )

    def of_lost_gradients(self, unrecorded: set[int]) -> None:
        """Warn if there were backward passes outside blocks, and forget them."""
        lost = len(unrecorded)
        unrecorded.clear()
        if lost and not self.told_lost_gradients:
            self.told_lost_gradients = True
            warnings.warn(
                "backward() ran outside sampled_params since the last step. Those gradients are not those "
                "of a draw, and the step goes without them. Run every micro-batch inside "
                "`with opt.sampled_params(train=True):` or after opt.train(); opt.zero_grad() says that they were not "
                "meant for the step.",
                UserWarning,
                stacklevel=user_stacklevel(),
            )
