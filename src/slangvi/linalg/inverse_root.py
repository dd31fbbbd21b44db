"""The symmetric inverse root of I + S, for draws, with a derivative that needs no differences of eigenvalues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slangvi.linalg.products import batch_matmul

__all__ = ["InverseRoot", "damped", "damping", "turn"]

_ONCE = (
    "draws of a low-rank precision can be differentiated once, not twice. Take second derivatives of log_prob, entropy "
    "or KL, or draw from DensePrecisionNormal."
)


class InverseRoot(torch.autograd.Function):
    """c(S) y for symmetric S ⪰ 0, c(s) = −1/(√(1+s)(1+√(1+s))), given √(1+s) and the eigenvectors of S.

    Q and Qᵀ are applied one after the other, never multiplied out: the product would lose what Qᵀy tells apart when S
    is large and nearly singular. Autograd's own eigh divides by differences of eigenvalues, which are zero at U = 0;
    the derivative of a matrix function needs only divided differences of c, and these are smooth: with a = √(1+s_i),
    b = √(1+s_j), (c_i − c_j)/(s_i − s_j) = [1/(ab) − 1/((1+a)(1+b))]/(a+b).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gram: Tensor, y: Tensor, roots: Tensor, vectors: Tensor) -> Tensor:
        """c(S) y, (..., L)."""
        return turn(vectors, damped(turn(vectors.mT, y), roots))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """All inputs are needed."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """By S and by y."""
        gram, y, roots, vectors = ctx.saved_tensors
        grad, turned = (turn(vectors.mT, x) for x in (grads[0], y))
        inner = _slopes(roots) * (grad.unsqueeze(-1) * turned.unsqueeze(-2)).sum_to_size(gram.shape)
        by_gram, by_y = vectors @ inner @ vectors.mT, turn(vectors, damped(grad, roots))
        if torch.is_grad_enabled():
            by_gram, by_y = (_Final.apply(x, gram, y) for x in (by_gram, by_y))  # type: ignore[no-untyped-call]
        return by_gram, by_y, None, None

    @staticmethod
    def jvp(ctx: Any, gram: Tensor, y: Tensor, *rest: None) -> Tensor:
        """Along a direction of S and y."""
        _, old, roots, vectors = ctx.saved_tensors
        inner = _slopes(roots) * (vectors.mT @ gram @ vectors)
        return turn(vectors, turn(inner, turn(vectors.mT, old)) + damped(turn(vectors.mT, y), roots))


class _Final(torch.autograd.Function):
    """A derivative whose own derivative is refused.

    Torch's `once_differentiable` is passed over where `torch.autograd.grad` is told by what to differentiate: the graph
    does not lead from its error to there. Here it does, through `gram` and `y`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, gram: Tensor, y: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(_ONCE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        raise NotImplementedError(_ONCE)


def _slopes(roots: Tensor) -> Tensor:
    """Divided differences of c, (..., L, L), given √(1+s)."""
    a, b = roots.unsqueeze(-1), roots.unsqueeze(-2)
    slopes: Tensor = (1.0 / (a * b) - 1.0 / ((1.0 + a) * (1.0 + b))) / (a + b)
    return slopes


def damped(turned: Tensor, roots: Tensor) -> Tensor:
    """c(s) y in the eigenbasis, given √(1+s)."""
    return turned * damping(roots)


def damping(roots: Tensor) -> Tensor:
    """c(s), given √(1+s)."""
    return -1.0 / torch.addcmul(roots, roots, roots)


def turn(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix (..., L, L) times vector (..., L); a leading dimension more is samples, which go through one product."""
    if vector.ndim == matrix.ndim:
        return batch_matmul(vector.movedim(0, -2), matrix.mT).movedim(-2, 0)
    return batch_matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)
