"""Rates, sizes and starts of a training, some of which depend on how long it will take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slangvi.schedules import slow_precision

__all__ = ["Rates", "Recipe", "Wishes", "rows_per_step", "steps_per_epoch"]


@dataclass(frozen=True)
class Rates:
    """What a kind of estimator takes where "auto" is said.

    Args:
        falling: α of `fit`, where rates fall.
        curvature: κ of `slow_precision`, for targets of variance 1.
        constant: α and β where nobody knows how many steps will come, in `partial_fit` and with early stopping.
        init_precision: d at the start, where the precision is not slow.
    """

    falling: float
    curvature: float
    constant: tuple[float, float]
    init_precision: float = 10.0


@dataclass(frozen=True)
class Recipe:
    """How to train; see `SLANGClassifier`."""

    rank: int
    prior_precision: Any
    temperature: float
    lr: float
    precision_lr: float
    precision_warmup: bool
    init_precision: Any
    mc_samples: int
    batch_size: int | None


@dataclass(frozen=True)
class Wishes:
    """A recipe of which some is left open, None, and depends on how long training will take.

    Args:
        rank: L.
        prior_precision: λ.
        temperature: 𝒯.
        lr: α at the start.
        precision_lr: β at the start.
        init_precision: d at the start.
        mc_samples: S.
        batch_size: M; None for `rows_per_step`.
        rates: what is taken instead of None.
    """

    rank: int
    prior_precision: Any
    temperature: float
    lr: float | None
    precision_lr: float | None
    init_precision: Any
    mc_samples: int
    batch_size: int | None
    rates: Rates

    def planned(self, rows: int, total: float, epochs: int, spread: float = 1.0, may_stop: bool = False) -> Recipe:
        """For so many epochs, with rates that fall; the precision is slow if neither its rate nor its start is given.

        Not so if training may stop early: the precision would still be near its high start then.

        Args:
            rows: to train on.
            total: what they count for, N.
            epochs: of them.
            spread: variance of the targets.
            may_stop: before all epochs are over.
        """
        if may_stop:
            return self.endless()
        lr = self.rates.falling if self.lr is None else self.lr
        if self.precision_lr is not None or self.init_precision is not None:
            return self._warmed_up(lr)
        steps = epochs * steps_per_epoch(rows, self.batch_size)
        curvature = self.rates.curvature / spread
        slow = slow_precision(total, steps, curvature=curvature, temperature=self.temperature)
        return self._recipe(lr, slow["precision_lr"], slow["init_precision"], precision_warmup=False)

    def endless(self) -> Recipe:
        """For nobody knows how many steps."""
        return self._warmed_up(self.rates.constant[0] if self.lr is None else self.lr)

    def _warmed_up(self, lr: float) -> Recipe:
        precision_lr = self.rates.constant[1] if self.precision_lr is None else self.precision_lr
        start = self.rates.init_precision if self.init_precision is None else self.init_precision
        return self._recipe(lr, precision_lr, start, precision_warmup=True)

    def _recipe(self, lr: float, precision_lr: float, init_precision: Any, precision_warmup: bool) -> Recipe:
        return Recipe(
            rank=self.rank,
            prior_precision=self.prior_precision,
            temperature=self.temperature,
            lr=lr,
            precision_lr=precision_lr,
            precision_warmup=precision_warmup,
            init_precision=init_precision,
            mc_samples=self.mc_samples,
            batch_size=self.batch_size,
        )


def rows_per_step(rows: int, batch_size: int | None) -> int:
    """M for so many rows: as given, or an eighth of them, between 8 and 32.

    Example:
        >>> [rows_per_step(rows, None) for rows in (5, 100, 1000)], rows_per_step(1000, 64)
        ([5, 12, 32], 64)
    """
    return min(rows, batch_size or min(32, max(8, rows // 8)))


def steps_per_epoch(rows: int, batch_size: int | None) -> int:
    """The last may see rows that were seen before."""
    return -(-rows // rows_per_step(rows, batch_size))
