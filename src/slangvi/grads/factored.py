"""Per-example gradients held layer by layer as factors; the R×P matrix never exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from slangvi.grads.blocks import Block, Formed, Memo, Outer, cheapest, place, stack
from slangvi.params import ParamSpec
from slangvi.types import Routes

__all__ = ["FactoredGradients", "RowGroup"]

# A GPU adds more small matrices than so many by putting them side by side first: two kernels.
_SEVERAL = 3
_SMALL = 1 << 18


@dataclass(frozen=True)
class RowGroup:
    """Rows that came from one backward pass: M examples at one sample of the weights.

    Args:
        num_rows: M.
        blocks: canonical parameter name → its gradients; a parameter that is not listed has zero gradient.
        totals: canonical parameter name → Σ_r g_r as autograd computed it, same shape as the parameter; may be empty,
            the blocks are then summed.
        scale: what all of them are to be multiplied by.
        num_chosen: rows of the blocks where they are of some examples only, weighted to stand for all M; `totals` are
            of all examples then, and must be there.
    """

    num_rows: int
    blocks: Mapping[str, Block]
    totals: Mapping[str, Tensor]
    scale: float = 1.0
    num_chosen: int | None = None

    @property
    def height(self) -> int:
        """Rows of the blocks."""
        return self.num_rows if self.num_chosen is None else self.num_chosen

    def scaled(self, factor: float) -> RowGroup:
        """Every gradient times a number; nothing is computed yet."""
        return replace(self, scale=self.scale * factor)

    def applied(self) -> RowGroup:
        """The same with the scale worked in."""
        blocks = {name: block.scaled(self.scale) for name, block in self.blocks.items()}
        totals = {name: total * self.scale for name, total in self.totals.items()}
        return RowGroup(self.num_rows, blocks, totals, num_chosen=self.num_chosen)


class FactoredGradients:
    """The gradient operator over a list of `Block`s, one for each parameter tensor that received gradient.

    Args:
        spec: layout of the flat vector.
        groups: rows, one group per backward pass.
        rank: L, so that forming and factoring can be compared by counted cost.
        like: tensor whose dtype and device the results have.
        routes: what to form and how large temporaries may be; None leaves it to counting.
    """

    def __init__(
        self,
        spec: ParamSpec,
        groups: Sequence[RowGroup],
        rank: int,
        like: Tensor,
        routes: Routes | None = None,
    ) -> None:
        self.spec = spec
        self.like = like
        self.routes = routes or Routes()
        self._num_rows = sum(group.num_rows for group in groups)
        self._height = sum(group.height for group in groups)
        scales = {group.scale for group in groups}
        # One scale for all rows goes to the results, which are small; different ones must go to the rows.
        self._scale = scales.pop() if len(scales) == 1 else 1.0
        if scales:
            groups = [group.applied() for group in groups]
        memo: Memo = {}
        self.blocks = {
            name: cheapest(block, rank, self.routes, name)
            for name in spec.names
            if (block := _stack_named(name, groups, memo)) is not None
        }
        self._totals = _sum_totals(groups)

    @property
    def num_rows(self) -> int:
        """R."""
        return self._num_rows

    @property
    def num_merged(self) -> int:
        """Rows that `form`, `gram`, `mm` and `t_mm` have: fewer than R where some examples stand for all."""
        return self._height

    @property
    def spectrum_route(self) -> str:
        """The route wished for."""
        return self.routes.spectrum

    @property
    def costs(self) -> tuple[int, int]:
        """Counted multiplications of `gram`, and of `mm` or `t_mm` for one column."""
        counts = [block.costs for block in self.blocks.values()]
        return sum(gram for gram, _ in counts), sum(column for _, column in counts)

    def sum(self) -> Tensor:
        """Σ_r g_r, (P,)."""
        parts = {name: self._totals[name] if name in self._totals else b.sum() for name, b in self.blocks.items()}
        return self._joined(parts, self._scale)

    def square_sum(self) -> Tensor:
        """Σ_r g_r ∘ g_r, (P,)."""
        parts: dict[str, Tensor] = {}
        latest: tuple[tuple[int, ...], Tensor] | None = None
        for name, block in self.blocks.items():
            # A bias follows the weight with the same δ, whose squares are there.
            if block.delta is not None and (latest is None or latest[0] != place(block.delta)):
                latest = place(block.delta), block.delta.square()
            parts[name] = block.square_sum(None if block.delta is None or latest is None else latest[1])
        return self._joined(parts, self._scale**2)

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """G diag(w) Gᵀ, (R, R)."""
        shares = {name: 1.0 if weights is None else weights[k] for k, name in enumerate(self.spec.names)}
        parts: list[Tensor] = []
        # δδᵀ ∘ aaᵀ for a weight, δδᵀ for its bias: blocks that hold the same δ take one product δδᵀ.
        inputs: dict[tuple[int, ...], tuple[Outer, Tensor]] = {}
        for name, block in self.blocks.items():
            if isinstance(block, Outer) and block.simple:
                kept = inputs.get(place(block.left))
                part = _times(block.inputs_gram(), shares[name])
                if kept is not None and kept[1].shape == part.shape:
                    part += kept[1]
                elif kept is not None:
                    parts.append(kept[0].gram_with(kept[1]))
                inputs[place(block.left)] = (block, part)
        for name, block in self.blocks.items():
            if isinstance(block, Formed) and place(block.rows) in inputs:
                inputs[place(block.rows)][1].add_(shares[name])
            elif not (isinstance(block, Outer) and block.simple):
                parts.append(_times(block.gram(), shares[name]))
        total = _accumulated(parts, self.like, self._height) if parts or not inputs else None
        for owner, part in inputs.values():
            total = owner.gram_with(part, onto=total)
        assert total is not None
        return _times(total, self._scale**2)

    def mm(self, rows: Tensor) -> Tensor:
        """G Cᵀ, (K, P) → (R, K)."""
        parts = [block.mm(rows[:, self.spec.slices[name]]) for name, block in self.blocks.items()]
        return _times(_accumulated(parts, self.like, self._height, rows.shape[0]), self._scale)

    def t_mm(self, weights: Tensor, onto: Tensor | None = None) -> Tensor:
        """Wᵀ G, (R, K) → (K, P), added to `onto` when that is given."""
        result = self.like.new_zeros(weights.shape[1], self.spec.num_params) if onto is None else onto
        weights = weights if self._scale == 1.0 else weights * self._scale
        for name, block in self.blocks.items():
            block.add_t_mm(weights, result[:, self.spec.slices[name]])
        return result

    def _joined(self, parts: Mapping[str, Tensor], scale: float) -> Tensor:
        """One flat vector from what the parameters have, zeros for those that have nothing, (P,)."""
        missing = {name: self.like.new_zeros(()) for name in self.spec.names if name not in parts}
        sizes = dict(zip(self.spec.names, self.spec.numels, strict=True))
        pieces = [
            parts[name].flatten().to(self.like.dtype) if name in parts else missing[name].expand(sizes[name])
            for name in self.spec.names
        ]
        return _times(torch.cat(pieces), scale)

    def form(self) -> Tensor:
        """G itself, (R, P); only for few parameters."""
        rows = self.like.new_zeros(self._height, self.spec.num_params)
        for name, block in self.blocks.items():
            rows[:, self.spec.slices[name]] = block.form()
        return rows.mul_(self._scale)


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    """In place, and not at all when there is nothing to do."""
    return x if isinstance(factor, float) and factor == 1.0 else x.mul_(factor)


def _accumulated(parts: list[Tensor], like: Tensor, *lengths: int) -> Tensor:
    """Σ of the parts, in memory that may be the first one's; zeros when there are none."""
    if not parts:
        return like.new_zeros(lengths[0], lengths[-1])
    if like.device.type == "cuda" and len(parts) > _SEVERAL and parts[0].numel() <= _SMALL:
        return torch.stack(parts).sum(0)
    return reduce(torch.Tensor.add_, parts[1:], parts[0].contiguous())


def _stack_named(name: str, groups: Sequence[RowGroup], memo: Memo) -> Block | None:
    """All rows of one parameter; groups that did not use it count as zero rows."""
    parts, missing, seen = [], 0, 0
    for group in groups:
        block = group.blocks.get(name)
        if block is None:
            missing += group.height
        else:
            parts.append(block.padded(missing, 0) if missing else block)
            missing = 0
        seen += group.height
    if not parts:
        return None
    if missing:
        parts[-1] = parts[-1].padded(0, missing)
    return stack(parts, memo)


def _sum_totals(groups: Sequence[RowGroup]) -> dict[str, Tensor]:
    """What autograd added up; nothing when some group does not know."""
    if not all(group.totals for group in groups):
        return {}
    totals: dict[str, Tensor] = {}
    for group in groups:
        for name, total in group.totals.items():
            totals[name] = totals[name] + total if name in totals else total
    return totals
