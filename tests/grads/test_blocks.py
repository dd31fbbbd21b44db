"""Blocks: every product against the formed gradients, whatever the form they are held in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi.grads import FactoredGradients, RowGroup
from slangvi.grads.blocks import Block, Formed, Outer, Rows, add, cheapest, stack
from slangvi.params import ParamSpec
from slangvi.types import Routes


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def outer(R: int, G: int = 1, T: int = 1, O: int = 3, I: int = 2) -> Outer:  # noqa: E741
    return Outer(randn(R, G, T, O), randn(R, G, T, I))


def rows(R: int, T: int = 3, V: int = 4, D: int = 2) -> Rows:
    return Rows(torch.randint(V, (R, T)), randn(R, T, D), V)


MAKERS: dict[str, Callable[[int], Block]] = {
    "formed": lambda R: Formed(randn(R, 6)),
    "outer": outer,
    "outer_positions": lambda R: outer(R, T=4),
    "outer_groups": lambda R: outer(R, G=2, O=2),
    "outer_groups_positions": lambda R: outer(R, G=2, T=3),
    "rows": rows,
    "outer_shared": lambda R: Outer(randn(R, 1, 1, 3), randn(1, 1, 1, 2)),
    "outer_shared_groups_positions": lambda R: Outer(randn(R, 2, 3, 2), randn(1, 2, 3, 2)),
}


def assert_products(block: Block, dense: torch.Tensor) -> None:
    """All five products of a block equal those of the dense rows."""
    R, p = dense.shape
    C, W = randn(3, p), randn(R, 2)
    assert block.num_rows == R
    torch.testing.assert_close(block.form(), dense)
    torch.testing.assert_close(block.sum(), dense.sum(0))
    torch.testing.assert_close(block.square_sum(), dense.square().sum(0))
    torch.testing.assert_close(block.gram(), dense @ dense.T)
    torch.testing.assert_close(block.mm(C), dense @ C.T)
    torch.testing.assert_close(block.t_mm(W), W.T @ dense)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 26], ids=["row by row", "pieces", "whole"])
def test_products_equal_dense_whatever_the_chunks(name, chunk_bytes):
    torch.manual_seed(0)
    block = MAKERS[name](5)
    small = block if isinstance(block, Formed) else replace(block, chunk_bytes=chunk_bytes)
    assert_products(small, block.form())


@given(R=st.integers(1, 6), G=st.integers(1, 3), T=st.integers(1, 4), O=st.integers(1, 4), I=st.integers(1, 4))
def test_outer_is_the_sum_of_outer_products(R, G, T, O, I):  # noqa: E741
    torch.manual_seed(R + 10 * T)
    block = outer(R, G, T, O, I)
    dense = torch.stack(
        [
            torch.cat(
                [
                    sum(torch.outer(block.left[r, g, t], block.right[r, g, t]) for t in range(T)).flatten()
                    for g in range(G)
                ]
            )
            for r in range(R)
        ]
    )
    assert_products(block, dense)


@given(R=st.integers(1, 5), T=st.integers(1, 6), V=st.integers(1, 5), D=st.integers(1, 3))
def test_rows_add_values_to_the_table_rows_they_name(R, T, V, D):
    torch.manual_seed(R + 10 * T)
    block = rows(R, T, V, D)
    dense = torch.zeros(R, V, D, dtype=torch.float64)
    for r in range(R):
        for t in range(T):
            dense[r, block.index[r, t]] += block.values[r, t]
    assert_products(block, dense.flatten(1))
    assert_products(block.as_outer(), dense.flatten(1))


@pytest.mark.parametrize("name", MAKERS)
def test_products_with_no_columns_are_empty(name):
    block = MAKERS[name](4)
    p = block.form().shape[1]
    assert block.mm(randn(0, p)).shape == (4, 0)
    assert block.t_mm(randn(4, 0)).shape == (0, p)


@pytest.mark.parametrize("name", MAKERS)
def test_scaling_and_padding(name):
    block = MAKERS[name](3)
    assert_products(block.scaled(-2.5), -2.5 * block.form())
    zeros = torch.zeros(2, block.form().shape[1], dtype=torch.float64)
    assert_products(block.padded(2, 1), torch.cat([zeros, block.form(), zeros[:1]]))


PAIRS = {
    "outer+outer": (lambda R: outer(R, T=2), lambda R: outer(R, T=3), Outer),
    "rows+rows": (lambda R: rows(R, V=3), lambda R: rows(R, T=1, V=3), Rows),
    "rows+outer": (lambda R: rows(R, V=3), outer, Outer),
    "outer+formed": (outer, lambda R: Formed(randn(R, 6)), Formed),
    "formed+formed": (lambda R: Formed(randn(R, 6)), lambda R: Formed(randn(R, 6)), Formed),
    "differently grouped": (lambda R: outer(R, O=3, I=2), lambda R: outer(R, O=2, I=3), Formed),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_uses_of_one_tensor_add_up(pair):
    torch.manual_seed(1)
    first, second, kind = PAIRS[pair]
    a, b = first(4), second(4)
    total = add([a, b])
    assert isinstance(total, kind)
    assert_products(total, a.form() + b.form())


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_of_other_examples_stack(pair):
    torch.manual_seed(2)
    first, second, _ = PAIRS[pair]
    a, b = first(4), second(2)
    assert_products(stack([a, b]), torch.cat([a.form(), b.form()]))


def test_one_block_stacks_to_itself():
    block = outer(3)
    assert stack([block]) is block


def test_forming_is_chosen_by_cost_and_refused_by_memory():
    long = outer(4, T=50, O=2, I=2)
    assert isinstance(cheapest(long, rank=1), Formed)
    assert isinstance(cheapest(long, rank=1, routes=Routes(form_bytes=1)), Outer)
    wide = outer(4, T=1, O=200, I=200)
    assert isinstance(cheapest(wide, rank=1), Outer)
    torch.testing.assert_close(cheapest(long, rank=1).gram(), long.gram())


def test_draws_that_saw_the_same_inputs_share_them():
    inputs = randn(3, 1, 1, 2)
    draws = [Outer(randn(3, 1, 1, 4), inputs) for _ in range(4)]
    shared = stack(draws)
    assert isinstance(shared, Outer)
    assert shared.right is inputs
    assert shared.copies == 4
    assert_products(shared, torch.cat([draw.form() for draw in draws]))
    assert_products(add([shared, shared]), 2 * shared.form())
    other = outer(2, O=4)
    assert_products(stack([shared, other]), torch.cat([shared.form(), other.form()]))


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 3.0, 1.0, 1.5]])
@pytest.mark.parametrize("scales", [(2.0, 2.0), (2.0, 3.0)], ids=["one scale", "two scales"])
def test_a_bias_shares_the_product_of_its_weight(scales, weights):
    """Two draws on one batch: weight and bias hold the same δ, also after stacking; scales are worked in either way."""
    torch.manual_seed(0)
    spec = ParamSpec(tuple("wbvus"), tuple(map(torch.Size, ((3, 2), (3,), (3, 4), (2,), (3,)))))
    inputs, others = randn(4, 1, 1, 2), randn(4, 1, 1, 4)
    groups, dense = [], []
    for scale in scales:
        left = randn(4, 1, 1, 3)
        parts = {
            "w": Outer(left, inputs),
            "b": Formed(left.view(4, 3)),
            "v": Outer(left, others),
            "u": Formed(randn(4, 2)),
            "s": Formed(left.view(4, 3)),
        }
        groups.append(RowGroup(4, parts, {}).scaled(scale))
        dense.append(scale * torch.cat([part.form() for part in parts.values()], dim=1))
    truth, operator = (
        torch.cat(dense),
        FactoredGradients(spec, groups, rank=1, like=inputs, routes=Routes(form_bytes=0)),
    )
    column = torch.ones(spec.num_params).double() if weights is None else spec.expand(weights, truth)
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(operator.gram(given), (truth * column) @ truth.T)
    torch.testing.assert_close(operator.form(), truth)
    torch.testing.assert_close(operator.sum(), truth.sum(0))
    torch.testing.assert_close(operator.square_sum(), truth.square().sum(0))
    C, W = randn(3, spec.num_params), randn(8, 2)
    torch.testing.assert_close(operator.mm(C), truth @ C.T)
    torch.testing.assert_close(operator.t_mm(W), W.T @ truth)
    if len(set(scales)) == 1:
        assert operator.blocks["w"].left.data_ptr() == operator.blocks["b"].rows.data_ptr()


def test_stacks_of_many_temporary_parts_are_not_confused():
    """Parts made on the way and freed again may give their addresses to the next parameter's parts."""
    torch.manual_seed(0)
    names = tuple("abcdefgh")
    spec = ParamSpec(names, (torch.Size((3, 2)),) * len(names))
    first = RowGroup(4, {name: outer(4) for name in names}, {})
    second = RowGroup(4, {name: Formed(randn(4, 6)) for name in names}, {})
    third = RowGroup(2, {}, {})
    operator = FactoredGradients(spec, [third, first, second, third], rank=1, like=randn(1))
    middle = [torch.cat([group.blocks[name].form() for group in (first, second)]) for name in names]
    zeros = torch.zeros(2, 48, dtype=torch.float64)
    torch.testing.assert_close(operator.form(), torch.cat([zeros, torch.cat(middle, dim=1), zeros]))
