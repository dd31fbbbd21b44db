"""The three routes to the best rank-L factor: the same result, an honest residual, and a choice by counted cost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slangvi.grads import DenseGradients, FactoredGradients, RowGroup
from slangvi.grads.blocks import Formed, Outer
from slangvi.linalg import Problem, choose_route, krylov, top_factor, topk
from slangvi.linalg.subspace import OVERSAMPLING
from slangvi.params import ParamSpec
from slangvi.types import Routes

ROUTES = ["gram", "randomized", "parameters"]
SPEC = ParamSpec(("w", "b", "v"), tuple(map(torch.Size, ((8, 9), (8,), (20,)))))
R, RANK = 60, 3


def operators(dtype: torch.dtype, decay: float) -> tuple[Tensor, dict[str, DenseGradients | FactoredGradients]]:
    """U, and one set of gradients held as rows and as factors; `decay` sets their sizes apart."""
    source = torch.Generator().manual_seed(0)
    sizes = decay ** torch.arange(R, dtype=torch.float64)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=source)

    left = randn(R, 1, 1, 8) * sizes[:, None, None, None]
    right, free = randn(R, 1, 1, 9), randn(R, 20) * sizes[:, None]
    parts = {"w": Outer(left.to(dtype), right.to(dtype)), "b": Formed(left.view(R, 8).to(dtype))}
    group = RowGroup(R, parts | {"v": Formed(free.to(dtype))}, {})
    factored = FactoredGradients(SPEC, [group], RANK, torch.empty(0, dtype=dtype), Routes(layers="factor"))
    dense = DenseGradients.from_rows(factored.form(), SPEC.numels)
    return randn(RANK, SPEC.num_params).to(dtype), {"dense": dense, "factored": factored}


def weights(dtype: torch.dtype, uniform: bool) -> tuple[float | Tensor, float | Tensor, Tensor | None]:
    """keep, gain and the gain per tensor."""
    if uniform:
        return 0.9, 0.5, None
    beta = torch.tensor([0.1, 0.3, 0.05], dtype=dtype)
    column = SPEC.expand(beta.tolist(), beta)
    return 1 - column, 5 * column, 5 * beta


def truth(factor: Tensor, rows: Tensor, keep: float | Tensor, gain: float | Tensor) -> tuple[Tensor, Tensor]:
    """Leading eigenvalues of A, and its best approximation."""
    wide = torch.ones(factor.shape[1], dtype=torch.float64)
    U, G = factor.double() * (keep * wide).sqrt(), rows.double() * (gain * wide).sqrt()
    values, vectors = torch.linalg.eigh(U.T @ U + G.T @ G)
    return values[-RANK:].flip(0), (vectors[:, -RANK:] * values[-RANK:]) @ vectors[:, -RANK:].T


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", [1e-15, 1e8, 1e12])
def test_every_route_takes_gradients_whose_squares_fit_the_dtype(route, size):
    """Their fourth powers need not: products K (K X) are 1e60 in size here, or 1e-60."""
    factor, kinds = operators(torch.float32, 0.8)
    rows = kinds["dense"].form()
    top = top_factor(factor * size, DenseGradients.from_rows(rows * size), 0.9, 0.5, route=route)
    values, low = truth(factor, rows, 0.9, 0.5)
    torch.testing.assert_close(top.spectrum.double() / size**2, values, rtol=1e-4, atol=0)
    found = top.factor.double() / size
    assert float((found.T @ found - low).norm() / low.norm()) <= 1e-4


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_route_leads_to_the_same_factor(route, kind, uniform, dtype):
    factor, gradients = operators(dtype, 0.8)
    keep, gain, per_tensor = weights(dtype, uniform)
    values, best = truth(factor, gradients["dense"].form(), keep, gain)
    top = top_factor(factor, gradients[kind], keep, gain, per_tensor, route)
    tolerance = (1e-5 if dtype is torch.float32 else 1e-11) * float(values[0])
    torch.testing.assert_close(top.spectrum.double(), values, rtol=0, atol=tolerance)
    new = top.factor.double()
    torch.testing.assert_close(new.T @ new, best, rtol=0, atol=tolerance)
    if route == "parameters":
        assert float(top.residual) == 0.0


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("uniform", [True, False])
def test_what_the_randomized_route_reports_bounds_its_error(kind, uniform, monkeypatch):
    """Also where it is allowed to stop early, so that there is an error to speak of."""
    factor, gradients = operators(torch.float64, 0.9)
    keep, gain, per_tensor = weights(torch.float64, uniform)
    values, _ = truth(factor, gradients["dense"].form(), keep, gain)
    seen = []
    for allowed in (1e-2, 1e-4, 1e-6):
        monkeypatch.setitem(topk._APPLIED_TOLERANCE, torch.float64, allowed)
        top = top_factor(factor, gradients[kind], keep, gain, per_tensor, "randomized")
        seen.append(float(top.residual))
        assert 0.0 < seen[-1] <= allowed
        assert float((top.spectrum - values).abs().max()) <= seen[-1] * float(values[0])
    assert seen[0] > seen[2]


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("uniform", [True, False])
def test_the_randomized_route_forms_the_gram_when_it_does_not_converge(kind, uniform, monkeypatch):
    factor, gradients = operators(torch.float64, 1.0)
    options = weights(torch.float64, uniform)
    monkeypatch.setattr(topk, "_APPLIED_LOOKS", 1)
    problem = Problem(factor, gradients[kind], *options, "randomized")
    pairs, expected = problem.pairs(), Problem(factor, gradients[kind], *options, "gram").pairs()
    assert float(pairs.residual) == 0.0
    assert torch.equal(pairs.values, expected.values)
    # The pairs fit the problem they were asked of: its own recombination gives the factor.
    new, old = problem.solution(*pairs[:2]), top_factor(factor, gradients[kind], *options, "gram").factor
    torch.testing.assert_close(new.T @ new, old.T @ old, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("uniform", [True, False])
def test_applying_the_small_matrix_is_multiplying_by_it(kind, uniform):
    factor, gradients = operators(torch.float64, 0.9)
    options = weights(torch.float64, uniform)
    block = torch.randn(RANK + R, 4, dtype=torch.float64)
    formed = Problem(factor, gradients[kind], *options, "gram")
    applied = Problem(factor, gradients[kind], *options, "randomized")
    torch.testing.assert_close(applied.apply(block), formed.matrix @ block)
    torch.testing.assert_close(formed.apply(block), formed.matrix @ block)
    assert applied.known == RANK
    assert Problem(factor, gradients[kind], *options, "parameters").known == 0


@dataclass
class Counted:
    """An operator known by its counts alone."""

    num_rows: int
    costs: tuple[int, int]
    spectrum_route: str = "auto"


# What the randomized route counts for one unit of column cost.
PRODUCTS = 2 * (krylov.STEPS + 1) * (RANK + OVERSAMPLING)


@pytest.mark.parametrize(
    ("params", "rows", "costs", "wish", "dtype", "route"),
    [
        (1000, 100, (PRODUCTS * 10 - 1, 10), "auto", torch.float32, "gram"),
        (1000, 100, (PRODUCTS * 10 + 1, 10), "auto", torch.float32, "randomized"),
        (1000, 100, (PRODUCTS * 10 + 1, 10), "auto", torch.float64, "gram"),  # its tolerance would not be reached
        (1000, 100, (PRODUCTS * 10 + 1, 10), "gram", torch.float32, "gram"),
        (1000, 100, (1, 10), "randomized", torch.float32, "randomized"),
        (1000, 100, (1, 10), "randomized", torch.float64, "randomized"),
        (1000, 10, (10**9, 1), "auto", torch.float32, "gram"),  # too small for an iteration
        (1000, 10, (10**9, 1), "randomized", torch.float32, "gram"),
        (100, 100, (1, 1), "auto", torch.float32, "parameters"),
        (100, 100, (1, 1), "randomized", torch.float32, "parameters"),
        (100, 100, (1, 1), "gram", torch.float32, "gram"),
    ],
)
def test_the_route_is_chosen_by_counted_cost_or_by_wish(params, rows, costs, wish, dtype, route):
    assert choose_route(torch.zeros(RANK, params, dtype=dtype), Counted(rows, costs, wish)) == route


def test_batches_of_problems_form_their_grams():
    assert choose_route(torch.zeros(2, RANK, 1000), Counted(100, (10**9, 1))) == "gram"


@pytest.mark.parametrize("wish", ["auto", "gram", "randomized"])
def test_wishes_reach_the_choice_through_the_operator(wish):
    group = RowGroup(40, {"v": Formed(torch.randn(40, 20))}, {})  # fewer rows than products: the Gram counts less
    gradients = FactoredGradients(SPEC, [group], RANK, torch.empty(0), Routes(spectrum=wish))
    assert choose_route(torch.zeros(RANK, SPEC.num_params), gradients) == ("gram" if wish == "auto" else wish)
