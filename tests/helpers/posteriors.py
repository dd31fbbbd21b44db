"""Posteriors over the weights of a model, to predict from."""

from __future__ import annotations

import torch
from torch import nn

from slangvi import LowRankPrecisionNormal
from slangvi.params import ParamSpec


def posterior_of(model: nn.Module, spec: ParamSpec | None = None, scale: float = 1.0) -> LowRankPrecisionNormal:
    spec = spec or ParamSpec.of_module(model)
    source = torch.Generator().manual_seed(1)
    loc = spec.flatten({name: p.detach() for name, p in model.named_parameters()})
    factor = torch.randn(spec.num_params, 2, generator=source, dtype=loc.dtype)
    return LowRankPrecisionNormal(loc, factor, torch.full_like(loc, scale), param_spec=spec)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
