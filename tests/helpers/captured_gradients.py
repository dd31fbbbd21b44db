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
    return FactoredGradients(ParamSpec.of_module(case.model), recorder.collect(), rank=2, like=like, **options)


def rows_of(operator: FactoredGradients) -> torch.Tensor:
    return operator.t_mm(torch.eye(operator.height, dtype=operator.like.dtype))
