"""Per-example gradients of many small problems at once, each tensor with the replica in front.

Both engines give blocks: the dense one forms the gradients of every parameter tensor, the factored one holds the inputs
and output gradients of the layers. Neither ever loops over replicas.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from slangvi.grads.batched import BatchedPass
from slangvi.grads.blocks import Formed
from slangvi.grads.factored import FactoredGradients, RowGroup
from slangvi.methods.gather import Kind, one_per_example, shapes_of, with_aliases
from slangvi.params import Params, ParamSpec
from slangvi.replicas._inputs import Minibatch

__all__ = ["Gathered", "LockstepGatherer"]

# (params, batch, constants) → (M,), for one replica.
LogLikelihood = Callable[[Params, Any, Any], Tensor]


@dataclass(frozen=True)
class Gathered:
    """Per-example gradients of K replicas.

    Args:
        tensors: what the operators are made of, (K, ...) each.
        values: log-likelihoods, (K, S, M).
        rows: from the tensors of one replica to its rows.
        spec: layout.
        rank: L.
    """

    tensors: Sequence[Tensor]
    values: Tensor
    rows: Callable[[Sequence[Tensor]], RowGroup]
    spec: ParamSpec
    rank: int

    @property
    def num_rows(self) -> int:
        """R, padding included."""
        return self.values.shape[1:].numel()

    def operator(self, tensors: Sequence[Tensor], like: Tensor) -> FactoredGradients:
        """The operator of one replica, also inside vmap."""
        return FactoredGradients(self.spec, [self.rows(tensors)], self.rank, like)


class LockstepGatherer:
    """Gradients by the factored engine where it can follow, else by the dense one.

    The 1st, 2nd, 4th, 8th, … time a kind of batch comes, the rows of one replica are compared with the definition of
    their gradient.

    Args:
        log_likelihood: (params, batch, constants) → (M,), for one replica.
        rank: L.
        model: the module behind it; None for the dense engine.
    """

    def __init__(self, log_likelihood: LogLikelihood, rank: int, model: nn.Module | None) -> None:
        self.log_likelihood = log_likelihood
        self.rank = rank
        self.model = model
        self._passes: dict[Kind, BatchedPass] = {}
        self._uses: Counter[Kind] = Counter()

    def __call__(self, spec: ParamSpec, thetas: Tensor, data: Minibatch) -> Gathered:
        """Rows at draws (K, S, P)."""
        if self.model is None:
            self._uses[spec, shapes_of(data.first)] += 1
            return self.dense(spec, thetas, data)
        try:
            kind = spec, shapes_of(data.first, self.model)
            self._uses[kind] += 1
            found = self._factored(kind, thetas, data, self.model)
            reason = self._doubt(kind, found, thetas, data)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if not reason:
            return found
        formed = self.dense(spec, thetas, data)  # raises where the trouble is the caller's
        self.model = None
        warnings.warn(
            f"the layers of model cannot be read in lockstep ({reason}). From now on every gradient is formed, which "
            'is right but slower. Pass engine="dense" to choose that.',
            UserWarning,
            stacklevel=4,
        )
        return formed

    def ready(self, spec: ParamSpec, data: Minibatch) -> Kind | None:
        """The kind of a batch that has been seen and need not be checked this time, which then counts as used."""
        kind = spec, shapes_of(data.first, self.model)
        uses = self._uses[kind] + 1
        if uses == 1 or (self.model is not None and not uses & (uses - 1)):
            return None
        self._uses[kind] = uses
        return kind

    def unchecked(self, kind: Kind, thetas: Tensor, data: Minibatch) -> Gathered:
        """Rows for a kind that is ready; nothing looks at a number."""
        if self.model is None:
            return self.dense(kind[0], thetas, data)
        return self._factored(kind, thetas, data, self.model)

    def dense(self, spec: ParamSpec, thetas: Tensor, data: Minibatch) -> Gathered:
        """Every gradient formed, by torch.func."""

        def one(
            params: dict[str, Tensor], example: Any, weight: Tensor | None, constants: Any
        ) -> tuple[Tensor, Tensor]:
            single = tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, example)
            value = one_per_example(self.log_likelihood(params, single, constants), 1)[0]
            return -(value if weight is None else value * weight), value

        batch, constants, weights = (_dims(x) for x in (data.batch, data.constants, data.weights))
        rows_of = torch.func.grad(one, has_aux=True)
        for dims in ((None, batch, weights, None), (0, None, None, None), (0, batch, weights, constants)):
            rows_of = torch.func.vmap(rows_of, in_dims=dims, randomness="different")
        found, values = rows_of(spec.unflatten(thetas), data.batch, data.weights, data.constants)
        shape = (len(thetas), thetas.shape[1] * data.num_examples, -1)
        tensors = [found[name].reshape(shape) for name in spec.names]

        def rows(tensors: Sequence[Tensor]) -> RowGroup:
            named = zip(spec.names, tensors, strict=True)
            return RowGroup(tensors[0].shape[0], {name: Formed(part) for name, part in named}, {})

        return Gathered(tensors, values, rows, spec, self.rank)

    def _factored(self, kind: Kind, thetas: Tensor, data: Minibatch, model: nn.Module) -> Gathered:
        """Inputs and output gradients of the layers, all replicas and draws in one pass."""
        run, spec = self._pass(kind, model), kind[0]
        tensors, values = run.gather_replicas(thetas, (data.batch, data.constants), data.weights)
        count = len(tensors) // 2
        one_per_example(values[0, 0], data.num_examples)
        return Gathered(
            tensors, values, lambda parts: run.rows(list(parts[:count]), list(parts[count:])), spec, self.rank
        )

    def _pass(self, kind: Kind, model: nn.Module) -> BatchedPass:
        if kind not in self._passes:
            known = with_aliases(kind[0], model)
            run = BatchedPass(model, known, lambda params, pair: self.log_likelihood(params, *pair))
            if not run.possible:
                raise NotImplementedError("a layer has no rule")
            self._passes[kind] = run
        return self._passes[kind]

    def _doubt(self, kind: Kind, found: Gathered, thetas: Tensor, data: Minibatch) -> str:
        """Why the layers may not be telling the truth; empty when they are, or no check is due."""
        uses = self._uses[kind]
        if uses & (uses - 1):
            return ""
        one = slice((k := uses.bit_length() % len(thetas)), k + 1)  # another replica each time
        formed = self.dense(found.spec, thetas[one], data.take(one))
        expected = _products(formed, formed.tensors, thetas[one])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap speaks of slow batching rules
            products = _products(found, [x[one] for x in found.tensors], thetas[one])
        tolerance = 1e3 * torch.finfo(thetas.dtype).eps
        gaps = [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(products, expected, strict=True)]
        # What is not finite cannot be compared; the step will say so.
        return "their gradients are not those of single examples" if any(gap > tolerance for gap in gaps) else ""


def _products(found: Gathered, tensors: Sequence[Tensor], thetas: Tensor) -> tuple[Tensor, ...]:
    """What a step asks of the operator, for comparison."""
    R = found.num_rows
    ones = thetas.new_ones(len(thetas), R, max(1, found.rank))

    def ask(ones: Tensor, theta: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        g = found.operator(tensors, theta)
        return g.form(), g.sum(), g.square_sum(), g.gram(), g.mm(theta[:1]), g.t_mm(ones)

    answers: tuple[Tensor, ...] = torch.func.vmap(ask)(ones, thetas, list(tensors))
    return answers


def _dims(tree: Any) -> Any:
    """Where vmap finds the dimension to go over: in front of tensors."""
    return tree_map(lambda x: 0 if isinstance(x, Tensor) else None, tree)
