"""Per-example gradients of a case, recorded from its own backward pass."""

from __future__ import annotations

import torch

from cases import Case
from slangvi.params import ParamSpec
from slangvi.rows import FactoredGradients, GradientRecorder


def recorder_of(model, engine="factored", dtype=torch.float64, verify=True) -> GradientRecorder:
    return GradientRecorder(model, ParamSpec.of_module(model), dtype, by_definition=engine == "dense", verify=verify)


def captured(case: Case, engine="factored", dtype=torch.float64, verify=True, **options) -> FactoredGradients:
    recorder = recorder_of(case.model, engine, dtype, verify)
    with recorder.recording():
        case.losses(case.model(*case.args)).sum().backward()
    like = torch.empty(0, dtype=dtype)
    return FactoredGradients(ParamSpec.of_module(case.model), recorder.collect(), like=like, **options)


def rows_of(operator: FactoredGradients) -> torch.Tensor:
    """The rows by products with unit vectors, segment by segment."""
    unit = torch.eye(operator.height, dtype=operator.like.dtype, device=operator.like.device)
    return products_of(operator, unit, torch.zeros_like(unit[:1, :1]).expand(1, operator.spec.num_params))[2]


def products_of(
    operator: FactoredGradients, weights: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The Gram, the products with columns, and the combinations by weights, put together from all segments."""
    gram = operator.like.new_zeros(operator.height, operator.height)
    product, combined = (
        gram.new_zeros(operator.height, len(columns)),
        gram.new_zeros(weights.shape[1], columns.shape[1]),
    )
    for place, rows in operator.segments():
        gram += operator.scale**2 * rows.gram()
        product += operator.scale * rows.mm(columns[:, place])
        rows.add_t_mm(operator.scale * weights, combined[:, place])
    return gram, product, combined
