"""From rows of a value made of parameters to rows of the parameters: through views one by one, else by autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cases import Case, M, squares
from helpers.captured_gradients import recorder_of, rows_of
from reference import loop_gradients
from rows.models import Lambda
from slangvi.params import ParamSpec
from slangvi.rows import FactoredGradients, Formed, Outer, RowGroup, graph
from slangvi.rows.blocks import Block, Sum, TableRows
from slangvi.rows.pullback import find_views, pull_back_block, undo_views

T, D = 4, 6


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def by_autograd(value: Tensor, leaf: Tensor, rows: Tensor) -> Tensor:
    """Each row of the value, (K, p), taken back to the leaf."""
    found = [torch.autograd.grad(value, leaf, row.view_as(value), retain_graph=True)[0] for row in rows]
    return torch.stack(found).flatten(1)


# ---- views


@st.composite
def view_chains(draw: st.DrawFn) -> list[tuple[str, object]]:
    kinds = st.sampled_from(["permute", "transpose", "t", "flatten", "split", "unsqueeze", "squeeze", "clone", "cast"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 23)), max_size=5))


def apply_view(kind: str, number: int, x: Tensor) -> Tensor:
    """One of the ways to look at a tensor; the number decides between dimensions."""
    dims = list(range(x.ndim))
    match kind:
        case "permute":
            k = number % x.ndim
            order = dims[k:] + dims[:k]
            return x.permute(order if number % 2 else [dim - x.ndim for dim in order])
        case "transpose":
            return x.transpose(number % x.ndim, -1 - number // 4 % x.ndim)
        case "t":
            return x.t() if x.ndim == 2 else x.mT if x.ndim > 2 else x
        case "flatten":
            return x.flatten(number % x.ndim)
        case "split":
            sizes = [size for size in (2, 3) if x.shape[number % x.ndim] % size == 0]
            return x.unflatten(number % x.ndim, (sizes[0], -1)) if sizes else x
        case "unsqueeze":
            return x.unsqueeze(number % (x.ndim + 1))
        case "squeeze":
            return (x.squeeze() if number % 2 else x.squeeze(number % x.ndim)) if x.numel() > 1 else x
        case "clone":
            return x.contiguous() if number % 2 else x.clone()
        case "cast":
            return x.to(torch.float32 if x.dtype is torch.float64 else torch.float64)
    raise AssertionError(kind)


@given(shape=st.sampled_from([(6,), (2, 3), (3, 1), (2, 3, 4), (1, 2, 6)]), chain=view_chains())
def test_views_are_undone_one_by_one(shape, chain):
    torch.manual_seed(0)
    leaf = randn(*shape).requires_grad_()
    value = leaf
    for kind, number in chain:
        value = apply_view(kind, number, value)
    if value.grad_fn is None:
        return
    views = find_views(value.grad_fn)
    assert views is not None
    rows = torch.randn(3, leaf.numel(), dtype=value.dtype)
    found = undo_views(views, Formed(rows)).form()
    torch.testing.assert_close(found.to(leaf.dtype), by_autograd(value, leaf, rows), rtol=1e-6, atol=1e-6)


def test_views_that_keep_the_order_of_entries_leave_rows_as_they_are():
    leaf = randn(6, 4).requires_grad_()
    value = leaf.view(2, 3, 4).unsqueeze(0).squeeze(0).flatten(1).float().transpose(0, 0).clone()
    views = find_views(value.grad_fn)
    assert views == ()
    block = Formed(randn(3, 24))
    assert undo_views(views, block) is block


MORE = {
    "a product": lambda w: 2 * w,
    "a sum with itself": lambda w: w + w.T,
    "a part": lambda w: w[1:],
    "an entry": lambda w: w[0],
    "a lookup": lambda w: w[torch.tensor([0, 0])],
    "a repeated value": lambda w: w.expand(3, 4, 4),
    "rows that are moved": lambda w: w.roll(1, 0),
}


@pytest.mark.parametrize("name", MORE)
def test_where_there_is_more_than_views_it_is_said(name):
    leaf = randn(4, 4).requires_grad_()
    assert find_views(MORE[name](leaf.T).grad_fn) is None
    assert find_views(MORE[name](leaf).unsqueeze(0).grad_fn) is None


# ---- factors


def linear(positions: int = 1) -> Outer:
    return Outer(randn(3, 1, positions, 4), randn(3, 1, positions, 6))


@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize(
    "view",
    [lambda w: w.t(), lambda w: w.mT, lambda w: w.transpose(-1, 0), lambda w: w.permute(1, 0), lambda w: w.T.T.T],
    ids=["t", "mT", "transpose", "permute", "three times"],
)
def test_rows_kept_as_factors_stay_factors_through_a_transpose(view, positions):
    leaf, block = randn(6, 4).requires_grad_(), linear(positions)
    value = view(leaf)
    found = undo_views(find_views(value.grad_fn), block)
    assert isinstance(found, Outer)
    assert {found.left.data_ptr(), found.right.data_ptr()} == {block.left.data_ptr(), block.right.data_ptr()}
    torch.testing.assert_close(found.form(), by_autograd(value, leaf, block.form()))


def test_factors_of_a_flattened_tensor_stay_factors():
    leaf, block = randn(6, 2, 2).requires_grad_(), linear()
    value = leaf.flatten(1).T
    found = undo_views(find_views(value.grad_fn), block)
    assert isinstance(found, Outer)
    torch.testing.assert_close(found.form(), by_autograd(value, leaf, block.form()))


@pytest.mark.parametrize(
    ("block", "shape", "view"),
    [
        (lambda: Outer(randn(3, 2, 1, 2), randn(3, 2, 1, 6)), (6, 4), lambda w: w.T),
        (lambda: Outer(randn(4, 1, 1, 4), randn(2, 1, 1, 6)), (6, 4), lambda w: w.T),
        (lambda: Outer(randn(3, 2, 1, 2), randn(3, 2, 1, 6)), (2, 6, 2), lambda w: w.permute(2, 0, 1)),
        (lambda: Outer(randn(3, 1, 2, 4), randn(3, 1, 2, 6)), (3, 2, 4), lambda w: w.permute(2, 0, 1)),
        (lambda: TableRows(torch.randint(4, (3, 2)), randn(3, 2, 6), 4), (6, 4), lambda w: w.T),
        (lambda: Sum((linear(), TableRows(torch.randint(4, (3, 2)), randn(3, 2, 6), 4))), (6, 4), lambda w: w.T),
    ],
    ids=["groups", "shared inputs", "permuted groups", "permuted", "table", "sum"],
)
def test_what_has_no_transposed_factors_is_formed(block: Callable[[], Block], shape, view):
    leaf, rows = randn(*shape).requires_grad_(), block()
    value = view(leaf)
    found = undo_views(find_views(value.grad_fn), rows)
    assert isinstance(found, Formed)
    torch.testing.assert_close(found.form(), by_autograd(value, leaf, rows.form()))


# ---- anything else


def test_rows_go_back_to_every_leaf_that_a_value_was_made_of():
    w, a, b, other = (randn(*shape).requires_grad_() for shape in ((3, 6), (2, 6), (3, 2), (5,)))
    value, rows = (w + 0.5 * b @ a).T, randn(4, 18)
    found = pull_back_block((value.grad_fn, 0), [w, other, a, b], Formed(rows))
    assert found[1] is None
    for leaf, block in zip((w, a, b), (found[0], *found[2:]), strict=True):
        assert not block.form().requires_grad
        torch.testing.assert_close(block.form(), by_autograd(value, leaf, rows))
    assert all(leaf.grad is None for leaf in (w, a, b))


def test_factors_are_formed_to_go_through_more_than_views():
    leaf, block = randn(4, 6).requires_grad_(), linear(2)
    value = leaf / leaf.norm()
    (found,) = pull_back_block((value.grad_fn, 0), [leaf], block)
    torch.testing.assert_close(found.form(), by_autograd(value, leaf, block.form()))


def test_rows_go_back_from_the_output_of_a_node_that_was_used():
    leaf = randn(4, 6).requires_grad_()
    first, second = leaf.exp().split(2)
    rows = randn(3, 12)
    (found,) = pull_back_block((second.grad_fn, second.output_nr), [leaf], Formed(rows))
    torch.testing.assert_close(found.form(), by_autograd(second, leaf, rows))
    assert not found.form().view(3, 4, 6)[:, :2].any()
    assert first.output_nr != second.output_nr


def test_rows_are_cast_to_what_the_value_was_computed_in():
    leaf = torch.randn(4, 6).requires_grad_()
    value = (2 * leaf).to(torch.bfloat16)
    (found,) = pull_back_block((value.grad_fn, 0), [leaf], Formed(torch.ones(3, 24)))
    assert found.form().dtype is torch.float32
    assert found.form().eq(2).all()


class OneByOne(torch.autograd.Function):
    """A function of one's own that vmap cannot follow."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, delta):
        (x,) = ctx.saved_tensors
        assert float(delta.sum()) == float(delta.sum())
        return 2 * x * delta


def test_what_vmap_cannot_follow_is_gone_through_row_by_row():
    leaf, other, rows = randn(4).requires_grad_(), randn(1).requires_grad_(), randn(3, 4)
    value = OneByOne.apply(leaf)
    found, nothing = pull_back_block((value.grad_fn, 0), [leaf, other], Formed(rows))
    assert nothing is None
    torch.testing.assert_close(found.form(), 2 * leaf.detach() * rows)


# ---- models


def recorded(model: nn.Module, *args: Tensor, losses: Callable[[Tensor], Tensor] = squares) -> RowGroup:
    """The rows of one backward pass, which are those of a loop over the examples."""
    case = Case(model, args, losses).double()
    recorder = recorder_of(case.model)
    truth = loop_gradients(case)
    with recorder.recording():
        case.losses(case.model(*case.args)).sum().backward()
    (group,) = recorder.collect()
    assert not recorder.plans.latest().by_definition
    operator = FactoredGradients(ParamSpec.of_module(case.model), [group], truth)
    torch.testing.assert_close(rows_of(operator), truth, rtol=1e-9, atol=1e-9)
    return group


VIEWED = {
    "linear": (lambda x, w: F.linear(input=x, weight=w), (3, D)),
    "right factor": (lambda x, w: x @ w, (D, 3)),
    "transposed by hand": (lambda x, w: x @ w.T, (3, D)),
    "transposed twice": (lambda x, w: F.linear(x, w.t()), (D, 3)),
    "left factor": (lambda x, w: (w @ x.flatten(0, 1).T).T.unflatten(0, (len(x), -1)), (3, D)),
    "flattened": (lambda x, w: x @ w.flatten(1).T, (3, 2, D // 2)),
    "unflattened": (lambda x, w: x @ w.view(D, 3), (D * 3,)),
}


@pytest.mark.parametrize("name", VIEWED)
def test_views_of_a_matrix_keep_its_rows_as_factors(monkeypatch, name):
    monkeypatch.setattr(graph, "pull_back_block", None)
    function, shape = VIEWED[name]
    group = recorded(Lambda(function, w=shape), torch.randn(M, T, D))
    assert isinstance(group.blocks["w"], Outer)


@pytest.mark.parametrize("equation", ["btd,de->bte", "btd,ed->bte"])
def test_a_matrix_in_an_einsum_keeps_its_rows_as_factors(equation):
    shape = (D, 3) if "de" in equation else (3, D)
    group = recorded(Lambda(lambda x, w: torch.einsum(equation, x, w), w=shape), torch.randn(M, T, D))
    assert isinstance(group.blocks["w"], Outer)


def test_a_matrix_that_was_cast_has_factors_in_the_dtype_asked_for():
    model, x = Lambda(lambda x, w: (x.float() @ w.float()).double(), w=(D, 3)).double(), randn(M, T, D)
    recorder = recorder_of(model)
    with recorder.recording():
        squares(model(x)).sum().backward()
    block = recorder.collect()[0].blocks["w"]
    assert isinstance(block, Outer)
    assert block.left.dtype is block.right.dtype is torch.float64
    torch.testing.assert_close(block.sum().view(D, 3), model.w.grad, rtol=1e-5, atol=1e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, D)
        self.mix = nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.mix(self.words(ids))), self.words.weight)


def test_a_table_that_is_an_output_layer_as_well_is_a_sum_of_both_uses():
    group = recorded(Tied(), torch.randint(7, (M, T)))
    block = group.blocks["words.weight"]
    assert isinstance(block, Sum)
    assert {type(part) for part in block.parts} == {TableRows, Outer}


def test_a_matrix_that_is_used_both_ways_round_is_one_product():
    group = recorded(Lambda(lambda x, w: torch.tanh(x @ w) @ w.T, w=(D, 3)), torch.randn(M, D))
    block = group.blocks["w"]
    assert isinstance(block, Outer)
    assert (block.left.shape, block.right.shape) == ((M, 1, 2, D), (M, 1, 2, 3))


class Positions(nn.Module):
    """Embeddings of the places of words, looked up once for the whole batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table = nn.Embedding(T + 2, D)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "looked up":
                found = self.table(torch.arange(T))
            case "looked up with a leading one":
                found = self.table(torch.arange(T)[None])
            case "cut off":
                found = self.table.weight[:T]
            case "repeated for the batch":
                found = self.table(torch.arange(T).expand(len(x), T))
            case _:
                found = self.table.weight[:T].expand(len(x), -1, -1)
        return (x + found).tanh()


@pytest.mark.parametrize(
    "how", ["looked up", "looked up with a leading one", "cut off", "repeated for the batch", "expanded"]
)
def test_positions_that_the_batch_shares_have_rows_for_each_example(how):
    group = recorded(Positions(how), torch.randn(M, T, D))
    block = group.blocks["table.weight"]
    assert isinstance(block, TableRows if how == "repeated for the batch" else Formed)
    assert not block.form().view(M, T + 2, D)[:, T:].any()


MADE = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(D, 4)),
    "weight norm of a convolution": lambda: parametrizations.weight_norm(nn.Conv1d(T, 3, 2)),
    "an adapter": lambda: Lambda(lambda x, w, a, b: F.linear(x, w + 0.5 * (b @ a)), w=(3, D), a=(2, D), b=(3, 2)),
    "an adapter beside the weight": lambda: Lambda(
        lambda x, w, a, b: F.linear(x, w) + 0.5 * F.linear(F.linear(x, a), b), w=(3, D), a=(2, D), b=(3, 2)
    ),
    "a product of two": lambda: Lambda(lambda x, a, b: x @ (a @ b), a=(D, 2), b=(2, 3)),
    "parts side by side": lambda: Lambda(lambda x, a, b: x @ torch.cat([a, b.T], 1), a=(D, 2), b=(3, D)),
    "a matrix in parts": lambda: Lambda(lambda x, w: x @ w[:, :2] + (x @ w[:, 2:]).sum(-1, keepdim=True), w=(D, 5)),
    "a symmetric matrix": lambda: Lambda(lambda x, w: x @ (w + w.T), w=(D, D)),
    "a triangle": lambda: Lambda(lambda x, w: x @ w.tril(), w=(D, D)),
    "a positive scale": lambda: Lambda(lambda x, s: x * F.softplus(s), s=(D,)),
    "a scale of two scales": lambda: Lambda(lambda x, s, t: x * (s.exp() * t[:, None]), s=(D,), t=(T,)),
    "a parameter that is used twice behind": lambda: Lambda(lambda x, s: x * (s * s.exp()) + s, s=(D,)),
}


@pytest.mark.parametrize("name", MADE)
def test_parameters_behind_a_value_that_is_made_of_them_have_their_rows(name):
    group = recorded(MADE[name](), torch.randn(M, T, D))
    assert all(block.num_rows == M for block in group.blocks.values())


def test_factors_of_adapters_beside_the_weight_stay_factors():
    group = recorded(MADE["an adapter beside the weight"](), torch.randn(M, T, D))
    assert {type(block) for block in group.blocks.values()} == {Outer}


def test_frozen_parts_of_a_value_are_left_alone():
    model = MADE["an adapter"]()
    model.w.requires_grad_(False)
    group = recorded(model, torch.randn(M, T, D))
    assert set(group.blocks) == {"a", "b"}
