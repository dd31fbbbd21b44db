"""All draws of the weights in one pass: vmap over draws, gradients with respect to zeros added to layer outputs.

A layer's output y is replaced by y + ε with ε = 0. The gradient with respect to ε is the gradient of the loss at the
layer's output, which together with the layer's input is all a rule needs. Everything is a pure function of (θ, ε), so
S draws are one vmap, and autograd never computes a weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from slangvi.grads.blocks import Block, Settle, add, as_it_is
from slangvi.grads.factored import RowGroup
from slangvi.grads.rules import find_rule, shares_inputs
from slangvi.params import Params, ParamSpec

__all__ = ["BatchedPass"]

Hook = Callable[[nn.Module, Any, Any], Any]


class BatchedPass:
    """Per-example gradients at S draws at once, for models whose parameters all belong to layers with rules.

    One object serves batches of one shape: it remembers which layers they visit.

    Args:
        model: the module behind the log-likelihood.
        spec: layout, tied names included.
        log_likelihood: (params, batch) → (M,).
        settle: (name, block) → the same gradients in the form they are to be kept in.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ParamSpec,
        log_likelihood: Callable[[Params, Any], Tensor],
        settle: Settle = as_it_is,
    ) -> None:
        self.settle = settle
        self.model = model
        self.spec = spec
        self.log_likelihood = log_likelihood
        # Layers in the order of their calls, with the shapes of their outputs; found by the first pass.
        self.calls: list[tuple[str, torch.Size]] | None = None
        self.layers: dict[str, nn.Module] = {
            name: module
            for name, module in model.named_modules()
            if any(self._canonical(name, local) for local in module._parameters)
        }

    @property
    def possible(self) -> bool:
        """Whether every layer that owns an inferred parameter has a rule."""
        return all(find_rule(module) is not None for module in self.layers.values())

    def gather(self, thetas: Tensor, batch: Any) -> tuple[RowGroup, Tensor]:
        """Rows of all draws, draw by draw, and the log-likelihoods (S, M)."""
        if self.calls is None:
            self.calls = self._dry_run(thetas[0], batch)
        zero = thetas.new_zeros(())
        zeros = [zero.expand(len(thetas), *shape).detach().requires_grad_() for _, shape in self.calls]
        with torch.enable_grad():
            run = torch.func.vmap(lambda theta, *eps: self._one(theta, eps, batch), randomness="different")
            values, inputs = run(thetas.detach(), *zeros)
            deltas = list(torch.autograd.grad(values, zeros, values.new_full((), -1.0).expand_as(values)))
        inputs = [x.detach() for x in inputs]
        return self.rows(inputs, deltas), values.detach()

    def gather_replicas(self, thetas: Tensor, batch: Any, weights: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """The same for K problems at once, as tensors.

        Args:
            thetas: draws of each, (K, S, P).
            batch: tensors (K, M, ...), or (K, ...) for what all examples of a problem share.
            weights: of the examples, (K, M); None means ones.

        Returns:
            Inputs and output gradients of the layers, each (K, S, M, ...), and the log-likelihoods (K, S, M).
        """
        tensors = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch)
        if self.calls is None:
            first = tree_map(lambda x: x[0] if isinstance(x, Tensor) else x, batch)
            self.calls = self._dry_run(thetas[0, 0], first)
        zero = thetas.new_zeros(())
        zeros = [zero.expand(*thetas.shape[:2], *shape).detach().requires_grad_() for _, shape in self.calls]
        with torch.enable_grad():
            draws = torch.func.vmap(self._one, in_dims=(0, 0, None), randomness="different")
            run = torch.func.vmap(draws, in_dims=(0, 0, tensors), randomness="different")
            values, inputs = run(thetas.detach(), zeros, batch)
            slopes = values.new_full((), -1.0) if weights is None else -weights.unsqueeze(1)
            deltas = torch.autograd.grad(values, zeros, slopes.expand_as(values))
        return [*(x.detach() for x in inputs), *deltas], values.detach()

    def rows(self, inputs: list[Tensor], deltas: list[Tensor]) -> RowGroup:
        """Rows from the inputs and output gradients of the layers in the order of their calls, (S, M, ...) each.

        Both lists are used up: what one layer leaves makes room for the gradients of the next. Layers with few
        parameters come first, because their rows take little, and what they leave is as much as others leave: then
        there is room for the patches of a convolution.
        """
        assert self.calls is not None
        assert len(self.calls) == len(inputs) == len(deltas)
        parts: dict[str, dict[int, Block]] = {}
        count = deltas[0].shape[:2].numel()
        pairs = dict(enumerate(zip(inputs, deltas, strict=True)))
        inputs.clear()
        deltas.clear()
        for turn in sorted(pairs, key=self._size):
            for full, block in self._blocks(self.calls[turn][0], *pairs.pop(turn)).items():
                parts.setdefault(full, {})[turn] = block
        # Several uses are added in the order of the calls, whichever came first.
        blocks = {name: add([uses[turn] for turn in sorted(uses)]) for name, uses in parts.items()}
        return RowGroup(count, blocks, {})

    def _size(self, turn: int) -> int:
        """Parameters of the layer of a call."""
        assert self.calls is not None
        return sum(param.numel() for param in self.layers[self.calls[turn][0]].parameters(recurse=False))

    def _one(self, theta: Tensor, epsilons: Sequence[Tensor], batch: Any) -> tuple[Tensor, list[Tensor]]:
        """Log-likelihoods at one draw, and the inputs of the layers."""
        inputs: list[Tensor] = []

        def perturb(name: str) -> Hook:
            def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                turn = len(inputs)
                if self.calls is None or self.calls[turn : turn + 1] != [(name, output.shape)]:
                    raise RuntimeError(
                        f"layer {name!r} was called out of turn or with other sizes: the model has taken another path."
                    )
                inputs.append(args[0])
                return output + epsilons[turn]

            return hook

        with self._hooked(perturb):
            values = self.log_likelihood(self.spec.unflatten(theta), batch)
        return values, inputs

    def _blocks(self, name: str, x: Tensor, delta: Tensor) -> dict[str, Block]:
        """What one call of one layer contributes, by canonical name; x and delta are (S, M, ...)."""
        module = self.layers[name]
        rule = find_rule(module)
        assert rule is not None
        # vmap hands an input that no draw has touched back as S views of one tensor.
        shared = x.stride(0) == 0 and shares_inputs(module)
        found = rule(module, x[0] if shared else x.flatten(0, 1), delta.flatten(0, 1))
        assert found is not None
        names = {local: self._canonical(name, local) for local in module._parameters}
        # Layer by layer: the patches of all convolutions together may be many times what their gradients are.
        owned = {full: local for local, full in names.items() if full is not None and local in found}
        return {full: self.settle(full, found[local]) for full, local in owned.items()}

    def _dry_run(self, theta: Tensor, batch: Any) -> list[tuple[str, torch.Size]]:
        """Which layers are called in which order, and the shapes of their outputs."""
        calls: list[tuple[str, torch.Size]] = []

        def note(name: str) -> Hook:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                calls.append((name, output.shape))

            return hook

        with torch.no_grad(), self._hooked(note):
            self.log_likelihood(self.spec.unflatten(theta), batch)
        return calls

    @contextmanager
    def _hooked(self, hook: Callable[[str], Hook]) -> Iterator[None]:
        handles = [module.register_forward_hook(hook(name)) for name, module in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _canonical(self, name: str, local: str) -> str | None:
        return self.spec.canonical.get(f"{name}.{local}" if name else local)
