"""Convolutions in one, two and three dimensions: patches turn them into linear layers."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from slangvi.grads.blocks import Block, Formed, Unopened
from slangvi.grads.rules.registry import register_rule

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, shares_inputs=True)
def conv(module: Conv, x: Tensor, delta: Tensor) -> dict[str, Block | Unopened] | None:
    """Weight of group g: g_r = Σ_t δ_rgt ⊗ patch_rgt. Bias: g_r = Σ_t δ_rt.  x (R, C, ...), δ (R, O, ...)."""
    if x.ndim != len(module.kernel_size) + 2:
        return None
    left = delta.unflatten(1, (module.groups, -1)).flatten(3).mT
    weight = Unopened(left, x, module.weight[0].numel(), partial(patches, module))
    return {"weight": weight, "bias": Formed(delta.flatten(2).sum(-1))}


def patches(module: Conv, x: Tensor) -> Tensor:
    """What each output position sees, (R, groups, positions, C/groups · kernel entries)."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    for axis, (size, step, gap) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=2
    ):
        x = x.unfold(axis, (size - 1) * gap + 1, step)[..., ::gap]
    x = x.unflatten(1, (module.groups, -1))
    positions = range(3, 3 + len(module.kernel_size))
    # One copy, which the last line makes: patches are as many times larger than x as a kernel has entries.
    ordered = x.permute(0, 1, *positions, 2, *(axis + len(positions) for axis in positions))
    return ordered.flatten(2 + len(positions)).flatten(2, -2)
