"""Rates, sizes and starts of a training, some of which depend on how long it will take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slangvi.schedules import slow_precision

__all__ = ["AutoRates", "RequestedSettings", "ResolvedSettings", "rows_per_step", "steps_per_epoch"]


@dataclass(frozen=True)
class AutoRates:
    """Values that a kind of estimator takes where "auto" is said.

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


@dataclass(frozen=True, kw_only=True)
class RequestedSettings:
    """Training settings as they were requested: None leaves a rate or a start open.

    Args:
        rank: L.
        prior_precision: λ.
        temperature: 𝒯.
        mc_samples: S.
        batch_size: M; None for `rows_per_step`.
        lr: α at the start.
        precision_lr: β at the start.
        init_precision: d at the start.
    """

    rank: int
    prior_precision: Any
    temperature: float
    mc_samples: int
    batch_size: int | None
    lr: float | None
    precision_lr: float | None
    init_precision: Any

    def resolve(self, auto: AutoRates, rows: int, total: float, epochs: int, spread: float = 1.0) -> ResolvedSettings:
        """Fill in what is open for a number of epochs, with rates that fall.

        The precision is slow if neither its rate nor its start is given.

        Args:
            auto: values for what is open.
            rows: to train on.
            total: what they count for, N.
            epochs: of them.
            spread: variance of the targets.
        """
        lr = auto.falling if self.lr is None else self.lr
        if self.precision_lr is not None or self.init_precision is not None:
            return self._resolve_warmed_up(auto, lr)
        steps = epochs * steps_per_epoch(rows, self.batch_size)
        slow = slow_precision(total, steps, curvature=auto.curvature / spread, temperature=self.temperature)
        return ResolvedSettings(**{**vars(self), "lr": lr, **slow})

    def resolve_endless(self, auto: AutoRates) -> ResolvedSettings:
        """Fill in what is open where the number of steps is not known."""
        return self._resolve_warmed_up(auto, auto.constant[0] if self.lr is None else self.lr)

    def _resolve_warmed_up(self, auto: AutoRates, lr: float) -> ResolvedSettings:
        beta = auto.constant[1] if self.precision_lr is None else self.precision_lr
        start = auto.init_precision if self.init_precision is None else self.init_precision
        known = {"lr": lr, "precision_lr": beta, "init_precision": start, "precision_warmup": True}
        return ResolvedSettings(**{**vars(self), **known})


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(RequestedSettings):
    """Training settings with nothing left open.

    Args:
        precision_warmup: whether β is at least 1/(t+1).
    """

    lr: float
    precision_lr: float
    precision_warmup: bool


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
