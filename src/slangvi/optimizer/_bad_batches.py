"""How many batches with NaN or Inf may be passed over before a run is stopped."""

from __future__ import annotations

from dataclasses import dataclass

from slangvi.errors import NumericalError

__all__ = ["BadBatches"]


@dataclass
class BadBatches:
    """The count of an optimizer.

    Args:
        in_a_row: bad batches since the last good one.
        total: bad batches that were skipped.
    """

    in_a_row: int = 0
    total: int = 0

    def met(self, error: NumericalError, allowed: int) -> None:
        """Count a batch; raise when it is one too many in a row.

        Args:
            error: what was wrong with it.
            allowed: bad batches in a row that are skipped.

        Example:
            >>> count = BadBatches()
            >>> count.met(NumericalError("step 4: the loss is nan."), allowed=1)
            >>> count.total
            1
            >>> count.met(NumericalError("step 4: the loss is nan."), allowed=1)
            Traceback (most recent call last):
            slangvi.errors.NumericalError: step 4: the loss is nan. It is bad batch number 2 in a row, and
            max_bad_batches=1 allows for 1.
        """
        self.in_a_row += 1
        if self.in_a_row > allowed:
            if not allowed:
                raise error
            raise NumericalError(
                f"{error} It is bad batch number {self.in_a_row} in a row, and max_bad_batches={allowed} allows for "
                f"{allowed}."
            ) from error
        self.total += 1
