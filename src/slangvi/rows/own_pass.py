r"""A pass of our own over some examples, whose rows are a square root of the curvature by the likelihood.

Rows of a training pass are gradients of its loss, and their outer products estimate the curvature only where the model
is right (the empirical Fisher). Here the outputs f of K examples get other gradients, the columns of a root of
$-\partial^2 \log p / \partial f^2 = \sum_q b_q b_q^\top$: with the Jacobian J of the outputs, the rows $J^\top b_q$ add
up to the generalised Gauss-Newton matrix, $\sum_q J^\top b_q b_q^\top J$. Each example goes through the model once for
every column, as many at a time as a batch of training has examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from slangvi.errors import NumericalError, UnsupportedModuleError
from slangvi.rows.blocks import Block, stack
from slangvi.rows.factored import RowGroup
from slangvi.rows.graph import Plans, record, watch_outputs

__all__ = ["Examples", "OwnPass", "OwnRows", "single_output"]

# Outputs f (M, ...) and a source of randomness → gradients of them, (Q, M, ...).
Seeds = Callable[[Tensor, torch.Generator | None], Tensor]
# Entries of the roots of all repetitions together, up to which they are made in one go.
MOST_ENTRIES = 1 << 22


class OwnRows(NamedTuple):
    """Rows of a pass of our own.

    Args:
        blocks: parameter name → Q·K rows.
        num_columns: Q.
        spread: squared length of the rows' beginnings, those gradients of the outputs, for a typical example.
    """

    blocks: dict[str, Block]
    num_columns: int
    spread: float


class OwnPass:
    """Rows that stand for the curvature of chosen examples.

    Args:
        seeds: gradients of the outputs that the rows begin with.
        verify: compare rows with their definition, ever more rarely.
        most_enlarged: see `RowGroup`.
        draws: shape of an example's outputs → whether it has one gradient, which is drawn.
    """

    def __init__(
        self,
        seeds: Seeds,
        verify: bool = True,
        most_enlarged: float = 1.0,
        draws: Callable[[torch.Size], bool] = lambda shape: False,
    ) -> None:
        self.seeds, self.plans, self.most_enlarged, self.draws = seeds, Plans(verify), most_enlarged, draws
        self._columns, self._shape = 1, torch.Size()  # Q, and the outputs of an example that has so many

    def rows(
        self,
        call: Callable[[int], Tensor],
        params: Mapping[str, Tensor],
        like: Tensor,
        most: int,
        dtype: torch.dtype,
        generator: torch.Generator | None = None,
    ) -> OwnRows:
        """Return the rows of some examples.

        Args:
            call: number of repetitions → outputs of the K examples, that often one after the other.
            params: that the rows are of; leaves of the graph behind the outputs.
            like: outputs of another pass, which tell their number and shape, (K, ...).
            most: examples that may go through the model at once.
            dtype: of the rows.
            generator: source of targets that are drawn.
        """
        found: list[dict[str, Block]] = []
        first, spread, count = 0, 0.0, len(like)
        if like.shape[1:] != self._shape:  # without calling the model, or drawing a number
            self._shape = like.shape[1:]
            self._columns = 1 if self.draws(self._shape) else len(self.seeds(like.detach(), None))
        while first < self._columns:
            repeats = min(self._columns - first, max(1, most // count))
            with torch.enable_grad():
                outputs = call(repeats)
            if not bool(torch.isfinite(outputs).all()):
                raise NumericalError(
                    "outputs of the model are not finite for the examples that the curvature is taken from. The state "
                    "is unchanged. Look for NaN, Inf or huge values in the inputs, or lower lr."
                )
            seeds = self._seeds(outputs.detach(), first, repeats, count, generator)
            found.append(self._go_back(outputs, seeds, params, repeats * count, dtype))
            first, spread = first + repeats, spread + float(seeds.double().square().sum()) / count
        blocks = found[0]
        if len(found) > 1:
            blocks = {name: stack([part[name] for part in found]) for name in blocks}
        return OwnRows(blocks, self._columns, spread)

    def group(self, made: OwnRows, count: int, num_chosen: int, total: Tensor, pull: float) -> RowGroup:
        """Return rows beside the gradient of a training pass.

        Args:
            made: the rows.
            count: M, examples of the training pass.
            num_chosen: K.
            total: its gradient, (P,).
            pull: Σ of its squared gradients of the outputs.
        """
        misfit = pull / count / made.spread if made.spread > 0 else 0.0
        columns, most = made.num_columns, self.most_enlarged
        return RowGroup(count, made.blocks, total, 1.0, num_chosen, columns, misfit, most_enlarged=most)

    def _seeds(
        self, outputs: Tensor, first: int, repeats: int, count: int, generator: torch.Generator | None
    ) -> Tensor:
        """Return the gradients of all outputs, column first + j for repetition j.

        A model with dropout has other outputs in each repetition, and each gets a column of its own root.
        """
        if self._columns * outputs.numel() <= MOST_ENTRIES or repeats == 1:
            whole, each = self.seeds(outputs, generator), torch.arange(repeats, device=outputs.device)
            own: Tensor = whole.unflatten(1, (repeats, count))[first + each, each]
            return own.flatten(0, 1)
        roots = (self.seeds(part, generator) for part in outputs.split(count))
        return torch.cat([root[first + j] for j, root in enumerate(roots)])

    def _go_back(
        self, outputs: Tensor, seeds: Tensor, params: Mapping[str, Tensor], count: int, dtype: torch.dtype
    ) -> dict[str, Block]:
        """Return the rows of one pass."""
        recording = record([outputs], params, None, self.plans, count, copy_data=lambda data: data)
        handed = watch_outputs(recording, [outputs])
        try:
            with torch.autograd.set_multithreading_enabled(False):  # see `backward_in_this_thread`
                torch.autograd.grad(handed, list(params.values()), [seeds.to(outputs.dtype)], allow_unused=True)
        finally:
            recording.detach()
        return recording.blocks(dtype)


@dataclass
class Examples:
    """Chosen examples of a call of a model, to call it with them again.

    Args:
        leaves: its arguments, those with examples in front cut down to the chosen ones.
        structure: of the arguments.
        places: of leaves with examples.
        count: K.
        outputs: what the likelihood took of them, (K, ...).
        casts: whether the call was under autocast, and to which dtype.
    """

    leaves: list[Any]
    structure: Any
    places: list[int]
    count: int
    outputs: Tensor
    casts: tuple[bool, torch.dtype]

    @classmethod
    def choose(cls, inputs: Any, outputs: Tensor, count: int, chosen: Tensor | None) -> Examples:
        """Return copies of the chosen examples: loops may write over their batches.

        Args:
            inputs: any nesting of tensors; those with M entries in the first dimension have examples there.
            outputs: of the model, (M, ...).
            count: M.
            chosen: indices; None for all.
        """

        def choose(x: Tensor) -> Tensor:
            return x.detach().clone() if chosen is None else x.detach().index_select(0, chosen)

        leaves, structure = tree_flatten(inputs)
        places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.ndim and len(x) == count]
        cut = [choose(x) if k in places else x for k, x in enumerate(leaves)]
        kind = outputs.device.type
        casts = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(cut, structure, places, count if chosen is None else len(chosen), choose(outputs), casts)

    def repeated(self, repeats: int) -> Any:
        """Return the arguments with all examples several times, one repetition after the other."""
        if repeats == 1:
            return tree_unflatten(self.leaves, self.structure)
        leaves = list(self.leaves)
        for k in self.places:
            leaves[k] = leaves[k].repeat(repeats, *(1 for _ in leaves[k].shape[1:]))
        return tree_unflatten(leaves, self.structure)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a block under the autocast of the call."""
        is_on, dtype = self.casts
        return torch.autocast(self.outputs.device.type, dtype=dtype) if is_on else nullcontext()

    def compare(self, call: Callable[[int], Tensor]) -> None:
        """Refuse a model that tells other things of the examples when they come alone, unless chance is in it.

        Args:
            call: number of repetitions → outputs.
        """
        on_gpu = self.outputs.is_cuda
        with torch.no_grad(), torch.random.fork_rng([self.outputs.device] if on_gpu else []):
            found = call(1)
            if not bool(found.isfinite().all()) or self._is_close(found) or not torch.equal(found, call(1)):
                return
        shapes = ", ".join(str(tuple(self.leaves[k].shape)) for k in self.places)
        raise UnsupportedModuleError(
            f"the model has other outputs for {self.count} of its examples when it is called with these alone (inputs "
            f"of shape {shapes}). Either examples depend on each other, or a tensor that is no batch has as many rows "
            "as the batch. Make that tensor a buffer of the module, or use another batch size."
        )

    def _is_close(self, found: Tensor) -> bool:
        """Tell whether outputs are those of the call but for rounding, which depends on the size of a batch."""
        if found.shape != self.outputs.shape:
            return False
        rounding = 100 * torch.finfo(found.dtype).eps ** 0.75
        largest = self.outputs.abs().max().clamp_min(1.0)
        return bool((found - self.outputs).abs().max() <= rounding * largest)


def single_output(found: Any, count: int) -> Tensor:
    """Return the tensor that a likelihood takes: what a model returns, its `logits`, or the only one with a batch.

    Args:
        found: by the model.
        count: M.
    """
    logits = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", None)
    for one in (found, logits):
        if isinstance(one, Tensor) and one.ndim and len(one) == count:
            return one
    some = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad and x.ndim and len(x) == count]
    if len(some) == 1:
        return some[0]
    raise UnsupportedModuleError(
        f"the likelihood takes one output with {count} examples in front, and the model returns {len(some)} "
        f"({type(found).__name__}). Return a tensor, or an object with the tensor as `logits`."
    )
