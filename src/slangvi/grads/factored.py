"""Per-example gradients held layer by layer as factors; the R×P matrix never exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from slangvi.grads.blocks import FORM_BYTES, Block, cheapest, stack
from slangvi.types import ParamSpec

__all__ = ["FactoredGradients", "RowGroup"]


@dataclass(frozen=True)
class RowGroup:
    """Rows that came from one backward pass: M examples at one sample of the weights.

    Args:
        num_rows: M.
        blocks: canonical parameter name → its gradients; a parameter that is not listed has zero gradient.
        totals: canonical parameter name → Σ_r g_r as autograd computed it, same shape as the parameter; may be empty
            for all groups, the blocks are then summed.
    """

    num_rows: int
    blocks: Mapping[str, Block]
    totals: Mapping[str, Tensor]

    def scaled(self, factor: float) -> RowGroup:
        """Every gradient times a number."""
        if factor == 1.0:
            return self
        blocks = {name: block.scaled(factor) for name, block in self.blocks.items()}
        return RowGroup(self.num_rows, blocks, {name: total * factor for name, total in self.totals.items()})


class FactoredGradients:
    """The gradient operator over a list of `Block`s, one for each parameter tensor that received gradient.

    Args:
        spec: layout of the flat vector.
        groups: rows, one group per backward pass.
        rank: L, so that forming and factoring can be compared by counted cost.
        like: tensor whose dtype and device the results have.
        form_bytes: largest tensor of formed gradients kept for one parameter.
    """

    def __init__(
        self,
        spec: ParamSpec,
        groups: Sequence[RowGroup],
        rank: int,
        like: Tensor,
        form_bytes: int = FORM_BYTES,
    ) -> None:
        self.spec = spec
        self.like = like
        self._num_rows = sum(group.num_rows for group in groups)
        self.blocks = {
            name: cheapest(block, rank, form_bytes)
            for name in spec.names
            if (block := _stack_named(name, groups, self._num_rows)) is not None
        }
        self._totals = _sum_totals(groups)

    @property
    def num_rows(self) -> int:
        """R."""
        return self._num_rows

    def sum(self) -> Tensor:
        """Σ_r g_r, (P,)."""
        flat = self.like.new_zeros(self.spec.num_params)
        for name, block in self.blocks.items():
            total = self._totals.get(name)
            flat[self.spec.slices[name]] = block.sum() if total is None else total.flatten().to(flat.dtype)
        return flat

    def square_sum(self) -> Tensor:
        """Σ_r g_r ∘ g_r, (P,)."""
        flat = self.like.new_zeros(self.spec.num_params)
        for name, block in self.blocks.items():
            flat[self.spec.slices[name]] = block.square_sum()
        return flat

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """G diag(w) Gᵀ, (R, R)."""
        result = self.like.new_zeros(self._num_rows, self._num_rows)
        place = {name: k for k, name in enumerate(self.spec.names)}
        for name, block in self.blocks.items():
            gram = block.gram()
            result += gram if weights is None else gram * weights[place[name]]
        return result

    def mm(self, rows: Tensor) -> Tensor:
        """G Cᵀ, (K, P) → (R, K)."""
        result = self.like.new_zeros(self._num_rows, rows.shape[0])
        for name, block in self.blocks.items():
            result += block.mm(rows[:, self.spec.slices[name]])
        return result

    def t_mm(self, weights: Tensor) -> Tensor:
        """Wᵀ G, (R, K) → (K, P)."""
        result = self.like.new_zeros(weights.shape[1], self.spec.num_params)
        for name, block in self.blocks.items():
            result[:, self.spec.slices[name]] = block.t_mm(weights)
        return result

    def form(self) -> Tensor:
        """G itself, (R, P); only for few parameters."""
        rows = self.like.new_zeros(self._num_rows, self.spec.num_params)
        for name, block in self.blocks.items():
            rows[:, self.spec.slices[name]] = block.form()
        return rows


def _stack_named(name: str, groups: Sequence[RowGroup], num_rows: int) -> Block | None:
    """All rows of one parameter; groups that did not use it count as zero rows."""
    parts, missing, seen = [], 0, 0
    for group in groups:
        block = group.blocks.get(name)
        if block is None:
            missing += group.num_rows
        else:
            parts.append(block.padded(missing, 0) if missing else block)
            missing = 0
        seen += group.num_rows
    if not parts:
        return None
    if missing:
        parts[-1] = parts[-1].padded(0, missing)
    return stack(parts)


def _sum_totals(groups: Sequence[RowGroup]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for group in groups:
        for name, total in group.totals.items():
            totals[name] = totals[name] + total if name in totals else total
    return totals
