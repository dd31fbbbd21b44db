"""Hessians by automatic differentiation, against formulas and against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slangvi
from helpers.logistic_runs import log_likelihood, logistic
from slangvi.errors import UnsupportedModuleError
from slangvi.methods import mean_field
from slangvi.methods._build import hessian_gatherer
from slangvi.params import ParamSpec
from slangvi.rows import dense


@pytest.mark.parametrize("shared", [8 << 20, 0], ids=["one pass", "draw by draw"])
@pytest.mark.parametrize("P", [3, 70])  # more than are computed at once
def test_logistic_regression_has_its_analytic_hessian(P, shared, monkeypatch):
    monkeypatch.setattr(dense, "_SHARED_BYTES", {"cpu": shared})
    batch = logistic(20, P)
    thetas = torch.randn(4, P, dtype=torch.float64)
    p = (thetas @ batch[0].T).sigmoid()
    expected = torch.einsum("sm,mp,mq->pq", p * (1 - p), batch[0], batch[0])
    spec = ParamSpec.of({"w": thetas[0]})
    torch.testing.assert_close(hessian_gatherer(log_likelihood, diagonal=False)(spec, thetas, batch), expected)
    torch.testing.assert_close(
        hessian_gatherer(log_likelihood, diagonal=True)(spec, thetas, batch), expected.diagonal()
    )


def test_a_network_has_the_hessian_torch_finds():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    batch = (torch.randn(6, 2).double(), torch.arange(6) % 3)
    likelihood = slangvi.Categorical().of(model)
    spec = ParamSpec.of_module(model)
    theta = spec.flatten(dict(model.named_parameters())).detach()
    expected = torch.autograd.functional.hessian(lambda flat: -likelihood(spec.unflatten(flat), batch).sum(), theta)
    found = hessian_gatherer(likelihood, diagonal=False)(spec, theta.unsqueeze(0), batch)
    torch.testing.assert_close(found, expected)


def test_what_vmap_cannot_follow_goes_draw_by_draw():
    """Weights go into a tensor made here, which vmap over draws refuses."""

    def written(params, batch):
        weight = torch.zeros(3, dtype=torch.float64)
        weight += params["w"]
        return log_likelihood({"w": weight}, batch)

    batch, thetas = logistic(20, 3), torch.randn(4, 3, dtype=torch.float64)
    spec = ParamSpec.of({"w": thetas[0]})
    found, expected = (hessian_gatherer(f, diagonal=False)(spec, thetas, batch) for f in (written, log_likelihood))
    torch.testing.assert_close(found, expected)


def test_what_does_not_bend_has_no_hessian():
    spec = ParamSpec.of({"w": torch.zeros(2), "unused": torch.zeros(3)})
    found = hessian_gatherer(lambda p, b: b @ p["w"], diagonal=False)
    assert not found(spec, torch.ones(2, 5), torch.ones(4, 2)).any()


def test_no_gradients_are_left_behind_and_none_are_needed():
    batch, theta = logistic(5, 2), torch.zeros(1, 2, dtype=torch.float64)
    spec = ParamSpec.of({"w": theta[0]})
    with torch.no_grad():
        found = hessian_gatherer(log_likelihood, diagonal=False)(spec, theta, batch)
    assert not found.requires_grad
    torch.testing.assert_close(found, batch[0].T @ batch[0] / 4)


def test_half_precision_models_are_called_in_their_own_dtype():
    model = nn.Linear(2, 1).bfloat16()
    vi = slangvi.full.build(slangvi.Gaussian(1.0).of(model), num_data=2, lr=1.0, model=model, curvature="hessian")
    state = vi.init(dict(model.named_parameters()))
    batch = (torch.tensor([[1.0, 0.0], [1.0, 2.0]]).bfloat16(), torch.zeros(2, 1).bfloat16())
    state, _ = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
    assert state.prec_matrix.dtype is torch.float32
    expected = torch.tensor([[2.0, 2.0, 2.0], [2.0, 4.0, 2.0], [2.0, 2.0, 2.0]]) + torch.eye(3)
    torch.testing.assert_close(state.prec_matrix, expected)


class _Once(torch.autograd.Function):
    """A square with a first derivative only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("derivative for aten::once is not implemented.")


def test_operations_without_second_derivatives_are_refused():
    found = hessian_gatherer(lambda p, b: _Once.apply(b @ p["w"]), diagonal=True)
    with pytest.raises(UnsupportedModuleError, match=r'needs second derivatives.*Use curvature="ef"'):
        found(ParamSpec.of({"w": torch.zeros(2)}), torch.zeros(1, 2), torch.ones(3, 2))


def test_other_errors_come_through():
    found = hessian_gatherer(lambda p, b: b @ p["w"], diagonal=True)
    with pytest.raises(RuntimeError, match=r"size mismatch|must match|mat1"):
        found(ParamSpec.of({"w": torch.zeros(2)}), torch.zeros(1, 2), torch.ones(3, 5))


def test_unknown_curvatures_are_refused():
    with pytest.raises(ValueError, match=r"curvature must be one of 'auto', 'ef', .*, got 'gnn'"):
        mean_field.build(log_likelihood, num_data=3, lr=0.1, curvature="gnn")
