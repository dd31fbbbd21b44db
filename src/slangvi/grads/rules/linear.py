"""Linear layers, with any number of dimensions between batch and features."""

from __future__ import annotations

from torch import Tensor, nn

from slangvi.grads.blocks import Block, Formed, Outer
from slangvi.grads.rules.registry import register_rule


@register_rule(nn.Linear, shares_inputs=True)
def linear(module: nn.Linear, x: Tensor, delta: Tensor) -> dict[str, Block] | None:
    """Weight: g_r = Σ_t δ_rt ⊗ x_rt. Bias: g_r = Σ_t δ_rt.  x (R, ..., I), δ (R, ..., O)."""
    if x.ndim < 2:
        return None
    left = delta.reshape(delta.shape[0], 1, -1, delta.shape[-1])
    right = x.reshape(x.shape[0], 1, -1, x.shape[-1])
    # With one position the bias has δ itself as gradient: the same memory, so that their Grams can share δδᵀ.
    bias = left.reshape(left.shape[0], -1) if left.shape[2] == 1 else left.sum((1, 2))
    return {"weight": Outer(left, right), "bias": Formed(bias)}
