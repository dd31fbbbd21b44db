"""Gradients through one linear predictor against the M·S rows themselves, and against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import slangvi
from slangvi.rows.linear_predictor import LinearPredictorGradients

shapes = {
    "batch": st.sampled_from([(), (3,), (2, 1)]),
    "M": st.integers(1, 5),
    "S": st.integers(1, 4),
    "P": st.integers(1, 6),
    "seed": st.integers(0, 100),
}


def make(batch: tuple[int, ...], M: int, S: int, P: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes = ((*batch, M, P), (*batch, S, M), (*batch, S, M))
    x, slopes, curvatures = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
    return x, slopes, curvatures


def all_rows(x: Tensor, slopes: Tensor) -> Tensor:
    """Every gradient r_is x_i, (..., S·M, P)."""
    return (slopes.unsqueeze(-1) * x.unsqueeze(-3)).flatten(-3, -2)


@given(**shapes)
def test_sums_and_moments_are_those_of_all_rows(batch, M, S, P, seed):
    x, slopes, _ = make(batch, M, S, P, seed)
    gradients, rows = LinearPredictorGradients(x, slopes), all_rows(x, slopes)
    assert gradients.num_rows == M * S
    assert gradients.height == M
    torch.testing.assert_close(gradients.sum(), rows.sum(-2))
    torch.testing.assert_close(gradients.square_sum(), rows.square().sum(-2))
    torch.testing.assert_close(gradients.form().mT @ gradients.form(), rows.mT @ rows)


@given(**shapes)
def test_products_are_those_of_the_merged_rows(batch, M, S, P, seed):
    x, slopes, _ = make(batch, M, S, P, seed)
    gradients = LinearPredictorGradients(x, slopes)
    formed = gradients.form()
    others = torch.randn(*batch, 2, P, dtype=torch.float64)
    weights = torch.randn(*batch, M, 2, dtype=torch.float64)
    assert formed.shape == (*batch, M, P)
    torch.testing.assert_close(gradients.gram(), formed @ formed.mT)
    torch.testing.assert_close(gradients.mm(others), formed @ others.mT)
    torch.testing.assert_close(gradients.t_mm(weights), weights.mT @ formed)
    expected = weights.mT @ formed + others
    gradients.add_t_mm(weights, others)
    torch.testing.assert_close(others, expected)


@given(**shapes, cuts=st.sets(st.integers(1, 6)))
def test_segments_between_cuts_make_up_all_columns(batch, M, S, P, seed, cuts):
    x, slopes, _ = make(batch, M, S, P, seed)
    gradients, rows = LinearPredictorGradients(x, slopes), all_rows(x, slopes)
    weights = torch.randn(*batch, M, 2, dtype=torch.float64)
    onto, others = torch.zeros(*batch, 2, P).double(), torch.randn(*batch, 3, P).double()
    gram, product, stops = torch.zeros(*batch, M, M).double(), torch.zeros(*batch, M, 3).double(), []
    for place, some in gradients.segments(sorted(cuts)):
        assert place.start == (stops[-1] if stops else 0)
        stops.append(place.stop)
        assert (some.height, some.num_rows) == (M, M * S)
        torch.testing.assert_close(some.form(), gradients.form()[..., place])
        torch.testing.assert_close(some.sum(), rows.sum(-2)[..., place])
        torch.testing.assert_close(some.square_sum(), rows.square().sum(-2)[..., place])
        some.add_t_mm(weights, onto[..., place])
        gram += some.gram()
        product += some.mm(others[..., place])
    assert stops == sorted({cut for cut in cuts if cut < P} | {P})
    torch.testing.assert_close(onto, gradients.t_mm(weights))
    torch.testing.assert_close(gram, gradients.gram())
    torch.testing.assert_close(product, gradients.mm(others))


@given(**shapes)
def test_hessians_are_sums_of_outer_products(batch, M, S, P, seed):
    x, slopes, curvatures = make(batch, M, S, P, seed)
    gradients = LinearPredictorGradients(x, slopes, curvatures)
    expected = torch.einsum("...sm,...mp,...mq->...pq", curvatures, x, x)
    torch.testing.assert_close(gradients.hessian(), expected)
    torch.testing.assert_close(gradients.hessian_diag(), expected.diagonal(dim1=-2, dim2=-1))


def test_no_route_is_wished_for():
    x, slopes, _ = make((2,), 4, 3, 5, 0)
    gradients = LinearPredictorGradients(x, slopes)
    assert gradients.spectrum_route == "auto"


def test_without_cuts_the_whole_is_its_own_segment():
    x, slopes, curvatures = make((2,), 4, 3, 5, 0)
    gradients = LinearPredictorGradients(x, slopes, curvatures)
    ((place, some),) = gradients.segments([5])
    assert place == slice(0, 5)
    assert some is gradients
    assert gradients.scale == 1.0


def test_slopes_and_curvatures_of_a_bernoulli_are_its_derivatives():
    x, _, _ = make((), 4, 1, 3, 0)
    thetas, y = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)

    def negative(theta: Tensor) -> Tensor:
        return -slangvi.Bernoulli().log_prob(x @ theta, y).sum()

    probability = (thetas @ x.mT).sigmoid()
    gradients = LinearPredictorGradients(x, probability - y, probability * (1 - probability))
    torch.testing.assert_close(gradients.sum(), sum(torch.func.grad(negative)(theta) for theta in thetas))
    second = torch.func.jacrev(torch.func.grad(negative))
    torch.testing.assert_close(gradients.hessian(), sum(second(theta) for theta in thetas))


@pytest.mark.parametrize(
    ("inputs", "slopes"),
    [((4, 3), (4,)), ((4, 3), (2, 3)), ((3,), (2, 3)), ((2, 4, 3), (3, 5, 4)), ((2, 4, 3), (5, 4))],
)
def test_shapes_that_do_not_fit_are_refused(inputs, slopes):
    with pytest.raises(ValueError, match=r"slopes must have shape \(\.\.\., S, M\) for inputs of shape .* got"):
        LinearPredictorGradients(torch.zeros(inputs), torch.zeros(slopes))
    if len(inputs) > 1:
        fine = torch.zeros(*inputs[:-2], 2, inputs[-2])
        with pytest.raises(ValueError, match="curvatures must have shape"):
            LinearPredictorGradients(torch.zeros(inputs), fine, torch.zeros(slopes))


def test_a_hessian_without_curvatures_is_refused():
    gradients = LinearPredictorGradients(torch.ones(2, 3), torch.ones(1, 2))
    for ask in (gradients.hessian, gradients.hessian_diag):
        with pytest.raises(ValueError, match=r"hessian needs curvatures, got None\. Pass curvatures="):
            ask()
