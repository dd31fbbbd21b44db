"""Per-example gradients of many small problems at once, each tensor with the replica in front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from slangvi.methods.gather import one_per_example
from slangvi.params import Params, ParamSpec
from slangvi.replicas._inputs import Minibatch

__all__ = ["LogLikelihood", "gather_rows"]

# (params, batch, constants) → (M,), for one replica.
LogLikelihood = Callable[[Params, Any, Any], Tensor]


def gather_rows(
    log_likelihood: LogLikelihood, spec: ParamSpec, thetas: Tensor, data: Minibatch
) -> tuple[Tensor, Tensor]:
    """Return the gradient of every example at every draw, (K, S·M, P), and the log-likelihoods, (K, S, M).

    Args:
        log_likelihood: of one replica.
        spec: layout of its parameters.
        thetas: draws, (K, S, P).
        data: what the likelihoods see.
    """

    def one(params: dict[str, Tensor], example: Any, weight: Tensor | None, constants: Any) -> tuple[Tensor, Tensor]:
        single = tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, example)
        value = one_per_example(log_likelihood(params, single, constants), 1)[0]
        return -(value if weight is None else value * weight), value

    batch, constants, weights = (_dims(x) for x in (data.batch, data.constants, data.weights))
    rows_of = torch.func.grad(one, has_aux=True)
    for dims in ((None, batch, weights, None), (0, None, None, None), (0, batch, weights, constants)):
        rows_of = torch.func.vmap(rows_of, in_dims=dims, randomness="different")
    found, values = rows_of(spec.unflatten(thetas), data.batch, data.weights, data.constants)
    shape = (len(thetas), thetas.shape[1] * data.num_examples, -1)
    return torch.cat([found[name].reshape(shape) for name in spec.names], -1), values


def _dims(tree: Any) -> Any:
    """Return where vmap finds the dimension to go over: in front of tensors."""
    return tree_map(lambda x: 0 if isinstance(x, Tensor) else None, tree)
