"""Per-example gradients through torch.func, for any function: rows are formed, as many at a time as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from slangvi.grads.calls import Surroundings
from slangvi.params import Params, ParamSpec

__all__ = ["DenseGradients", "Together", "batch_size", "draws_at_once", "per_example_gradients", "slice_batch"]

# A row exists about three times while vmap works: the gradient pieces, the flat row, and one product with it.
_COPIES = 3
# Bytes of rows up to which draws share a pass. On one core that is 2 to 5 times as fast below a megabyte, takes a third
# less time at 6 and twice as much at 30; a GPU, which waits for the host below that, has room for more (not measured).
_SHARED_BYTES = {"cpu": 8 << 20}
_SHARED_ELSEWHERE = 64 << 20
# Fewer draws than these gain nothing by it.
_FEWEST = 4
# What a pass holds of an example beside its gradient, in units of the example: a guess, as layers are not looked at.
_ACTIVATIONS = 8


class DenseGradients:
    """The gradient operator over formed rows, kept when they fit and computed again, piece by piece, when not.

    Args:
        pieces: functions that return consecutive rows, (..., r, P) each.
        num_rows: R.
        numels: entries of each parameter tensor, needed only for a weighted Gram.

    Example:
        >>> g = DenseGradients.from_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> g.sum(), g.gram()
        (tensor([4., 6.]), tensor([[ 5., 11.], [11., 25.]]))
    """

    def __init__(
        self, pieces: Sequence[Callable[[], Tensor]], num_rows: int, numels: Sequence[int] | None = None
    ) -> None:
        self._pieces = list(pieces)
        self._num_rows = num_rows
        self._numels = numels

    @classmethod
    def from_rows(cls, rows: Tensor, numels: Sequence[int] | None = None) -> DenseGradients:
        """Wrap rows that are already there, (..., R, P)."""
        return cls([lambda: rows], rows.shape[-2], numels)

    @property
    def num_rows(self) -> int:
        """R."""
        return self._num_rows

    @property
    def spectrum_route(self) -> str:
        """No wish."""
        return "auto"

    @property
    def costs(self) -> tuple[int, int]:
        """In units of P multiplications, which all products share."""
        return self._num_rows**2, self._num_rows

    def sum(self) -> Tensor:
        """(..., P)."""
        return self._sums[0]

    def square_sum(self) -> Tensor:
        """(..., P)."""
        return self._sums[1]

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """(..., R, R); with n pieces every piece is computed about n/2 times."""
        count = len(self._pieces)
        strips: list[list[Tensor]] = [[torch.empty(0)] * count for _ in range(count)]
        for a in range(count):
            left = self._rows(a) if weights is None else self._rows(a) * self._expand(weights)
            for b in range(a, count):
                # Only the unweighted diagonal block may reuse `left`; the product is symmetric either way.
                right = left if a == b and weights is None else self._rows(b)
                strips[a][b] = left @ right.mT
                strips[b][a] = strips[a][b].mT
        return torch.cat([torch.cat(row, dim=-1) for row in strips], dim=-2)

    def mm(self, rows: Tensor) -> Tensor:
        """(..., K, P) → (..., R, K)."""
        return torch.cat([self._rows(k) @ rows.mT for k in range(len(self._pieces))], dim=-2)

    def t_mm(self, weights: Tensor, onto: Tensor | None = None) -> Tensor:
        """(..., R, K) → (..., K, P), added to `onto` when that is given."""
        start, result = 0, onto
        for k in range(len(self._pieces)):
            rows = self._rows(k)
            part = weights[..., start : start + rows.shape[-2], :].mT @ rows
            result = part if result is None else result + part
            start += rows.shape[-2]
        assert result is not None
        return result

    def form(self) -> Tensor:
        """(..., R, P)."""
        return torch.cat([self._rows(k) for k in range(len(self._pieces))], dim=-2)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares in one pass over the pieces."""
        first, second = None, None
        for k in range(len(self._pieces)):
            rows = self._rows(k)
            total, squares = rows.sum(-2), rows.square().sum(-2)
            first = total if first is None else first + total
            second = squares if second is None else second + squares
        assert first is not None
        assert second is not None
        return first, second

    def _rows(self, k: int) -> Tensor:
        if len(self._pieces) > 1:
            return self._pieces[k]()
        return self._only

    @cached_property
    def _only(self) -> Tensor:
        return self._pieces[0]()

    def _expand(self, weights: Tensor) -> Tensor:
        if self._numels is None:
            raise ValueError("gram(weights) needs numels: pass numels= when building DenseGradients.")
        return weights.repeat_interleave(torch.tensor(self._numels, device=weights.device))


class Together:
    """Calls a function at several draws in one vmapped pass, or at one after another where vmap cannot follow it.

    One object serves one function, and remembers whether it can be followed.

    Example:
        >>> Together()(torch.square, torch.tensor([[1.0], [2.0], [3.0]]), at_once=2)
        tensor([[1.],
                [4.],
                [9.]])
    """

    def __init__(self) -> None:
        self.possible = True

    def __call__(self, function: Callable[[Tensor], Tensor], thetas: Tensor, at_once: int) -> Tensor:
        """function(θ_s) for all draws (S, P), stacked; `at_once` of them share a pass."""
        if self.possible and min(at_once, len(thetas)) > 1:
            found = self._in_one_pass(function, thetas, at_once)
            if found is not None:
                return found
        return torch.stack([function(theta) for theta in thetas])

    def summed(self, function: Callable[[Tensor], Tensor], thetas: Tensor, at_once: int) -> Tensor:
        """Σ_s function(θ_s), of which those of one pass are there at a time."""
        parts = iter(thetas.split(at_once))
        total = self(function, next(parts), at_once).sum(0)
        for part in parts:
            total += self(function, part, at_once).sum(0)
        return total

    def _in_one_pass(self, function: Callable[[Tensor], Tensor], thetas: Tensor, at_once: int) -> Tensor | None:
        """None where vmap cannot follow; the random state is then as before, so that the next try starts alike."""
        before = Surroundings.now(thetas.device)
        try:
            mapped = torch.func.vmap(function, randomness="different")
            return torch.cat([mapped(part) for part in thetas.split(at_once)])
        except torch.OutOfMemoryError:
            pass  # one draw at a time takes less, and the next batch may be smaller
        except RuntimeError:  # what is wrong for a single draw as well will be said there
            self.possible = False
        before.rewind()
        return None


def per_example_gradients(
    log_likelihood: Callable[[Params, Any], Tensor],
    spec: ParamSpec,
    thetas: Tensor,
    batch: Any,
    memory_limit: int | None = None,
    together: Together | None = None,
) -> DenseGradients:
    """Gradients of −log p(y_i | x_i, θ_s) for every example i and sample s, as an operator with R = S·M rows.

    Args:
        log_likelihood: (params, batch) → (M,); each entry may depend on its own example only.
        spec: layout of the flat vector.
        thetas: samples, (S, P).
        batch: any nesting of tensors whose first dimension is M.
        memory_limit: bytes that formed rows may take; rows beyond it are computed in pieces, again for every product.
        together: what is known of calling `log_likelihood` at several draws at once; None knows nothing.
    """
    num_examples = batch_size(batch)

    def one(flat: Tensor, example: Any) -> Tensor:
        single = tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, example)
        return -log_likelihood(spec.unflatten(flat), single).sum()

    row_bytes = spec.num_params * thetas.element_size()
    whole = rows_within(memory_limit, row_bytes, None) >= len(thetas) * num_examples
    in_dims = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch)
    # Rows that are computed again for every product must come out the same: no random draws then.
    chance = "different" if whole else "error"
    rows_of = torch.func.vmap(torch.func.grad(one), in_dims=(None, in_dims), randomness=chance)

    def piece(theta: Tensor, start: int, stop: int) -> Callable[[], Tensor]:
        return lambda: rows_of(theta, slice_batch(batch, start, stop))

    if whole:
        known, at_once = together or Together(), draws_at_once(spec, thetas, batch, memory_limit)
        pieces = [lambda: known(lambda theta: rows_of(theta, batch), thetas, at_once).flatten(0, 1)]
    else:
        step = rows_within(memory_limit, row_bytes, num_examples)
        starts = range(0, num_examples, step)
        pieces = [piece(theta, k, min(k + step, num_examples)) for theta in thetas for k in starts]
    return DenseGradients(pieces, len(thetas) * num_examples, spec.numels)


def draws_at_once(
    spec: ParamSpec, thetas: Tensor, batch: Any, memory_limit: int | None = None, backward_passes: int = 1
) -> int:
    """How many draws should share a pass: small problems are slow for the number of calls, large ones are not.

    Args:
        spec: layout of the flat vector.
        thetas: draws, (S, P).
        batch: what they are evaluated on.
        memory_limit: bytes that may be taken.
        backward_passes: through the same graph at once.
    """
    shared = _SHARED_BYTES.get(thetas.device.type, _SHARED_ELSEWHERE)
    if memory_limit is not None:
        shared = min(shared, memory_limit // _COPIES)
    size = batch_size(batch)
    example = sum(x.numel() * x.element_size() for x in tree_flatten(batch)[0] if isinstance(x, Tensor)) // size
    row = max(1, spec.num_params * thetas.element_size(), _ACTIVATIONS * example)
    found = shared // (size * row * backward_passes)
    return found if found >= _FEWEST else 1


def rows_within(memory_limit: int | None, row_bytes: int, most: int | None) -> int:
    """How many rows fit the limit: at least one, at most `most`."""
    ceiling = most if most is not None else 1 << 62
    if memory_limit is None:
        return ceiling
    return max(1, min(ceiling, memory_limit // (_COPIES * row_bytes)))


def batch_size(batch: Any) -> int:
    """M, the first dimension that every tensor of the batch shares."""
    sizes = {x.shape[0] if x.ndim else 0 for x in tree_flatten(batch)[0] if isinstance(x, Tensor)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "batch must hold tensors that share a first dimension M ≥ 1 (one entry per example), "
            f"got first dimensions {sorted(sizes) or 'none: it has no tensors'}."
        )
    return sizes.pop()


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Examples start…stop−1 of a nested batch."""
    return tree_map(lambda x: x[start:stop] if isinstance(x, Tensor) else x, batch)
