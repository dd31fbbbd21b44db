"""Per-example gradients of a case, captured from its own backward pass."""

from __future__ import annotations

import torch

from cases import Case
from slangvi.grads import FactoredGradients, GradientCapture
from slangvi.params import ParamSpec


def captured(case: Case, engine="factored", dtype=torch.float64, verify=True, **options) -> FactoredGradients:
    spec = ParamSpec.of_module(case.model)
    capture = GradientCapture(case.model, spec, dtype, engine=engine, verify=verify)
    with capture.recording():
        case.losses(case.model(*case.args)).sum().backward()
    groups = capture.collect(dict(case.model.named_parameters()))
    like = torch.empty(0, dtype=dtype)
    return FactoredGradients(spec, groups, rank=2, like=like, **options)


def rows_of(operator: FactoredGradients) -> torch.Tensor:
    return operator.t_mm(torch.eye(operator.num_rows, dtype=operator.like.dtype))
