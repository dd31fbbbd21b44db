"""Outer products and tables: counted costs, small temporaries, results added to slices; the same numbers always."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.fake_gpu_tensor import on_gpu
from slangvi.live_bytes import LiveBytes
from slangvi.rows import base, outer
from slangvi.rows.blocks import Block, Formed, Outer, Sum, TableRows, Unopened


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# (R, S, G, T, O, I): rows, draws that share their inputs, groups, positions, outputs, inputs.
SIZES = {
    "linear": (6, 1, 1, 1, 4, 5),
    "linear shared": (6, 3, 1, 1, 4, 5),
    "positions": (6, 1, 1, 3, 4, 5),
    "positions shared": (6, 2, 1, 3, 4, 5),
    "groups": (6, 1, 2, 1, 4, 5),
    "groups shared": (6, 3, 2, 1, 4, 5),
    "groups and positions": (6, 1, 2, 3, 4, 5),
    "groups and positions shared": (6, 2, 2, 3, 4, 5),
    "one of all": (1, 1, 1, 1, 1, 1),
}


def made(name: str) -> Outer:
    R, S, G, T, O, I = SIZES[name]  # noqa: E741
    return Outer(randn(R, G, T, O), randn(R // S, G, T, I))


def table(R: int = 6, T: int = 3, V: int = 7, D: int = 4) -> TableRows:
    return TableRows(torch.randint(V, (R, T)), randn(R, T, D), V)


MAKERS = {name: (lambda name=name: made(name)) for name in SIZES} | {
    "table": table,
    "table touched twice": lambda: TableRows(torch.zeros(5, 3, dtype=torch.int64), randn(5, 3, 2), 4),
    "formed": lambda: Formed(randn(6, 8)),
}


class Watched(TorchDispatchMode):
    """Multiplications of matrix products, and the most entries that were allocated at once."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.element_size())
        if func.overloadpacket in PRODUCTS:
            self.multiplications += out.numel() * args[-1].shape[-2]
        return out


PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm_", "baddbmm_")}


def multiplications(work: Callable[[], object]) -> int:
    with Watched() as seen:
        work()
    return seen.multiplications


@pytest.mark.parametrize("name", SIZES)
def test_costs_of_outer_products_are_what_is_multiplied(name):
    """Beside the matrix products there is the contraction with δ, R·G·T·O more."""
    block = made(name)
    R, G, T, O, I = block.sizes  # noqa: E741
    gram, column = block.costs
    assert multiplications(block.gram) == gram
    assert multiplications(lambda: block.mm(randn(1, G * O * I))) == column - R * G * T * O
    assert multiplications(lambda: block.t_mm(randn(R, 1))) == column - R * G * T * O


def test_costs_of_formed_rows_and_tables_are_what_is_multiplied():
    block = Formed(randn(6, 8))
    assert block.costs == (multiplications(block.gram), multiplications(lambda: block.mm(randn(1, 8))))
    assert block.costs[1] == multiplications(lambda: block.t_mm(randn(6, 1)))
    far = TableRows(torch.arange(18).view(6, 3), randn(6, 3, 4), 18)
    near = TableRows(torch.zeros(6, 3, dtype=torch.int64), far.values, 18)  # entries touched twice cost as much
    for block in (far, near):
        assert block.costs == (multiplications(block.gram), block.values.numel())


def products(block: Block, columns: Tensor, weights: Tensor) -> list[Tensor]:
    added = torch.ones(weights.shape[1], block.num_params, dtype=torch.float64)
    block.add_t_mm(weights, added)
    return [block.mm(columns), added, block.gram(), block.square_sum(), block.sum(), block.form()]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("chunk_bytes", [0, 1, 300])
def test_small_temporaries_change_nothing(name, chunk_bytes):
    block = MAKERS[name]()
    columns, weights = randn(5, block.num_params), randn(block.num_rows, 5)
    small = block if isinstance(block, Formed) else replace(block, chunk_bytes=chunk_bytes)
    dense = block.form()
    for found in (products(block, columns, weights), products(small, columns, weights)):
        expected = [
            dense @ columns.T,
            1 + weights.T @ dense,
            dense @ dense.T,
            dense.square().sum(0),
            dense.sum(0),
            dense,
        ]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("product", "row_by_row", "whole"),
    [
        (lambda block: block.gram(), 2 * 5 * 6 * 5, 2 * 6 * 5 * 6 * 5),
        (lambda block: block.square_sum(), 2 * 4 * 5, 6 * 2 * 4 * 5),
        (lambda block: block.mm(randn(50, 40)), 50 * 40, 50 * 6 * 5 * 4),
        (lambda block: block.t_mm(randn(6, 50)), 50 * 40, 50 * 6 * 5 * 4),
    ],
    ids=["gram", "square_sum", "mm", "t_mm"],
)
def test_temporaries_are_as_large_as_the_pieces(product, row_by_row, whole):
    block = Outer(randn(6, 2, 5, 4), randn(6, 2, 5, 5))
    for chunk_bytes, expected in ((1, row_by_row), (1 << 26, whole)):
        with Watched() as seen:
            product(replace(block, chunk_bytes=chunk_bytes))
        # Nothing is larger but what was there before: inputs, outputs, and the factors themselves.
        assert seen.largest <= max(expected, 50 * 40, block.left.numel(), block.right.numel())
        assert seen.largest >= expected or chunk_bytes == 1


@pytest.mark.parametrize("name", MAKERS)
def test_results_are_added_to_a_slice_of_a_wider_tensor(name):
    block = MAKERS[name]()
    p, weights = block.num_params, randn(block.num_rows, 3)
    wide = randn(3, p + 5)
    before = wide.clone()
    block.add_t_mm(weights, wide[:, 2 : 2 + p])
    before[:, 2 : 2 + p] += weights.T @ block.form()
    torch.testing.assert_close(wide, before)
    every_other = randn(6, p + 5)[::2, 1 : 1 + p]
    expected = every_other + weights.T @ block.form()
    block.add_t_mm(weights, every_other)
    torch.testing.assert_close(every_other, expected)


@pytest.mark.parametrize("name", MAKERS)
def test_columns_may_be_a_slice_of_a_wider_tensor(name):
    block = MAKERS[name]()
    wide = randn(3, block.num_params + 5)[:, 2:-3]
    torch.testing.assert_close(block.mm(wide), block.form() @ wide.T)


@pytest.mark.parametrize("long", [1, 1 << 16], ids=["rows count as long", "as short"])
@pytest.mark.parametrize("name", [name for name in MAKERS if "table" not in name])
def test_what_is_written_for_a_gpu_gives_the_same(monkeypatch, name, long):
    monkeypatch.setattr(outer, "_LONG", long)
    block = MAKERS[name]()
    columns, weights = randn(5, block.num_params), randn(block.num_rows, 5)
    fields = ("rows",) if isinstance(block, Formed) else ("left", "right")
    there = replace(block, **{field: on_gpu(getattr(block, field)) for field in fields})
    there_too = on_gpu(columns), on_gpu(weights)
    for a, b in zip(products(block, columns, weights), products(there, *there_too), strict=True):
        torch.testing.assert_close(b.as_subclass(Tensor), a)


@pytest.mark.parametrize("name", [name for name in MAKERS if "table" not in name])
def test_products_go_through_vmap(name):
    """Many replicas at once: tensors of which only the whole batch exists."""
    blocks = [MAKERS[name]() for _ in range(2)]
    columns, weights = randn(2, 4, blocks[0].num_params), randn(2, blocks[0].num_rows, 4)
    kind, fields = type(blocks[0]), ("rows",) if name == "formed" else ("left", "right")

    def run(columns: Tensor, weights: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        block = kind(*parts)
        return block.mm(columns), block.t_mm(weights), block.gram(), block.square_sum(), block.sum()

    parts = [torch.stack([getattr(block, field) for block in blocks]) for field in fields]
    together = torch.func.vmap(run)(columns, weights, *parts)
    for k, block in enumerate(blocks):
        alone = run(columns[k], weights[k], *(getattr(block, field) for field in fields))
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[k], b)


def test_a_cpu_takes_what_its_cache_holds():
    block = made("positions")
    assert block._columns() == base.CACHE_BYTES // (6 * 3 * 4 * 8)
    assert replace(block, left=on_gpu(block.left))._columns() == block.chunk_bytes // (6 * 3 * 4 * 8)
    assert replace(block, chunk_bytes=0)._columns() == 1
    assert outer.CACHE_BYTES is base.CACHE_BYTES


def unopened(name: str) -> tuple[Unopened, Outer]:
    """Products with the doubled rows of a source, and the same opened."""
    whole = made(name)
    return Unopened(whole.left, whole.right / 2, whole.right.shape[-1], lambda x: 2 * x), whole


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("limit", [1, 700, 1 << 20])
def test_what_is_opened_in_pieces_forms_the_same_rows(monkeypatch, name, limit):
    monkeypatch.setattr(outer, "_OPENED_BYTES", limit)
    closed, whole = unopened(name)
    assert closed.sizes == whole.sizes
    torch.testing.assert_close(closed.form(), whole.form(), rtol=1e-14, atol=1e-14)


def test_only_a_piece_is_open_at_a_time(monkeypatch):
    monkeypatch.setattr(outer, "_OPENED_BYTES", 8 * 30 * 40 * 2)
    closed = Unopened(randn(6, 1, 30, 2), randn(6, 4), 40, lambda x: x.repeat_interleave(300, 1).view(-1, 1, 30, 40))
    with LiveBytes() as memory:
        whole = closed.opened().right.nbytes
        opened, memory.peak = memory.peak, 0
        closed.form()
    assert opened == whole == 8 * 6 * 30 * 40
    assert memory.peak < whole / 2


@pytest.mark.parametrize("limit", [1, 700, 1 << 20])
@pytest.mark.parametrize("name", [name for name in SIZES if SIZES[name][2] == 1 and SIZES[name][4] > 1])
def test_some_outputs_of_what_is_unopened_open_the_same_inputs(monkeypatch, name, limit):
    monkeypatch.setattr(outer, "_OPENED_BYTES", limit)
    closed, whole = unopened(name)
    part = closed.narrow(5, 15)
    assert part.source is closed.source
    torch.testing.assert_close(part.form(), whole.form()[:, 5:15], rtol=1e-14, atol=1e-14)


UNSHARED = [name for name in SIZES if "shared" not in name]


@pytest.mark.parametrize("name", [*UNSHARED, "positions shared"])
def test_what_is_unopened_costs_as_much_as_when_it_is_opened(name):
    closed, whole = unopened(name)
    assert closed.costs == whole.costs


def test_products_of_a_sum_cost_as_much_as_those_of_formed_rows():
    block = Sum((table(), Outer(randn(6, 1, 2, 7), randn(6, 1, 2, 4))))
    assert block.costs == Formed(block.form()).costs


# ---- transposed weights


@pytest.mark.parametrize("name", ["linear", "positions", "one of all"])
def test_the_transposed_weight_has_transposed_gradients_in_the_same_memory(name):
    block = made(name)
    R, _, _, O, I = block.sizes  # noqa: E741
    swapped = block.transposed()
    torch.testing.assert_close(swapped.form(), block.form().view(R, O, I).mT.flatten(1))
    assert (swapped.left.data_ptr(), swapped.right.data_ptr()) == (block.right.data_ptr(), block.left.data_ptr())
    torch.testing.assert_close(swapped.transposed().form(), block.form())


@pytest.mark.parametrize("name", ["linear shared", "positions shared", "groups", "groups and positions shared"])
def test_groups_and_shared_inputs_have_no_transposed_factors(name):
    assert made(name).transposed() is None


# ---- parts without copies


@pytest.mark.parametrize("name", ["linear", "positions", "linear shared"])
def test_some_outputs_are_views_of_the_factors(name):
    block = made(name)
    part = block.narrow(5, 15)
    assert part.right is block.right
    assert part.left.untyped_storage().data_ptr() == block.left.untyped_storage().data_ptr()
    assert part.chunk_bytes == block.chunk_bytes


@pytest.mark.parametrize("make", [lambda: made("groups"), lambda: unopened("groups")[0], table])
def test_all_columns_are_the_block_itself(make):
    block = make()
    assert block.narrow(0, block.num_params) is block


@pytest.mark.parametrize("name", SIZES)
def test_temporaries_stay_as_small_when_rows_or_outputs_are_taken(name):
    block = replace(made(name), chunk_bytes=77)
    changed = block.select(torch.tensor([0])).to_dtype(torch.float32).scaled(2.0).narrow(0, block.num_params)
    assert changed.chunk_bytes == 77
