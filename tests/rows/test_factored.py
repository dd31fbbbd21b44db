"""The operator over blocks: segments cover all columns, and results are the same whatever is formed, cut or stacked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import build
from helpers.allocated_bytes import allocated
from helpers.captured_gradients import captured, products_of
from reference import loop_gradients
from slangvi.params import ParamSpec
from slangvi.rows import FactoredGradients, RowGroup, factored
from slangvi.rows.blocks import Block, Formed, Outer, Patches, Sum, TableRows
from slangvi.types import Routes

SPEC = ParamSpec(
    ("conv.weight", "conv.bias", "head.weight", "table", "unused", "tied", "images"),
    tuple(map(torch.Size, ((4, 6), (4,), (3, 5), (7, 2), (2, 2), (3, 4), (5, 2, 3)))),
)
ENDS = [SPEC.slices[name].stop for name in SPEC.names]
FACTORED = ("conv.weight", "head.weight", "table", "images")
RANK = 2
# Bytes of a formed column of six rows.
COLUMN = 6 * 8


@pytest.fixture(autouse=True)
def _no_tensor_is_small(monkeypatch):
    """What is formed does not depend on how few numbers a test has."""
    monkeypatch.setattr(factored, "FEW_ENTRIES", 0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def group(num_rows: int = 3, skipped: Sequence[str] = (), scale: float = 1.0, images: Tensor | None = None) -> RowGroup:
    """One pass over a batch, in blocks of every kind; columns of "unused" are never there."""
    left, source = randn(num_rows, 2, 8, 2), randn(num_rows, 2, 9) if images is None else images
    blocks: dict[str, Block] = {
        "conv.weight": Outer(left, randn(num_rows, 2, 8, 6)),
        "conv.bias": Formed(left.sum(2).flatten(1)),
        "head.weight": Outer(randn(num_rows, 1, 1, 3), randn(num_rows, 1, 1, 5)),
        "table": TableRows(torch.randint(7, (num_rows, 4)), randn(num_rows, 4, 2), 7),
        "tied": Sum((
            TableRows(torch.randint(3, (num_rows, 2)), randn(num_rows, 2, 4), 3),
            Outer(randn(num_rows, 1, 2, 3), randn(num_rows, 1, 2, 4)),
        )),
        "images": Patches(
            randn(num_rows, 1, 7, 5), source, 6, lambda x: x.unfold(2, 3, 1).transpose(1, 2).flatten(2).unsqueeze(1)
        ),
    }  # fmt: skip
    return RowGroup(num_rows, {name: block for name, block in blocks.items() if name not in skipped}, None, scale)


def dense(groups: Sequence[RowGroup]) -> Tensor:
    """The rows of all groups, (R, P)."""
    found = torch.zeros(sum(g.height for g in groups), SPEC.num_params, dtype=torch.float64)
    start = 0
    for g in groups:
        for name, block in g.blocks.items():
            found[start : start + g.height, SPEC.slices[name]] = g.row_scale * block.form()
        start += g.height
    return found


def two_passes() -> list[RowGroup]:
    """The first does not use the table."""
    torch.manual_seed(0)
    return [group(skipped=["table"]), group()]


def operator(routes: Routes | None, groups: Sequence[RowGroup] | None = None) -> FactoredGradients:
    return FactoredGradients(SPEC, two_passes() if groups is None else groups, randn(1), routes)


def assert_products(gradients: FactoredGradients, rows: Tensor, cuts: Sequence[int] = ()) -> None:
    """Products of the operator, and sums over its segments, are those of the dense rows."""
    R, P = rows.shape
    columns, mixture, scale = randn(3, P), randn(R, 4), gradients.scale
    torch.testing.assert_close(gradients.form(), rows)
    torch.testing.assert_close(gradients.sum(), rows.sum(0))
    torch.testing.assert_close(gradients.square_sum(), rows.square().sum(0))
    gram, product = torch.zeros(R, R, dtype=rows.dtype), torch.zeros(R, 3, dtype=rows.dtype)
    onto, squares = torch.zeros(4, P, dtype=rows.dtype), torch.zeros(P, dtype=rows.dtype)
    for place, some in gradients.segments(cuts):
        torch.testing.assert_close(scale * some.form(), rows[:, place])
        gram += scale**2 * some.gram()
        product += scale * some.mm(columns[:, place])
        some.add_t_mm(scale * mixture, onto[:, place])
        squares[place] += scale**2 * some.square_sum()
    torch.testing.assert_close(gram, rows @ rows.T)
    torch.testing.assert_close(product, rows @ columns.T)
    torch.testing.assert_close(onto, mixture.T @ rows)
    torch.testing.assert_close(squares, rows.square().sum(0))


def places(gradients: FactoredGradients, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    return [(place.start, place.stop) for place, _ in gradients.segments(cuts)]


def formed(gradients: FactoredGradients) -> set[str]:
    """Names of the weights whose rows are formed, in all segments that have some of them."""
    ways: dict[str, set[bool]] = {name: set() for name in FACTORED}
    for place, rows in gradients.segments():
        for name in FACTORED:
            if SPEC.slices[name].start < place.stop and place.start < SPEC.slices[name].stop:
                ways[name].add(isinstance(rows, Formed))
    assert all(len(way) == 1 for way in ways.values()), "a tensor is formed as a whole or not at all"
    return {name for name, way in ways.items() if way == {True}}


# ---- what is formed

# Weights with many positions are always formed, the head and the table on request.
CONVS = {"conv.weight", "images"}
CHOICES = {
    "auto": (Routes(), CONVS),
    "form": (Routes(layers="form"), set(FACTORED)),
    "factor": (Routes(layers="factor"), CONVS),
    "too large to form at once": (Routes(form_bytes=8), CONVS),
    "nothing fits": (Routes(layers="form", form_bytes=0), set(FACTORED)),
    "by name": (Routes(layers={"head.weight": "form", "table": "factor"}), {*CONVS, "head.weight"}),
    "by glob": (Routes(layers={"t?ble": "form"}), {*CONVS, "table"}),
    "the first that fits": (Routes(layers={"*.weight": "form", "head.weight": "factor"}), {*CONVS, "head.weight"}),
    "auto for the rest": (Routes(layers={"head.*": "form"}), {*CONVS, "head.weight"}),
    "tiny pieces": (Routes(layers="factor", chunk_bytes=0), CONVS),
    "randomized": (Routes(spectrum="randomized"), CONVS),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_layers_are_formed_as_the_routes_say_and_nothing_else_changes(choice):
    routes, expected = CHOICES[choice]
    gradients = operator(routes)
    assert formed(gradients) == expected
    assert gradients.spectrum_route == routes.spectrum
    assert_products(gradients, dense(two_passes()))


def test_rows_that_are_all_formed_lie_in_one_tensor():
    spec = ParamSpec(("weight", "bias"), (torch.Size((2, 3)), torch.Size((2,))))
    blocks = {"weight": Outer(randn(6, 1, 1, 2), randn(6, 1, 1, 3)), "bias": Formed(randn(6, 2))}
    routes = Routes(layers="form")
    (segment,) = FactoredGradients(spec, [RowGroup(6, blocks)], randn(1), routes).segments()
    assert isinstance(segment.rows, Formed)
    assert segment.columns == slice(0, 8)


# ---- segments

SIZES = st.sampled_from([0, 1, COLUMN, 3 * COLUMN, 7 * COLUMN, 20 * COLUMN, 60 * COLUMN, 1 << 28])
LAYERS = st.sampled_from(["auto", "form", "factor", {"*.weight": "form"}, {"table": "form", "head.*": "form"}])


@given(form_bytes=SIZES, layers=LAYERS, cuts=st.sets(st.sampled_from(ENDS)))
def test_segments_cover_all_columns_once_and_in_order(form_bytes, layers, cuts):
    gradients = operator(Routes(layers, form_bytes=form_bytes))
    found = places(gradients, sorted(cuts))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == SPEC.num_params
    assert all(start < stop for start, stop in found)
    assert cuts <= {stop for _, stop in found}, "a segment ends at each cut"
    assert_products(gradients, dense(two_passes()), sorted(cuts))


@given(form_bytes=SIZES, layers=LAYERS, cuts=st.sets(st.sampled_from(ENDS)))
def test_no_segment_forms_more_than_was_allowed(form_bytes, layers, cuts):
    """But for what cannot be parted: the grain of a tensor, 24 columns here."""
    gradients = operator(Routes(layers, form_bytes=form_bytes))
    for _, some in gradients.segments(sorted(cuts)):
        size = some.num_params if isinstance(some, Formed) else 0
        assert size * COLUMN <= form_bytes or size <= 24


def test_columns_without_gradients_take_no_more_memory_than_others():
    spec = ParamSpec(("bias", "unused", "gain"), (torch.Size((10,)), torch.Size((1000, 10)), torch.Size((10,))))
    blocks = {"bias": Formed(randn(6, 10)), "gain": Formed(randn(6, 10))}
    routes = Routes(form_bytes=30 * COLUMN)
    gradients = FactoredGradients(spec, [RowGroup(6, blocks)], randn(1), routes)
    assert allocated(lambda: places(gradients)) <= 50 * COLUMN
    assert places(gradients)[-1][1] == 10_020


def test_without_need_there_is_one_segment():
    gradients = operator(Routes("form"))
    assert places(gradients) == [(0, SPEC.num_params)]
    assert places(gradients, ENDS[-1:]) == [(0, SPEC.num_params)]


def test_what_stays_as_factors_is_a_segment_of_its_own():
    assert places(operator(None)) == [(0, ENDS[1]), (ENDS[1], ENDS[2]), (ENDS[2], ENDS[3]), (ENDS[3], ENDS[-1])]


def test_cuts_make_segments_and_no_others():
    assert places(operator(Routes("form")), [ENDS[1], ENDS[3]]) == [(0, 28), (28, 57), (57, SPEC.num_params)]


@given(form_bytes=SIZES, layers=LAYERS, cuts=st.sets(st.sampled_from(ENDS)))
def test_runs_that_share_a_segment_have_the_same_products(form_bytes, layers, cuts):
    gradients = operator(Routes(layers, form_bytes=form_bytes))
    gradients.joins_runs = True
    found = places(gradients, sorted(cuts))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert cuts <= {stop for _, stop in found}
    assert_products(gradients, dense(two_passes()), sorted(cuts))


def test_runs_share_a_segment_up_to_the_most_columns(monkeypatch):
    gradients = operator(Routes("factor"))
    gradients.joins_runs = True
    assert places(gradients) == [(0, SPEC.num_params)]
    monkeypatch.setattr(factored, "MOST_JOINED", ENDS[2])
    gradients = operator(Routes("factor"))
    gradients.joins_runs = True
    assert places(gradients)[0] == (0, ENDS[2])


def test_what_does_not_fit_takes_more_than_one_segment():
    assert len(places(operator(Routes("form", form_bytes=50 * COLUMN)))) > 1
    assert len(places(operator(Routes("form", form_bytes=SPEC.num_params * COLUMN)))) == 1


def entries(table_rows: int, width: int) -> TableRows:
    return TableRows(torch.randint(table_rows, (6, 3)), randn(6, 3, width), table_rows)


# Forty columns: how they are held, so many at most, and where segments of them end.
LARGE = {
    "formed": (lambda: Formed(randn(6, 40)), 15, [15, 30, 40]),
    "outer": (lambda: Outer(randn(6, 1, 3, 8), randn(6, 1, 3, 5)), 12, [10, 20, 30, 40]),
    "outer, not one output fits": (lambda: Outer(randn(6, 1, 3, 4), randn(6, 1, 3, 10)), 1, [10, 20, 30, 40]),
    "groups": (lambda: Outer(randn(6, 2, 3, 4), randn(6, 2, 3, 5)), 12, [40]),
    "unopened": (
        lambda: Patches(randn(6, 1, 3, 4), randn(6, 12), 10, lambda x: x.unfold(1, 10, 1)[:, None]),
        29,
        [20, 40],
    ),
    "table": (lambda: entries(10, 4), 9, [8, 16, 24, 32, 40]),
    "sum": (lambda: Sum((entries(10, 4), Outer(randn(6, 1, 3, 8), randn(6, 1, 3, 5)))), 39, [20, 40]),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_tensors_are_parted_along_their_grain(name):
    make, columns, expected = LARGE[name]
    spec = ParamSpec(("before", "large", "after"), (torch.Size((3,)), torch.Size((40,)), torch.Size((2,))))
    blocks = {"before": Formed(randn(6, 3)), "large": make(), "after": Formed(randn(6, 2))}
    routes = Routes("form", form_bytes=columns * COLUMN + 7)
    gradients = FactoredGradients(spec, [RowGroup(6, blocks)], randn(1), routes)
    assert [stop - 3 for _, stop in places(gradients, [3, 43]) if 3 < stop <= 43] == expected
    assert_products(gradients, torch.cat([block.form() for block in blocks.values()], 1), [3, 43])


@pytest.mark.parametrize("layers", ["form", "factor"])
def test_no_segment_has_more_columns_than_the_most_whatever_is_formed(monkeypatch, layers):
    monkeypatch.setattr(factored, "MOST_COLUMNS", 24)
    gradients = operator(Routes(layers))
    found = places(gradients, [4 + 24])
    assert max(stop - start for start, stop in found) <= 24
    assert 28 in {stop for _, stop in found}
    assert_products(gradients, dense(two_passes()))


def count_formed(monkeypatch) -> list[int]:
    """Columns of outer products that were formed."""
    seen, real = [], Outer.form
    monkeypatch.setattr(Outer, "form", lambda self, *out: seen.append(self.num_params) or real(self, *out))
    return seen


@pytest.mark.parametrize(("form_bytes", "times"), [(1 << 28, 1), (40 * COLUMN, 2)], ids=["few", "many"])
def test_rows_are_formed_once_if_all_of_them_are_few_and_else_each_time(monkeypatch, form_bytes, times):
    gradients, seen = operator(Routes("form", form_bytes=form_bytes)), count_formed(monkeypatch)
    for _ in range(2):
        for _ in gradients.segments():
            pass
    assert sum(seen) == times * sum(SPEC.numels[k] for k in (0, 2))


def test_rows_that_are_not_kept_exist_one_segment_at_a_time():
    spec = ParamSpec(("w",), (torch.Size((64, 50)),))
    block = Outer(randn(20, 1, 2, 64), randn(20, 1, 2, 50))
    whole = 20 * 64 * 50 * 8
    routes = Routes("form", form_bytes=whole // 16)
    gradients = FactoredGradients(spec, [RowGroup(20, {"w": block})], randn(1), routes)
    assert allocated(lambda: [rows.gram().sum() for _, rows in gradients.segments()]) < whole / 4


# ---- several groups


@st.composite
def passes(draw: st.DrawFn) -> list[RowGroup]:
    """Draws and micro-batches of any size and scale; parameters may be missing in some of them."""
    torch.manual_seed(draw(st.integers(0, 99)))
    names, found = st.sets(st.sampled_from(SPEC.names)), []
    for _ in range(draw(st.integers(1, 4))):
        found.append(group(draw(st.integers(1, 3)), sorted(draw(names)), draw(st.sampled_from([1.0, 1.0, 0.5]))))
    return found


@given(groups=passes(), form_bytes=SIZES, layers=LAYERS)
def test_groups_stack_whatever_they_scale_and_skip(groups, form_bytes, layers):
    gradients, rows = operator(Routes(layers, form_bytes=form_bytes), groups), dense(groups)
    assert gradients.num_rows == gradients.height == len(rows)
    assert_products(gradients, rows, ENDS[::2])


@given(groups=passes(), factor=st.sampled_from([1.0, -0.25, 3.0]))
def test_scaling_groups_again_multiplies(groups, factor):
    gradients = operator(None, [g.scaled(factor) for g in groups])
    assert_products(gradients, factor * dense(groups))


def test_one_scale_is_left_to_the_results_and_different_ones_are_worked_in():
    both = two_passes()
    one, two = operator(None, [g.scaled(0.5) for g in both]), operator(None, [both[0], both[1].scaled(0.5)])
    assert (one.scale, two.scale) == (0.5, 1.0)
    torch.testing.assert_close(torch.cat([s.rows.form() for s in one.segments()], 1), dense(both))
    torch.testing.assert_close(torch.cat([s.rows.form() for s in two.segments()], 1), two.form())


def test_draws_of_the_weights_share_the_inputs_of_their_batch():
    images, inputs = randn(3, 2, 9), randn(3, 1, 1, 5)
    draws = [group(images=images) for _ in range(4)]
    for draw in draws:
        draw.blocks["head.weight"] = Outer(draw.blocks["head.weight"].left, inputs)
    gradients = operator(Routes("factor"), draws)
    assert gradients.blocks["head.weight"].right is inputs
    assert gradients.blocks["images"].source is images
    assert_products(gradients, dense(draws))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.5), (0.5, 3.0)])
def test_sums_are_what_autograd_added_up_where_it_is_known(scales):
    both = two_passes()
    totals = [randn(SPEC.num_params) for _ in both]
    told = [RowGroup(3, g.blocks, total).scaled(scale) for g, total, scale in zip(both, totals, scales, strict=True)]
    torch.testing.assert_close(operator(None, told).sum(), scales[0] * totals[0] + scales[1] * totals[1])
    half_told = [told[0], RowGroup(3, both[1].blocks).scaled(scales[1])]
    torch.testing.assert_close(operator(None, half_told).sum(), dense(half_told).sum(0))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_chosen_rows_stand_for_all_and_sums_are_of_all(scale):
    """Two of five examples are kept: the operator has their rows, and counts all five."""
    kept = group(2)
    totals = {name: randn(*shape) for name, shape in zip(SPEC.names, SPEC.shapes, strict=True)}
    chosen = RowGroup(5, kept.blocks, SPEC.flatten(totals), scale, num_chosen=2)
    other = RowGroup(3, group(3).blocks, SPEC.flatten(totals), 2.0)
    gradients = operator(None, [chosen, other])
    assert (gradients.num_rows, gradients.height) == (8, 5)
    torch.testing.assert_close(gradients.form(), dense([chosen, other]))
    torch.testing.assert_close(gradients.sum(), (scale + 2.0) * SPEC.flatten(totals))


def test_a_parameter_that_only_chosen_rows_miss_has_as_many_zero_rows():
    chosen = RowGroup(5, group(2, ["head.weight"]).blocks, num_chosen=2)
    other = group(3)
    rows = operator(None, [chosen, other, chosen]).form()
    assert rows.shape == (7, SPEC.num_params)
    torch.testing.assert_close(rows, dense([chosen, other, chosen]))


def test_no_gradient_at_all_is_zero():
    gradients = FactoredGradients(SPEC, [RowGroup(3, {})], randn(1))
    assert_products(gradients, torch.zeros(3, SPEC.num_params, dtype=torch.float64), ENDS)


@pytest.mark.parametrize("most", [3, 4, 6, 8, 1 << 24])
def test_parts_of_layers_that_share_a_delta_are_told_apart(monkeypatch, most):
    """Segments of a weight and its bias hold parts of the same δ, which must not be taken for one another."""
    monkeypatch.setattr(factored, "MOST_COLUMNS", most)
    left = randn(5, 1, 1, 4)
    spec = ParamSpec(("b", "w", "v", "c"), tuple(map(torch.Size, ((4,), (4, 2), (4, 3), (4,)))))
    blocks = {
        "b": Formed(left.view(5, 4)),
        "w": Outer(left, randn(5, 1, 1, 2)),
        "v": Outer(left, randn(5, 1, 1, 3)),
        "c": Formed(left.view(5, 4)),
    }
    gradients = FactoredGradients(spec, [RowGroup(5, blocks)], left, Routes(layers="factor"))
    rows = torch.cat([block.form() for block in blocks.values()], dim=1)
    assert (len(places(gradients)) == 4) is (most > 12)
    torch.testing.assert_close(products_of(gradients, left[:, 0, 0], rows)[0], rows @ rows.T)
    torch.testing.assert_close(gradients.square_sum(), rows.square().sum(0))


# ---- models


@pytest.mark.parametrize("name", ["convnet", "gpt_tied", "embedding_mlp", "lstm"])
@pytest.mark.parametrize("layers", ["form", "factor", {"*.weight": "form"}])
@pytest.mark.parametrize("form_bytes", [0, 2000, 1 << 28])
def test_models_have_the_same_gradients_by_every_route(name, layers, form_bytes):
    case = build(name)
    rows = loop_gradients(case)
    gradients = captured(case, routes=Routes(layers=layers, chunk_bytes=100, form_bytes=form_bytes))
    torch.testing.assert_close(gradients.form(), rows, rtol=1e-9, atol=1e-9)
    gram = products_of(gradients, rows[:, :1], rows[:1])[0]
    torch.testing.assert_close(gram, rows @ rows.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients.square_sum(), rows.square().sum(0), rtol=1e-9, atol=1e-9)


def test_rows_below_are_those_of_the_factor_that_is_given():
    gradients = operator(Routes("form"))
    first, second = randn(2, SPEC.num_params), randn(2, SPEC.num_params)
    for factor in (first, second, second.mul_(2)):
        for place, some in gradients.segments((), factor):
            if some.space is not None:
                torch.testing.assert_close(some.space[some.num_rows :], factor[:, place])
