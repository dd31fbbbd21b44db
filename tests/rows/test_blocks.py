"""Blocks: every product, part and change against the formed gradients, whatever the form they are held in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.allocated_bytes import allocated
from helpers.captured_gradients import products_of
from slangvi.params import ParamSpec
from slangvi.rows import FactoredGradients, RowGroup
from slangvi.rows import blocks as module
from slangvi.rows.blocks import Block, Formed, Outer, Patches, Sum, TableRows, add, stack
from slangvi.types import Routes


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def outer(R: int, G: int = 1, T: int = 1, O: int = 3, I: int = 2, S: int = 1) -> Outer:  # noqa: E741
    return Outer(randn(R, G, T, O), randn(R // S, G, T, I))


def patches(R: int, G: int = 1, T: int = 1, O: int = 3, I: int = 2, S: int = 1) -> Patches:  # noqa: E741
    """Windows of width I over a line, as of a convolution: a is many times larger than x."""
    return Patches(randn(R, G, T, O), randn(R // S, G, T + I - 1), I, lambda x: x.unfold(2, I, 1))


def table(R: int, T: int = 3, V: int = 3, D: int = 2) -> TableRows:
    return TableRows(torch.randint(V, (R, T)), randn(R, T, D), V)


# Sizes (R, G, T, O, I, S) → a block of R rows and G·O·I columns.
KINDS: dict[str, Callable[..., Block]] = {
    "formed": lambda R, G, T, O, I, S: Formed(randn(R, G * O * I)),  # noqa: E741
    "outer": outer,
    "patches": patches,
    "table": lambda R, G, T, O, I, S: table(R, T, G * O, I),  # noqa: E741
    "table and output layer": lambda R, G, T, O, I, S: Sum((table(R, T, G * O, I), outer(R, G, T, O, I, S))),  # noqa: E741
    "sum of three": lambda R, G, T, O, I, S: Sum(  # noqa: E741
        (patches(R, G, T, O, I, S), Formed(randn(R, G * O * I)), patches(R, G, T + 1, O, I))
    ),
}
FEW = st.integers(1, 3)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Any block of any kind and size; draws of the weights may share their inputs."""
    make, S = KINDS[draw(st.sampled_from(sorted(KINDS)))], draw(FEW)
    torch.manual_seed(draw(st.integers(0, 99)))
    return make(S * draw(FEW), draw(FEW), draw(FEW), draw(FEW), draw(FEW), S)


def assert_products(block: Block, dense: Tensor) -> None:
    """All products of a block equal those of the dense rows."""
    R, p = dense.shape
    C, W = torch.randn(3, p, dtype=dense.dtype), torch.randn(R, 2, dtype=dense.dtype)
    assert (block.num_rows, block.num_params) == (R, p)
    onto = torch.randn(2, p + 3, dtype=dense.dtype)
    expected = onto.clone()
    expected[:, 1:-2] += W.T @ dense
    block.add_t_mm(W, onto[:, 1:-2])
    torch.testing.assert_close(onto, expected)
    torch.testing.assert_close(block.form(), dense)
    torch.testing.assert_close(block.sum(), dense.sum(0))
    torch.testing.assert_close(block.square_sum(), dense.square().sum(0))
    torch.testing.assert_close(block.gram(), dense @ dense.T)
    torch.testing.assert_close(block.mm(C), dense @ C.T)


# ---- what each kind of block stands for


@given(R=FEW, G=FEW, T=FEW, O=FEW, I=FEW, S=FEW)
def test_outer_is_the_sum_of_outer_products(R, G, T, O, I, S):  # noqa: E741
    torch.manual_seed(R + 10 * T)
    block = outer(R * S, G, T, O, I, S)
    dense = torch.stack(
        [
            torch.cat(
                [
                    sum(torch.outer(block.left[r, g, t], block.right[r % R, g, t]) for t in range(T)).flatten()
                    for g in range(G)
                ]
            )
            for r in range(R * S)
        ]
    )
    assert block.copies == S
    assert_products(block, dense)


@given(R=FEW, G=FEW, T=FEW, O=FEW, I=FEW, S=FEW)
def test_what_is_unopened_is_the_outer_product_with_what_it_opens_to(R, G, T, O, I, S):  # noqa: E741
    torch.manual_seed(R + 10 * T)
    block = patches(R * S, G, T, O, I, S)
    opened = block.open(block.source)
    assert torch.equal(opened[:, :, :, 0], block.source[:, :, :T])
    assert_products(block, Outer(block.left, opened).form())


@given(R=FEW, T=st.integers(1, 6), V=st.integers(1, 5), D=FEW)
def test_table_rows_add_values_to_the_rows_they_name(R, T, V, D):
    torch.manual_seed(R + 10 * T)
    block = table(R, T, V, D)
    dense = torch.zeros(R, V, D, dtype=torch.float64)
    for r in range(R):
        for t in range(T):
            dense[r, block.index[r, t]] += block.values[r, t]
    assert_products(block, dense.flatten(1))


@given(R=FEW, G=FEW, T=FEW, O=FEW, I=FEW, S=FEW)
def test_a_sum_is_the_sum_of_its_parts(R, G, T, O, I, S):  # noqa: E741
    torch.manual_seed(R + 10 * T)
    parts = tuple(make(R * S, G, T, O, I, S) for name, make in KINDS.items() if "sum" not in name)
    assert_products(Sum(parts), sum(part.form() for part in parts))
    assert_products(Sum(parts[:1]), parts[0].form())


# ---- parts of blocks, and blocks that were changed


@given(block=blocks(), data=st.data())
def test_columns_can_be_taken_wherever_the_grain_allows(block, data):
    count, rest = divmod(block.num_params, block.grain)
    assert rest == 0, "the grain must part all columns"
    start = data.draw(st.integers(0, count - 1)) * block.grain
    stop = data.draw(st.integers(start // block.grain + 1, count)) * block.grain
    part = block.narrow(start, stop)
    assert type(part) is type(block), "factors stay factors"
    assert_products(part, block.form()[:, start:stop])


@pytest.mark.parametrize("name", KINDS)
def test_all_pieces_of_a_grain_make_up_the_block(name):
    block = KINDS[name](4, 1, 3, 4, 3, 2)
    starts = range(0, block.num_params, block.grain)
    assert block.grain == {"formed": 1}.get(name, 3)
    pieces = [block.narrow(start, start + block.grain).form() for start in starts]
    torch.testing.assert_close(torch.cat(pieces, 1), block.form())


@pytest.mark.parametrize("name", ["outer", "patches", "sum of three"])
def test_several_groups_cannot_be_parted(name):
    block = KINDS[name](4, 2, 3, 2, 3, 1)
    assert block.grain == block.num_params == 12
    assert_products(block.narrow(0, 12), block.form())


@given(block=blocks())
def test_all_products_are_in_the_dtype_that_was_asked_for(block):
    small, dense = block.to_dtype(torch.float32), block.form()
    C = torch.randn(2, block.num_params)
    found = [small.form(), small.sum(), small.square_sum(), small.gram(), small.mm(C)]
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(small.form(), dense.float(), rtol=1e-5, atol=1e-5)
    assert_products(small.to_dtype(torch.float64), small.to_dtype(torch.float64).form())
    torch.testing.assert_close(small.to_dtype(torch.float64).form(), dense, rtol=1e-5, atol=1e-5)


@given(block=blocks(), factor=st.sampled_from([-2.5, 0.0, 3.0]))
def test_scaled_blocks_have_scaled_gradients(block, factor):
    scaled = block.scaled(factor)
    assert type(scaled) is type(block)
    assert_products(scaled, factor * block.form())


@given(block=blocks(), data=st.data())
def test_changes_can_follow_one_another_in_any_order(block, data):
    dense, grain = block.form(), block.grain
    stop = data.draw(st.integers(1, block.num_params // grain)) * grain
    changes: dict[str, tuple[Callable[[Block], Block], Callable[[Tensor], Tensor]]] = {
        "scaled": (lambda b: b.scaled(-2.0), lambda x: -2.0 * x),
        "narrowed": (lambda b: b.narrow(0, stop), lambda x: x[:, :stop]),
    }
    for name in data.draw(st.permutations(sorted(changes))):
        of_block, of_rows = changes[name]
        block, dense = of_block(block), of_rows(dense)
    assert_products(block, dense)


@given(block=blocks())
def test_nothing_that_is_done_with_a_block_changes_it(block):
    before = block.form().clone()
    block.narrow(0, block.num_params).scaled(0.0)
    block.to_dtype(torch.float32).scaled(7.0)
    block.gram().zero_()
    block.mm(randn(1, block.num_params)).zero_()
    block.sum().zero_()
    block.square_sum().zero_()
    assert torch.equal(block.form(), before)


# ---- products in pieces


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 26], ids=["row by row", "pieces", "whole"])
def test_products_equal_dense_whatever_the_chunks(monkeypatch, name, chunk_bytes):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    block = KINDS[name](6, 2, 3, 2, 2, 2)
    assert_products(block, block.form())


def test_patches_of_a_small_layer_are_opened_once():
    seen = []

    def opened(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.repeat_interleave(300, 1).view(-1, 1, 30, 40)

    block = Patches(randn(6, 1, 30, 2), randn(6, 4), 40, opened)
    assert torch.equal(block.form(), block.form())
    assert seen == [6]


def test_only_some_patches_are_open_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    monkeypatch.setattr(module, "CHUNK_BYTES", 8 * 30 * 40 * 2)
    block = Patches(randn(6, 1, 30, 2), randn(6, 4), 40, lambda x: x.repeat_interleave(300, 1).view(-1, 1, 30, 40))
    assert allocated(block.form) < 8 * 6 * 30 * 40 / 2


@pytest.mark.parametrize("name", KINDS)
def test_products_with_no_columns_are_empty(name):
    block = KINDS[name](4, 1, 2, 3, 2, 1)
    assert block.mm(randn(0, block.num_params)).shape == (4, 0)
    block.add_t_mm(randn(4, 0), randn(0, block.num_params))


# ---- several blocks of one tensor

PAIRS: dict[str, tuple[Callable[[int], Block], Callable[[int], Block], type[Block]]] = {
    "outer+outer": (lambda R: outer(R, T=2), lambda R: outer(R, T=3), Outer),
    "groups+groups": (lambda R: outer(R, G=3, T=2, O=1), lambda R: outer(R, G=3, T=1, O=1), Outer),
    "shared+outer": (lambda R: outer(R, S=2), lambda R: outer(R, T=2), Sum),
    "table+table": (table, lambda R: table(R, T=1), TableRows),
    "table+outer": (table, outer, Sum),
    "outer+formed": (outer, lambda R: Formed(randn(R, 6)), Sum),
    "patches+patches": (patches, lambda R: patches(R, T=2), Sum),
    "patches+outer": (patches, outer, Sum),
    "sum+outer": (lambda R: Sum((table(R), outer(R))), outer, Sum),
    "formed+sum": (lambda R: Formed(randn(R, 6)), lambda R: Sum((table(R), outer(R))), Sum),
    "formed+formed": (lambda R: Formed(randn(R, 6)), lambda R: Formed(randn(R, 6)), Formed),
    "differently shaped": (lambda R: outer(R, O=3, I=2), lambda R: outer(R, O=2, I=3), Sum),
    "differently grouped": (lambda R: outer(R, G=3, O=1, I=2), lambda R: outer(R, G=1, O=3, I=2), Sum),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_uses_of_one_tensor_add_up(pair):
    first, second, kind = PAIRS[pair]
    a, b = first(4), second(4)
    total = add([a, b])
    assert isinstance(total, kind)
    assert_products(total, a.form() + b.form())


def test_many_uses_of_one_tensor_are_one_sum():
    uses = [table(3), outer(3), Formed(randn(3, 6)), outer(3, O=2, I=3)]
    total = add(uses)
    assert isinstance(total, Sum)
    assert len(total.parts) == 4
    assert_products(total, sum(use.form() for use in uses))
    assert add(uses[:1]) is uses[0]


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_of_other_examples_stack(pair):
    first, second, _ = PAIRS[pair]
    a, b = first(4), second(2)
    assert_products(stack([a, b]), torch.cat([a.form(), b.form()]))


@given(data=st.data(), G=FEW, O=FEW, I=FEW)
def test_blocks_of_any_kinds_stack(data, G, O, I):  # noqa: E741
    torch.manual_seed(0)
    names = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4))
    found = []
    for name in names:
        T, S = data.draw(FEW), data.draw(FEW)
        found.append(KINDS[name](S * data.draw(FEW), G, T, O, I, S))
    assert_products(stack(found), torch.cat([block.form() for block in found]))


@pytest.mark.parametrize("name", KINDS)
def test_blocks_stack_without_being_formed(monkeypatch, name):
    make = KINDS[name]
    several = [make(2, 1, 3, 2, 2, 1), make(3, 1, 3, 2, 2, 1), make(1, 1, 3, 2, 2, 1)]
    dense = torch.cat([block.form() for block in several])
    with monkeypatch.context() as patch:
        for kind in (Outer, TableRows, Patches, Sum):
            patch.setattr(kind, "form", None)
        stacked = stack(several)
    assert stacked.is_factored is (name == "table")
    assert_products(stacked, dense)


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
    assert_products(stack([shared, draws[0]]), torch.cat([shared.form(), draws[0].form()]))


def test_draws_that_saw_the_same_images_open_them_once():
    first = patches(3, T=4, I=2)
    draws = [first, replace(first, left=randn(*first.left.shape))]
    shared = stack(draws)
    assert isinstance(shared, Patches)
    assert shared.source is first.source
    assert_products(shared, torch.cat([draw.form() for draw in draws]))
    twice = [shared, patches(2, T=4, I=2)]
    assert_products(stack(twice), torch.cat([block.form() for block in twice]))


def test_images_of_different_size_stack():
    small, large = patches(2, T=3), patches(3, T=5)
    assert_products(stack([small, large]), torch.cat([small.form(), large.form()]))


# ---- blocks of several tensors that share memory


@pytest.mark.parametrize("scales", [(2.0, 2.0), (2.0, 3.0)], ids=["one scale", "two scales"])
@pytest.mark.parametrize("layers", ["auto", "form", "factor"])
def test_a_bias_and_its_weight_may_share_their_memory(scales, layers):
    """Two draws on one batch: weight and bias hold the same δ, also after stacking; scales are worked in either way."""
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
        groups.append(RowGroup(4, parts).scaled(scale))
        dense.append(scale * torch.cat([part.form() for part in parts.values()], dim=1))
    truth = torch.cat(dense)
    operator = FactoredGradients(spec, groups, like=inputs, routes=Routes(layers))
    torch.testing.assert_close(operator.form(), truth)
    torch.testing.assert_close(operator.sum(), truth.sum(0))
    torch.testing.assert_close(operator.square_sum(), truth.square().sum(0))
    C, W = randn(3, spec.num_params), randn(8, 2)
    gram, product, combined = products_of(operator, W, C)
    torch.testing.assert_close(gram, truth @ truth.T)
    torch.testing.assert_close(product, truth @ C.T)
    torch.testing.assert_close(combined, W.T @ truth)


def test_stacks_of_many_temporary_parts_are_not_confused():
    """Parts made on the way and freed again may give their addresses to the next parameter's parts."""
    names = tuple("abcdefgh")
    spec = ParamSpec(names, (torch.Size((3, 2)),) * len(names))
    first = RowGroup(4, {name: outer(4) for name in names})
    second = RowGroup(4, {name: Formed(randn(4, 6)) for name in names})
    third = RowGroup(2, {})
    operator = FactoredGradients(spec, [third, first, second, third], like=randn(1))
    middle = [torch.cat([group.blocks[name].form() for group in (first, second)]) for name in names]
    zeros = torch.zeros(2, 48, dtype=torch.float64)
    torch.testing.assert_close(operator.form(), torch.cat([zeros, torch.cat(middle, dim=1), zeros]))


# ---- transposed weights, and parts without copies


@pytest.mark.parametrize("T", [1, 3])
def test_the_transposed_weight_has_transposed_gradients_in_the_same_memory(T):
    block = outer(6, T=T, O=4, I=5)
    swapped = block.transposed()
    torch.testing.assert_close(swapped.form(), block.form().view(6, 4, 5).mT.flatten(1))
    assert (swapped.left.data_ptr(), swapped.right.data_ptr()) == (block.right.data_ptr(), block.left.data_ptr())
    torch.testing.assert_close(swapped.transposed().form(), block.form())


@pytest.mark.parametrize("T", [1, 3])
def test_each_group_of_a_weight_is_transposed(T):
    block = outer(6, G=2, T=T, O=4, I=5)
    torch.testing.assert_close(block.transposed().form(), block.form().view(6, 2, 4, 5).mT.flatten(1))


@pytest.mark.parametrize("block", [outer(6, S=3), outer(6, G=2, T=3, S=2)])
def test_shared_inputs_have_no_transposed_factors(block):
    assert block.transposed() is None


# ---- draws of a tensor side by side


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("groups", [1, 2, 4], ids="{} groups".format)
@pytest.mark.parametrize("outputs", [1, 4], ids="{} outputs".format)
def test_rows_of_draws_side_by_side_are_rows_of_each(name, groups, outputs):
    block, draws = KINDS[name](3, groups, 2, outputs, 4, 1), 2
    split = block.split_draws(draws)
    assert (split.num_rows, split.num_params) == (6, block.num_params // 2)
    torch.testing.assert_close(split.form(), torch.cat(block.form().chunk(draws, 1)))
    assert_products(split, split.form())


@pytest.mark.parametrize("T", [1, 3])
def test_some_outputs_are_views_of_the_factors(T):
    block = outer(6, T=T, O=4, I=5)
    part = block.narrow(5, 15)
    assert part.right is block.right
    assert part.left.untyped_storage().data_ptr() == block.left.untyped_storage().data_ptr()


@pytest.mark.parametrize("make", [lambda: outer(6, G=2), lambda: patches(6, G=2), lambda: table(6)])
def test_all_columns_are_the_block_itself(make):
    block = make()
    assert block.narrow(0, block.num_params) is block


@pytest.mark.parametrize("name", KINDS)
def test_results_are_added_to_every_other_row(name):
    block = KINDS[name](6, 1, 3, 2, 2, 1)
    onto, weights = randn(6, block.num_params + 5)[::2, 1 : 1 + block.num_params], randn(6, 3)
    expected = onto + weights.T @ block.form()
    block.add_t_mm(weights, onto)
    torch.testing.assert_close(onto, expected)
