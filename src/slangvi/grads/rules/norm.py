"""Normalisation within an example: LayerNorm, RMSNorm, GroupNorm. Their gradients are small and simply formed."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slangvi.grads.blocks import Block, Formed
from slangvi.grads.rules.registry import register_rule


@register_rule(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, x: Tensor, delta: Tensor) -> dict[str, Block] | None:
    """Weight: g_r = Σ_t δ_rt ∘ x̂_rt. Bias: g_r = Σ_t δ_rt.  x and δ (R, ..., *normalized_shape)."""
    return _affine(module, F.layer_norm(x, module.normalized_shape, None, None, module.eps), delta)


@register_rule(nn.RMSNorm)
def rms_norm(module: nn.RMSNorm, x: Tensor, delta: Tensor) -> dict[str, Block] | None:
    """Weight: g_r = Σ_t δ_rt ∘ x̂_rt.  x and δ (R, ..., *normalized_shape)."""
    return _affine(module, F.rms_norm(x, module.normalized_shape, None, module.eps), delta)


@register_rule(nn.GroupNorm)
def group_norm(module: nn.GroupNorm, x: Tensor, delta: Tensor) -> dict[str, Block] | None:
    """Weight: g_r = Σ_t δ_rt ∘ x̂_rt over positions t.  x and δ (R, C, ...)."""
    white = F.group_norm(x, module.num_groups, None, None, module.eps)
    return {
        "weight": Formed((delta * white).flatten(2).sum(-1) if x.ndim > 2 else delta * white),
        "bias": Formed(delta.flatten(2).sum(-1) if x.ndim > 2 else delta),
    }


def _affine(module: Any, white: Tensor, delta: Tensor) -> dict[str, Block] | None:
    """Sum over everything between the batch and the normalised dimensions."""
    between = white.ndim - len(module.normalized_shape)
    if between < 1:
        return None
    weight, bias = (
        x.flatten(between).flatten(1, -2).sum(1) if between > 1 else x.flatten(1) for x in _pair(white, delta)
    )
    return {"weight": Formed(weight), "bias": Formed(bias)}


def _pair(white: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    return delta * white, delta
