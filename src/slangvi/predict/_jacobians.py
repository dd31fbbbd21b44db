"""Jacobians of a model's outputs with respect to its weights, example by example."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from slangvi.params import ParamSpec
from slangvi.predict.samples import call
from slangvi.rows.dense import batch_size, slice_batch

__all__ = ["Jacobians"]

# A Jacobian exists so many times at the worst moment: while it is whitened.
_COPIES = 4


class Jacobians:
    """J(x) at fixed weights for chunks of rows.

    Args:
        model: the module, in the mode it shall be called in.
        spec: layout of the flat vector; parameters outside it stay at the model's values.
        loc: weights to differentiate at, (P,).
        first: one row of the inputs, to learn the shape of the outputs from.
    """

    def __init__(self, model: nn.Module, spec: ParamSpec, loc: Tensor, first: Any) -> None:
        self.model, self.spec = model, spec
        self._dtypes = {name: value.dtype for name, value in model.named_parameters()}
        self._params = {name: value.contiguous() for name, value in spec.unflatten(loc).items()}
        self._loc = loc
        self._vmap = True
        self.output_shape, self._saved = self._probe(first)
        self.num_outputs = math.prod(self.output_shape)

    def rows_within(self, memory_limit: int) -> int:
        """Return how many rows fit a number of bytes, at least one: Jacobians, and what backward keeps for outputs."""
        jacobian = _COPIES * self.num_outputs * self.spec.num_params * self._loc.element_size()
        return max(1, memory_limit // max(1, jacobian + (1 + self.num_outputs) * self._saved))

    def __call__(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (m, C) and Jacobians (m, C, P) of m rows, in the dtype of the weights."""
        if self._vmap:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # vmap speaks of slow batching rules
                    return self._all_at_once(x)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # vmap cannot follow this model; row by row says what is wrong, if anything
                self._vmap = False
        return self._row_by_row(x)

    def _all_at_once(self, x: Any) -> tuple[Tensor, Tensor]:
        def outputs(params: dict[str, Tensor], row: Any) -> tuple[Tensor, Tensor]:
            single = tree_map(lambda v: v.unsqueeze(0) if isinstance(v, Tensor) else v, row)
            flat = self._outputs(params, single).reshape(-1)
            return flat, flat

        in_dims = tree_map(lambda v: 0 if isinstance(v, Tensor) else None, x)
        both = torch.func.vmap(torch.func.jacrev(outputs, has_aux=True), in_dims=(None, in_dims))
        pieces, means = both(self._params, x)
        whole = self._loc.new_empty(len(means), self.num_outputs, self.spec.num_params)
        for name, place in self.spec.slices.items():
            whole[..., place] = pieces.pop(name).reshape(len(means), self.num_outputs, -1)
        return means, whole

    def _row_by_row(self, x: Any) -> tuple[Tensor, Tensor]:
        rows = batch_size(x)
        means = self._loc.new_empty(rows, self.num_outputs)
        whole = self._loc.new_zeros(rows, self.num_outputs, self.spec.num_params)
        for row in range(rows):
            params = {name: value.detach().requires_grad_() for name, value in self._params.items()}
            with torch.enable_grad():
                flat = self._outputs(params, slice_batch(x, row, row + 1)).reshape(-1)
                for c, output in enumerate(flat):
                    grads = torch.autograd.grad(output, list(params.values()), retain_graph=True, allow_unused=True)
                    for place, grad in zip(self.spec.slices.values(), grads, strict=True):
                        if grad is not None:
                            whole[row, c, place] = grad.flatten()
            means[row] = flat.detach()
        return means, whole

    def _outputs(self, params: dict[str, Tensor], x: Any) -> Tensor:
        """Return the outputs of one row, (1, ...), in the dtype of the weights."""
        cast = {name: value.to(self._dtypes[name]) for name, value in params.items()}
        outputs = call(self.model, cast, x)
        if outputs.ndim == 0 or outputs.shape[0] != 1:
            raise ValueError(f"the model must return one row per input row, (1, ...), got {tuple(outputs.shape)}.")
        return outputs.to(self._loc.dtype)

    def _probe(self, first: Any) -> tuple[tuple[int, ...], int]:
        """Return the shape of one row's outputs, and the bytes that backward would keep for it beside the weights."""
        params = {name: value.detach().requires_grad_() for name, value in self._params.items()}
        known = {value.untyped_storage()._cdata for value in (*params.values(), *self.model.parameters())}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                kept[storage._cdata] = tensor.nbytes
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = self._outputs(params, first)
        if outputs.numel() == 0:
            raise ValueError(f"the model must return at least one number per row, got {tuple(outputs.shape)}.")
        return tuple(outputs.shape[1:]), sum(kept.values())
