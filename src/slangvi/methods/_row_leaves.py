"""The tensors that collected rows are made of: what they look like, and the same rows over other memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from torch import Tensor

from slangvi.grads import RowGroup
from slangvi.grads.blocks import Block, Formed, Outer, Rows

__all__ = [
    "MOST_BYTES",
    "Key",
    "Make",
    "ReplayedBlocks",
    "Signature",
    "bytes_of",
    "key_of",
    "leaves_of",
    "rebuilt",
    "too_large",
]

Signature = tuple[object, ...]
Key = tuple[object, ...]
# Rows that take more than this are not copied into graphs: their kernels take far longer than launching them.
MOST_BYTES = 1 << 30
# The tensors of each kind of block.
_FIELDS: dict[type[Block], tuple[str, ...]] = {Formed: ("rows",), Outer: ("left", "right"), Rows: ("index", "values")}


class Make(Protocol):
    """What leaves rows behind as a few flat tensors."""

    token: int

    def blocks(self, x: Tensor, flats: list[Tensor]) -> Mapping[str, Block]:
        """The blocks over an input and flat tensors."""


class ReplayedBlocks(Mapping[str, Block]):
    """The blocks of a replayed pass, put together when they are asked for: a replayed step takes them as they lie.

    Args:
        make: the pass.
        x: its input.
        flats: what it left behind, one tensor for each dtype.
    """

    def __init__(self, make: Make, x: Tensor, flats: list[Tensor]) -> None:
        self.make, self.x, self.flats = make, x, flats

    @cached_property
    def _blocks(self) -> Mapping[str, Block]:
        return self.make.blocks(self.x, self.flats)

    def __getitem__(self, name: str) -> Block:
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)


def key_of(x: Tensor) -> Key:
    """Where the numbers lie; tensors in one place that differ in shape only are one."""
    if x.is_contiguous():
        return x.data_ptr(), x.numel(), x.dtype
    return x.data_ptr(), x.numel(), x.dtype, x.shape, x.stride()


def leaves_of(rows: Sequence[RowGroup]) -> tuple[Signature, dict[Key, Tensor]]:
    """What must agree for rows to fit a graph (kinds, sizes, scales, who shares memory), and every memory once."""
    found: dict[Key, Tensor] = {}
    order: dict[Key, int] = {}
    signature: list[object] = []

    def note(x: Tensor) -> None:
        key = key_of(x)
        if key not in found:
            found[key] = x
            order[key] = len(order)
        signature.append((order[key], x.shape))

    for group in rows:
        signature.append((group.num_rows, group.scale))
        if isinstance(group.blocks, ReplayedBlocks):
            signature.append(group.blocks.make.token)
            for x in (group.blocks.x, *group.blocks.flats):
                note(x)
            continue
        signature.append((*group.blocks, *group.totals))
        for block in group.blocks.values():
            signature.append(type(block))
            for field in _FIELDS[type(block)]:
                note(getattr(block, field))
        for total in group.totals.values():
            note(total)
    # Layouts and dtypes are part of the keys; addresses are not to be.
    signature.extend(key[1:] for key in found)
    return tuple(signature), found


def bytes_of(leaves: Mapping[Key, Tensor]) -> int:
    """Memory that rows take, by what `leaves_of` found."""
    return sum(leaf.nbytes for leaf in leaves.values())


def too_large(leaves: Mapping[Key, Tensor]) -> bool:
    """Whether graphs should not hold copies of rows."""
    return bytes_of(leaves) > MOST_BYTES


def rebuilt(group: RowGroup, copies: Mapping[Key, Tensor]) -> RowGroup:
    """The same group over copies of its tensors."""

    def copy(x: Tensor) -> Tensor:
        mine = copies[key_of(x)]
        return mine.view(x.shape) if mine.is_contiguous() else mine

    if isinstance(group.blocks, ReplayedBlocks):
        mine = group.blocks
        return replace(group, blocks=ReplayedBlocks(mine.make, copy(mine.x), [copy(flat) for flat in mine.flats]))
    blocks = {
        name: replace(block, **{f: copy(getattr(block, f)) for f in _FIELDS[type(block)]})  # type: ignore[type-var]
        for name, block in group.blocks.items()
    }
    return replace(group, blocks=blocks, totals={name: copy(x) for name, x in group.totals.items()})
