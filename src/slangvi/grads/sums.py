"""Gradient sums of the user's own backward passes, for methods that ask for no more: nothing is called again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slangvi.grads.calls import Backward, count_examples
from slangvi.grads.capture import GradientCapture, check_tables
from slangvi.grads.factored import RowGroup
from slangvi.params import Params, ParamSpec

__all__ = ["SumCapture", "SumGroup"]


@dataclass(frozen=True)
class SumGroup(RowGroup):
    """What one backward pass brought, added up over its examples, and what its weights were drawn from.

    Args:
        drawn: the numbers behind the draw, such as its noise, (P,); None until somebody says so.
    """

    drawn: Tensor | None = None

    def sum(self, spec: ParamSpec, like: Tensor) -> Tensor:
        """Σ_i g_i as one vector (P,), zeros for parameters the pass did not reach."""
        found = {name: self.totals.get(name) for name in spec.names}
        sizes = dict(zip(spec.names, spec.numels, strict=True))
        pieces = [like.new_zeros(sizes[name]) if x is None else x.flatten().to(like) for name, x in found.items()]
        return torch.cat(pieces).mul_(self.scale)


class SumCapture(GradientCapture):
    """A `GradientCapture` that listens to the model as a whole and to its parameters, and to no layer.

    Of a pass it keeps the gradients that autograd added up, and the number of examples. Any module will do, also one
    that normalises over the batch; but the model must be called as a whole, since a layer may see another batch.

    Args:
        model: any module; its first tensor argument has the batch as first dimension.
        spec: the parameters to infer.
        dtype: dtype of the sums.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> capture = SumCapture(model, ParamSpec.of_module(model), torch.float32)
        >>> with capture.recording():
        ...     model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
        >>> (group,) = capture.collect({})
        >>> group.num_rows, group.totals["weight"]
        (2, tensor([[4., 6.]]))
    """

    def __init__(self, model: nn.Module, spec: ParamSpec, dtype: torch.dtype) -> None:
        super().__init__(model, spec, dtype, verify=False, replayable=False)

    def _heard(self, spec: ParamSpec) -> dict[str, nn.Module]:
        return {"": self.model}

    def _check_model(self) -> None:
        check_tables(self.model)

    def _assembled(self, backward: Backward, values: Params, num_examples: int | None) -> SumGroup:
        count = count_examples(backward) if num_examples is None else num_examples
        dtype = self.assembler.dtype
        return SumGroup(count, {}, {name: total.to(dtype) for name, total in backward.totals.items()})
