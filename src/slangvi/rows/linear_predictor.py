r"""Per-example gradients of models that see their weights through one linear predictor, f = xᵀθ.

The gradient of example i at draw s is r_is x_i with the slope r = −∂log p/∂f. All draws of one example are parallel, so
that Σ_s g_is g_isᵀ = w_i² x_i x_iᵀ with w_i² = Σ_s r_is²: M rows w_i x_i stand in for the M·S gradients wherever second
moments are asked for, and everything costs O(M P) instead of O(M S P).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from slangvi.linalg.products import batch_matmul
from slangvi.rows.operator import Segment

__all__ = ["LinearPredictorGradients"]


class LinearPredictorGradients:
    r"""The gradient operator of M examples at S draws of the weights, for likelihoods of f_is = x_iᵀθ_s.

    $$ \sum_{i,s} g_{is} = \sum_i x_i \sum_s r_{is}, \qquad
       \sum_{i,s} g_{is} g_{is}^\top = \sum_i x_i x_i^\top \sum_s r_{is}^2 $$

    `num_rows` counts the gradients, M·S. The rows of `form`, `gram`, `mm` and `add_t_mm` are the M merged ones
    (`height`): their GᵀG is that of all gradients, but their sum is not; that is what `sum` is for.

    Args:
        inputs: x, (..., M, P); leading dimensions are a batch of problems, each with rows of its own.
        slopes: r = −∂log p/∂f at each draw, (..., S, M).
        curvatures: h = −∂²log p/∂f², for `hessian` and `hessian_diag`, (..., S, M).

    Example:
        >>> import torch
        >>> x, slopes = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
        >>> g = LinearPredictorGradients(x, slopes)
        >>> g.num_rows, g.sum(), g.form()
        (2, tensor([ 7., 14.]), tensor([[ 5., 10.]]))
    """

    scale = 1.0
    spectrum_route = "auto"
    space = None

    def __init__(self, inputs: Tensor, slopes: Tensor, curvatures: Tensor | None = None) -> None:
        _check("slopes", slopes, inputs)
        if curvatures is not None:
            _check("curvatures", curvatures, inputs)
        self.inputs = inputs
        self.slopes = slopes
        self.curvatures = curvatures

    @property
    def num_rows(self) -> int:
        """R = M·S."""
        return self.slopes.shape[-2] * self.slopes.shape[-1]

    @property
    def height(self) -> int:
        """M, the rows that second moments are made of."""
        return self.inputs.shape[-2]

    def segments(self, cuts: Sequence[int] = (), below: Tensor | None = None) -> Iterator[Segment]:
        """Yield all columns, or those between the cuts."""
        size = self.inputs.shape[-1]
        inner = [cut for cut in cuts if cut < size]
        for start, stop in pairwise([0, *inner, size]):
            some = self.inputs[..., start:stop]
            yield Segment(slice(start, stop), LinearPredictorGradients(some, self.slopes) if inner else self)

    def sum(self) -> Tensor:
        """Σ_i x_i Σ_s r_is, (..., P)."""
        return _weighed(self.slopes.sum(-2), self.inputs)

    def square_sum(self) -> Tensor:
        """Σ_i x_i² Σ_s r_is², (..., P)."""
        return _weighed(self._squares, self._input_squares)

    def gram(self) -> Tensor:
        """(..., M, M)."""
        return batch_matmul(self.inputs, self.inputs.mT) * (self._sizes * self._sizes.mT)

    def mm(self, rows: Tensor) -> Tensor:
        """(..., K, P) → (..., M, K)."""
        return batch_matmul(self.inputs, rows.mT) * self._sizes

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (..., M, K) to a (..., K, P) tensor."""
        onto += batch_matmul((weights * self._sizes).mT, self.inputs)

    def t_mm(self, weights: Tensor) -> Tensor:
        """(..., M, K) → (..., K, P)."""
        return batch_matmul((weights * self._sizes).mT, self.inputs)

    def form(self) -> Tensor:
        """Rows x_i √(Σ_s r_is²), (..., M, P)."""
        return self.inputs * self._sizes

    def hessian(self) -> Tensor:
        """Σ_i x_i x_iᵀ Σ_s h_is, (..., P, P)."""
        return batch_matmul(self.inputs.mT, self.inputs * self._curvature.unsqueeze(-1))

    def hessian_diag(self) -> Tensor:
        """Its diagonal, (..., P)."""
        return _weighed(self._curvature, self._input_squares)

    @cached_property
    def _squares(self) -> Tensor:
        """Σ_s r², the squares of w, (..., M)."""
        return self.slopes.square().sum(-2)

    @cached_property
    def _sizes(self) -> Tensor:
        """The column w, (..., M, 1)."""
        return self._squares.sqrt().unsqueeze(-1)

    @cached_property
    def _input_squares(self) -> Tensor:
        return self.inputs.square()

    @property
    def _curvature(self) -> Tensor:
        """Σ_s h, (..., M)."""
        if self.curvatures is None:
            raise ValueError(
                "hessian needs curvatures, got None. Pass curvatures=, the values of −∂²log p/∂f² at each draw."
            )
        return self.curvatures.sum(-2)


def _weighed(weights: Tensor, rows: Tensor) -> Tensor:
    """Σ_i w_i x_i for w (..., M) and x (..., M, P), (..., P)."""
    return batch_matmul(weights.unsqueeze(-2), rows).squeeze(-2)


def _check(name: str, values: Tensor, inputs: Tensor) -> None:
    """One number for each draw and example."""
    if inputs.ndim < 2 or values.ndim != inputs.ndim or (*values.shape[:-2], values.shape[-1]) != inputs.shape[:-1]:
        raise ValueError(
            f"{name} must have shape (..., S, M) for inputs of shape (..., M, P), got {tuple(values.shape)} for "
            f"{tuple(inputs.shape)}. Give one number for each draw and example, with the same leading dimensions."
        )
