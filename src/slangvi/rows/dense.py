"""Per-example gradients through torch.func, for any function: rows are formed, as many at a time as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from slangvi.linalg.products import batch_matmul
from slangvi.params import Params, ParamSpec
from slangvi.rows.operator import Segment

__all__ = [
    "DenseGradients",
    "Together",
    "batch_size",
    "bytes_of",
    "draws_at_once",
    "per_example_gradients",
    "slice_batch",
]

T = TypeVar("T")
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
    """Per-example gradients as formed rows, kept when they fit and computed again, piece by piece, when not.

    Args:
        pieces: functions that return consecutive rows, (..., r, P) each.
        num_rows: R.

    Example:
        >>> g = DenseGradients.from_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> g.sum(), g.gram()
        (tensor([4., 6.]), tensor([[ 5., 11.], [11., 25.]]))
    """

    scale = 1.0
    spectrum_route = "auto"
    space = None

    def __init__(self, pieces: Sequence[Callable[[], Tensor]], num_rows: int) -> None:
        self._pieces = list(pieces)
        self.num_rows = self.height = num_rows

    @classmethod
    def from_rows(cls, rows: Tensor) -> DenseGradients:
        """Wrap rows that are already there, (..., R, P)."""
        return cls([lambda: rows], rows.shape[-2])

    def segments(self, cuts: Sequence[int] = (), below: Tensor | None = None) -> Iterator[Segment]:
        """Yield all columns, or those between the cuts."""
        inner = [cut for cut in cuts if cut < self._width]
        if not inner:
            yield Segment(slice(0, self._width), self)
            return
        for start, stop in pairwise([0, *inner, self._width]):
            yield Segment(slice(start, stop), self._narrowed(start, stop))

    def _narrowed(self, start: int, stop: int) -> DenseGradients:
        """Return some columns of all rows."""
        return DenseGradients([partial(_columns_of, self._rows, k, start, stop) for k in self._places], self.num_rows)

    @property
    def _places(self) -> range:
        return range(len(self._pieces))

    @cached_property
    def _width(self) -> int:
        return self._rows(0).shape[-1]

    def sum(self) -> Tensor:
        """(..., P)."""
        return self._sums[0].clone()

    def square_sum(self) -> Tensor:
        """(..., P)."""
        return self._sums[1]

    def gram(self) -> Tensor:
        """(..., R, R); with n pieces every piece is computed about n/2 times."""
        if len(self._pieces) == 1:
            rows = self._rows(0)
            return batch_matmul(rows, rows.mT)
        strips = [[torch.empty(0)] * len(self._pieces) for _ in self._places]
        for a in self._places:
            left = self._rows(a)
            for b in range(a, len(self._pieces)):
                strips[a][b] = left @ (left if a == b else self._rows(b)).mT
                strips[b][a] = strips[a][b].mT
        return torch.cat([torch.cat(row, dim=-1) for row in strips], dim=-2)

    def mm(self, rows: Tensor) -> Tensor:
        """(..., K, P) → (..., R, K)."""
        found = [batch_matmul(self._rows(k), rows.mT) for k in self._places]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-2)

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (..., R, K) to a (..., K, P) tensor."""
        start = 0
        for k in self._places:
            rows = self._rows(k)
            onto += batch_matmul(weights[..., start : start + rows.shape[-2], :].mT, rows)
            start += rows.shape[-2]

    def t_mm(self, weights: Tensor) -> Tensor:
        """(..., R, K) → (..., K, P)."""
        onto = weights.new_zeros(*weights.shape[:-2], weights.shape[-1], self._width)
        self.add_t_mm(weights, onto)
        return onto

    def form(self) -> Tensor:
        """(..., R, P)."""
        return self._rows(0) if len(self._pieces) == 1 else torch.cat([self._rows(k) for k in self._places], dim=-2)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares in one pass over the pieces."""
        first, second = None, None
        for k in self._places:
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


def _columns_of(rows: Callable[[int], Tensor], k: int, start: int, stop: int) -> Tensor:
    return rows(k)[..., start:stop]


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
        self.possible: bool | None = None  # not known before the first try

    def __call__(self, function: Callable[[Tensor], Tensor], thetas: Tensor, at_once: int) -> Tensor:
        """function(θ_s) for all draws (S, P), stacked; `at_once` of them share a pass."""
        if min(at_once, len(thetas)) > 1:
            mapped = torch.func.vmap(function, randomness="different")
            found = self.attempt(lambda: torch.cat([mapped(part) for part in thetas.split(at_once)]), thetas.device)
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

    def attempt(self, work: Callable[[], T], device: torch.device) -> T | None:
        """Return the result of a vmapped pass; None where vmap cannot follow, and the random state is as before.

        Args:
            work: the pass.
            device: whose random state it may change.
        """
        if self.possible is False:
            return None
        on_gpu = device.type == "cuda"
        before = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None
        try:
            with nullcontext() if self.possible else _without_fallback():
                found = work()
            self.possible = True
            return found
        except torch.OutOfMemoryError:
            pass  # one draw at a time takes less, and the next batch may be smaller
        except (RuntimeError, UserWarning):  # what is wrong for a single draw as well will be said there
            self.possible = False
        torch.set_rng_state(before[0])
        if before[1] is not None:
            torch.cuda.set_rng_state(before[1], device)
        return None


@contextmanager
def _without_fallback() -> Iterator[None]:
    """Refuse operators that vmap would go through draw by draw, which it warns of.

    If that warning is made an error instead, torch never gives back the memory of what it has computed.
    """
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


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
    return DenseGradients(pieces, len(thetas) * num_examples)


def draws_at_once(
    spec: ParamSpec, thetas: Tensor, batch: Any, memory_limit: int | None = None, backward_passes: int = 1
) -> int:
    """Return the number of draws that share a pass: small problems are slow for the number of their calls.

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
    example = bytes_of(batch) // size
    row = max(1, spec.num_params * thetas.element_size(), _ACTIVATIONS * example)
    found = shared // (size * row * backward_passes)
    return found if found >= _FEWEST else 1


def rows_within(memory_limit: int | None, row_bytes: int, most: int | None) -> int:
    """Return the number of rows that fit the limit: at least one, at most `most`."""
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


def bytes_of(batch: Any) -> int:
    """Return the bytes of all tensors of a nested batch."""
    return sum(x.nbytes for x in tree_flatten(batch)[0] if isinstance(x, Tensor))


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Examples start…stop−1 of a nested batch."""
    return tree_map(lambda x: x[start:stop] if isinstance(x, Tensor) else x, batch)
