"""Convolutions in one, two and three dimensions: patches turn them into linear layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from slangvi.grads.blocks import Block, Formed, Outer
from slangvi.grads.rules.registry import register_rule

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, shares_inputs=True)
def conv(module: Conv, x: Tensor, delta: Tensor) -> dict[str, Block] | None:
    """Weight of group g: g_r = Σ_t δ_rgt ⊗ patch_rgt. Bias: g_r = Σ_t δ_rt.  x (R, C, ...), δ (R, O, ...)."""
    if x.ndim != len(module.kernel_size) + 2:
        return None
    left = delta.unflatten(1, (module.groups, -1)).flatten(3).mT
    return {"weight": Outer(left, patches(module, x)), "bias": Formed(delta.flatten(2).sum(-1))}


def patches(module: Conv, x: Tensor) -> Tensor:
    """What each output position sees, (R, groups, positions, C/groups · kernel entries)."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    for axis, (size, step, gap) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=2
    ):
        x = x.unfold(axis, (size - 1) * gap + 1, step)[..., ::gap]
    spatial = len(module.kernel_size)
    x = x.flatten(2, 1 + spatial).unflatten(1, (module.groups, -1))
    return x.transpose(2, 3).flatten(3)
