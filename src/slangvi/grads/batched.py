"""All draws of the weights in one pass: vmap over draws, gradients with respect to zeros added to layer outputs.

A layer's output y is replaced by y + ε with ε = 0. The gradient with respect to ε is the gradient of the loss at the
layer's output, which together with the layer's input is all a rule needs. Everything is a pure function of (θ, ε), so
S draws are one vmap, and autograd never computes a weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.grads.blocks import Block, add
from slangvi.grads.factored import RowGroup
from slangvi.grads.rules import find_rule, shares_inputs
from slangvi.types import Params, ParamSpec

__all__ = ["BatchedPass"]

Hook = Callable[[nn.Module, Any, Any], Any]


class BatchedPass:
    """Per-example gradients at S draws at once, for models whose parameters all belong to layers with rules.

    Args:
        model: the module behind the log-likelihood.
        spec: layout, tied names included.
        log_likelihood: (params, batch) → (M,).
    """

    def __init__(self, model: nn.Module, spec: ParamSpec, log_likelihood: Callable[[Params, Any], Tensor]) -> None:
        self.spec = spec
        self.log_likelihood = log_likelihood
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
        names, shapes = self._dry_run(thetas[0], batch)
        draws = len(thetas)
        zeros = [thetas.new_zeros(draws, *shape) for shape in shapes]

        def one(epsilons: list[Tensor], theta: Tensor) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
            inputs: list[Tensor] = []

            def perturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                inputs.append(args[0])
                return output + epsilons[len(inputs) - 1]

            with self._hooked(lambda name: perturb):
                values = self.log_likelihood(self.spec.unflatten(theta), batch)
            return -values.sum(), (values, inputs)

        deltas, (values, inputs) = torch.func.vmap(torch.func.grad(one, has_aux=True), randomness="different")(
            zeros, thetas
        )
        parts: dict[str, list[Block]] = {}
        for name, x, delta in zip(names, inputs, deltas, strict=True):
            for full, block in self._blocks(name, x, delta).items():
                parts.setdefault(full, []).append(block)
        return RowGroup(values.numel(), {name: add(uses) for name, uses in parts.items()}, {}), values

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
        return {full: found[local] for local, full in names.items() if full is not None and local in found}

    def _dry_run(self, theta: Tensor, batch: Any) -> tuple[list[str], list[torch.Size]]:
        """Which layers are called in which order, and the shapes of their outputs."""
        names: list[str] = []
        shapes: list[torch.Size] = []

        def note(name: str) -> Hook:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                names.append(name)
                shapes.append(output.shape)

            return hook

        with torch.no_grad(), self._hooked(note):
            self.log_likelihood(self.spec.unflatten(theta), batch)
        return names, shapes

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
