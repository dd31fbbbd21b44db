"""Per-example gradients of the user's own backward passes, read off autograd's graph: nothing is called again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slangvi.errors import UnsupportedModuleError
from slangvi.grads.base import Formed
from slangvi.grads.calls import Backward, Call, count_examples
from slangvi.grads.capture import GradientCapture
from slangvi.grads.factored import RowGroup
from slangvi.params import Params, ParamSpec
from slangvi.rows import Plan, Recording, record

__all__ = ["GraphCapture"]


class GraphCapture(GradientCapture):
    """A `GradientCapture` that hooks the model as a whole and nodes of its graph, and no layer.

    Args:
        model: any module; its first tensor argument has the batch as first dimension.
        spec: the parameters to infer.
        dtype: dtype of the rows.
        verify: compare the sum of all rows with the gradient of the parameters, ever more rarely.
        curvature_rows: examples of each backward pass whose gradients are kept, drawn at random; None keeps all. They
            are weighted to stand for all: the sum of their outer products has the same expectation.
        generator: source of randomness for the choice.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> capture = GraphCapture(model, ParamSpec.of_module(model), torch.float32)
        >>> with capture.recording():
        ...     model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
        >>> (group,) = capture.collect({})
        >>> group.blocks["weight"].form()
        tensor([[1., 2.],
                [3., 4.]])
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ParamSpec,
        dtype: torch.dtype,
        verify: bool = True,
        curvature_rows: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, spec, dtype, verify=False, replayable=False)
        self.curvature_rows, self.generator = curvature_rows, generator
        self._plans: dict[Any, Plan] = {}
        self._recordings: dict[Call, Recording] = {}
        self._verify, self._num_passes = verify, 0

    def _heard(self, spec: ParamSpec) -> dict[str, nn.Module]:
        return {"": self.model}

    def _noted(self, call: Call, output: Any) -> None:
        first = call.first_tensor
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if first is not None and first.ndim and first.shape[0] and outputs:
            size = first.shape[0]
            chosen = self._choose(size, outputs[0].device)
            self._recordings[call] = record(outputs, self._leaves, chosen, self._plans, size)

    def _choose(self, size: int, device: torch.device) -> Tensor:
        """Return the examples of a batch whose rows are kept."""
        if self.curvature_rows is None or self.curvature_rows >= size:
            return torch.arange(size, device=device)
        return torch.randperm(size, generator=self.generator, device=device)[: self.curvature_rows]

    def drop(self) -> None:
        """Forget the passes recorded so far; those to come are recorded."""
        super().drop()
        self._recordings.clear()

    def _assembled(self, backward: Backward, values: Params, num_examples: int | None) -> RowGroup:
        count = count_examples(backward) if num_examples is None else num_examples
        recording = self._recordings.pop(next(iter(backward.cotangents)))
        recording.detach()
        dtype = self.assembler.dtype
        totals = {name: total.to(dtype) for name, total in backward.totals.items()}
        if recording.plan is None:  # outputs were not finite, and the step must see that
            shares = {name: total.reshape(1, -1).expand(count, -1) / count for name, total in totals.items()}
            return RowGroup(count, {name: Formed(share) for name, share in shares.items()}, totals)
        kept = len(recording.chosen)
        blocks = {name: Formed(recording.rows(name, dtype).reshape(kept, -1)) for name in recording.parts}
        if kept < count:
            weighted = {name: block.scaled(math.sqrt(count / kept)) for name, block in blocks.items()}
            return RowGroup(count, weighted, totals, num_chosen=kept)
        self._num_passes += 1
        if self._verify and self._num_passes.bit_count() == 1:
            _reconcile(blocks, totals, recording.plan.tolerance)
        return RowGroup(count, blocks, totals)


def _reconcile(blocks: dict[str, Formed], totals: dict[str, Tensor], tolerance: float) -> None:
    """Raise unless the rows of each parameter add up to its gradient."""
    wrong = [name for name, total in totals.items() if not _adds_up(blocks.get(name), total, tolerance)]
    if wrong:
        raise UnsupportedModuleError(
            f"the gradient of parameter(s) {', '.join(map(repr, wrong[:3]))} does not come from the outputs of the "
            "model alone, so it cannot be told apart by example. Usual causes: a penalty on the weights in the loss "
            "(the prior is prior_precision), or a parameter that is used in the loss only. Remove it, or pass "
            "verify=False."
        )


def _adds_up(block: Formed | None, total: Tensor, tolerance: float) -> bool:
    """Tell whether rows add up to a gradient but for rounding; what is not finite is left to the step."""
    found = torch.zeros_like(total) if block is None else block.sum().view(total.shape)
    largest = float(total.abs().max()) if block is None else float(block.rows.abs().sum(0).max())
    return not float((found - total).abs().max()) > tolerance * largest + torch.finfo(total.dtype).eps
