"""Whether gradients that were computed in two ways are the same but for rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slangvi.grads.calls import Backward
from slangvi.grads.replay import call_tolerance

__all__ = ["disagreeing", "pass_tolerance"]


def pass_tolerance(backward: Backward, dtype: torch.dtype) -> float:
    """Relative error that rounding alone explains, by the coarsest precision that took part in the pass.

    Args:
        backward: the pass.
        dtype: dtype of the rows.
    """
    dtypes = {dtype} | {grad.dtype for grads in backward.cotangents.values() for grad in grads.values()}
    dtypes |= {total.dtype for total in backward.totals.values()}
    return max((call_tolerance(call, dtypes) for call in backward.cotangents), default=1e-7)


def disagreeing(
    found: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    tolerance: float,
    sizes: Mapping[str, Tensor] | None = None,
) -> list[str]:
    """Names whose values differ by more than the tolerance, relative to their size and a little of everything's.

    `sizes` are those of terms that were added up, where they may be larger than their sum.
    """
    if not truth:
        return []
    norms = torch.stack([value.double().norm() for value in truth.values()])
    gaps = torch.stack(
        [
            (found[name].double().flatten() - value.double().flatten()).norm()
            if name in found
            else value.double().norm()
            for name, value in truth.items()
        ]
    )
    slack = norms + 1e-2 * norms.norm()
    if sizes is not None:
        slack = slack + 1e-2 * torch.stack([sizes[name] for name in truth])
    fine = gaps <= tolerance * slack
    return [name for name, ok in zip(truth, fine.tolist(), strict=True) if not ok]
