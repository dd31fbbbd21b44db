"""Hessians of the negative log-likelihood through torch.func, for functional methods that take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from slangvi.errors import UnsupportedModuleError
from slangvi.params import Params, ParamSpec
from slangvi.rows.dense import Together, draws_at_once

__all__ = ["HESSIAN_REMEDY", "hessian_gatherer"]

HESSIAN_REMEDY = (
    'The Hessian of a likelihood that is not log-concave may be negative: use curvature="ef", more mc_samples, a lower '
    'precision_lr or a larger prior_precision. If it is "ef" already, rounding did this: use float64 parameters.'
)

# Rows of a Hessian computed together: each holds the activations of a backward pass.
_ROWS = 64


def hessian_gatherer(
    log_likelihood: Callable[[Params, Any], Tensor], diagonal: bool, dtypes: Mapping[str, torch.dtype] | None = None
) -> Callable[[ParamSpec, Tensor, Any], Tensor]:
    r"""A function of (layout, draws (S, P), batch) that returns the Hessian summed over draws and examples.

    $$ \sum_{s,i} -\nabla^2 \log p(y_i \mid x_i, \theta_s) $$

    Every draw takes one forward and backward pass, and one more backward pass through both for each of the P
    parameters, diagonal or not: automatic differentiation gives whole rows. Small problems take all draws in one pass.

    Args:
        log_likelihood: (params, batch) → (M,).
        diagonal: keep (P,) only, instead of (P, P).
        dtypes: of the parameters that `log_likelihood` expects, by name; None gives it those of the draws.

    Example:
        >>> def log_likelihood(params, batch):
        ...     return -0.5 * (batch @ params["w"]) ** 2
        >>> found = hessian_gatherer(log_likelihood, diagonal=False)
        >>> spec = ParamSpec.of({"w": torch.zeros(2)})
        >>> found(spec, torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2.],
                [2., 4.]])
    """
    together = Together()

    def gather(spec: ParamSpec, thetas: Tensor, batch: Any) -> Tensor:
        def loss(flat: Tensor) -> Tensor:
            params = spec.unflatten(flat)
            if dtypes is not None:
                params = {name: value.to(dtypes.get(name, value.dtype)) for name, value in params.items()}
            return -log_likelihood(params, batch).sum()

        at_once = draws_at_once(spec, thetas, batch, backward_passes=min(_ROWS, spec.num_params))
        return together.summed(lambda theta: _hessian(loss, theta, diagonal), thetas, at_once)

    return gather


def _hessian(loss: Callable[[Tensor], Tensor], theta: Tensor, diagonal: bool) -> Tensor:
    """Second derivatives at one point: (P,) or (P, P)."""
    size, found = len(theta), []
    try:
        pull = vjp(grad(loss), theta)[1]
        for place in torch.arange(size, device=theta.device).split(_ROWS):
            units = torch.zeros(len(place), size, dtype=theta.dtype, device=theta.device)
            units.scatter_(1, place[:, None], 1.0)
            rows = vmap(lambda unit: pull(unit)[0])(units)
            found.append(rows.gather(1, place[:, None])[:, 0] if diagonal else rows)
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        raise UnsupportedModuleError(
            'curvature="hessian" needs second derivatives, which an operation in log_likelihood does not have: '
            f'{error} Use curvature="ef".'
        ) from error
    return torch.cat(found)
