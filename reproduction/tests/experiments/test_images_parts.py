"""What experiments on images are made of: networks, predictions, turned images, letters, and the rivals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from slangvi_reproduction.experiments import _image_scores
from slangvi_reproduction.experiments._image_learners import IMAGE_LEARNERS
from slangvi_reproduction.experiments._image_letters import letters
from slangvi_reproduction.experiments._image_networks import NETWORKS, network
from slangvi_reproduction.experiments._image_rivals import Ivon, LastLayer, Masked, last_layer_precision
from slangvi_reproduction.experiments._image_scores import predict, scores, strangeness, turned
from slangvi_reproduction.experiments._task import Task, categorical

SIZES = {"mlp": 478_410, "lenet": 61_706, "resnet": 77_562}
MLP = {"network": "mlp", "hidden": [400, 400]}
SETTINGS = {
    **{"lr": 0.05, "precision_lr": 0.05, "precision_warmup": True, "init_precision": 1e3, "bias_precision": 1.0},
    **{"adam_lr": 0.01, "adam_init_precision": 2500.0, "dropout_rate": 0.1, "ivon_lr": 0.05, "mc_samples": 2},
    **{"ivon": {"hess_init": 0.5, "beta2": 0.99}, "falls": []},
}


# ---- networks ----


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_end_in_a_linear_layer_and_leave_the_random_state_alone(name, global_rng_untouched):
    model = network(MLP | {"network": name}, seed=3)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert isinstance(model[-1], torch.nn.Linear)
    again = network(MLP | {"network": name}, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


# ---- predictions ----


class Fixed:
    def __init__(self, weights):
        self.weights, self.used = weights, 0

    def draw(self, count):
        mine = self.weights[self.used : self.used + count]
        self.used += count
        return {name: torch.stack([each[name] for each in mine]).unsqueeze(0) for name in mine[0]}


def test_predictions_are_means_over_draws_however_they_are_cut(monkeypatch, generator):
    model = network({"network": "mlp", "hidden": [6]})
    shapes = {name: p.shape for name, p in model.named_parameters()}
    weights = [{n: 0.1 * torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(5)]
    x = torch.rand(7, 1, 28, 28, generator=generator)
    each = torch.stack([torch.func.functional_call(model, w, (x,)).softmax(-1) for w in weights]).double()
    expected = -(each.mean(0) * each.mean(0).log()).sum(-1) + (each * each.log()).sum(-1).mean(0)
    for draws, rows in ((8, 2000), (2, 3)):
        monkeypatch.setattr(_image_scores, "_DRAWS", draws)
        monkeypatch.setattr(_image_scores, "_ROWS", rows)
        found = predict(model, Fixed(weights), x, 5)
        torch.testing.assert_close(found.probs, each.mean(0), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found.mutual_information, expected, rtol=1e-3, atol=1e-6)


def test_a_single_draw_has_no_mutual_information(generator):
    model = network({"network": "mlp", "hidden": [6]}, seed=0)
    one = Fixed([{name: p.detach() for name, p in model.named_parameters()}])
    found = predict(model, one, torch.rand(50, 1, 28, 28, generator=generator), 1)
    assert float(found.mutual_information.max()) == 0.0


def test_strangers_are_told_by_both_uncertainties():
    sure = _image_scores.Predicted(torch.eye(10).double(), torch.zeros(10).double())
    lost = _image_scores.Predicted(torch.full((4, 10), 0.1).double(), torch.full((4,), math.log(10)).double())
    found = strangeness(sure, lost)
    assert (found["entropy_auroc"], found["entropy_fpr95"]) == (1.0, 0.0)
    assert found["information_auroc"] == pytest.approx(0.5)  # all draws agree that they do not know
    assert scores(sure.probs, torch.arange(10))["test_error_percent"] == 0.0


# ---- images ----


def test_quarter_turns_are_those_of_rot90(generator):
    x = torch.rand(3, 1, 28, 28, generator=generator)
    for k in range(4):
        torch.testing.assert_close(turned(x, 90.0 * k), torch.rot90(x, k, (2, 3)), rtol=0, atol=1e-4)


def test_small_turns_keep_the_middle_and_empty_the_corners():
    x = torch.ones(1, 1, 28, 28)
    found = turned(x, 45.0)[0, 0]
    assert float(found[14, 14]) == pytest.approx(1.0)
    assert float(found[0, 0]) == 0.0


def test_letters_are_bright_on_dark_and_all_different(global_rng_untouched):
    found = letters(40, torch.Generator().manual_seed(1))
    assert found.shape == (40, 28, 28)
    assert float(found.min()) == 0.0
    assert float(found.max()) == 1.0
    share = (found > 0.5).float().mean((1, 2))
    assert bool(((share > 0.05) & (share < 0.5)).all())  # MNIST's digits have between 0.02 and 0.4
    assert float(torch.pdist(found.flatten(1)).min()) > 1.0
    torch.testing.assert_close(found, letters(40, torch.Generator().manual_seed(1)))


def test_the_letter_i_is_upright_in_the_middle():
    mean = letters(400, torch.Generator().manual_seed(0))[8::10].mean(0)  # every tenth is an I
    assert float(mean[10:18, 12:16].mean()) > 0.5
    assert float(mean[10:18, :7].mean()) < 0.1


# ---- rivals ----


def task(model_settings=None, members=1, **own):
    settings = SETTINGS | own
    model_settings = model_settings or {"network": "mlp", "hidden": [8]}
    model = network(model_settings)

    def starts(member):
        fresh = network(model_settings, seed=member)
        return {name: value.detach().unsqueeze(0) for name, value in fresh.named_parameters()}

    one = torch.ones(1)
    generator = torch.Generator().manual_seed(0)
    return Task(model, starts, torch.tensor([100]), one, 2.0 * one, 20, 50, settings, generator, categorical)


def batch(seed=0, size=20):
    source = torch.Generator().manual_seed(seed)
    y = torch.arange(size) % 10
    x = 0.2 * torch.rand(size, 1, 28, 28, generator=source)
    for k, label in enumerate(y.tolist()):
        x[k, 0, 2 * label : 2 * label + 3] += 0.7
    return x.unsqueeze(0), y.unsqueeze(0)


@pytest.mark.parametrize("network_name", ["lenet", "resnet"])
@pytest.mark.parametrize("method", ["slang_2", "bbb", "map", "ensemble_5", "mc_dropout", "ivon", "laplace"])
def test_every_rival_trains_networks_with_convolutions(method, network_name):
    if method == "ivon":
        pytest.importorskip("ivon")
    job = task({"network": network_name})
    learner = IMAGE_LEARNERS[method](job)
    x, y = batch()
    before = learner.draw(1)
    for _ in range(2):
        learner.step(x, y)
    if method == "laplace":
        learner.settle(x[0])
    drawn = learner.draw(3)
    assert set(drawn) == set(job.spec.names)
    assert all(value.shape[:2] == (1, 3) for value in drawn.values())
    first = job.spec.names[0]  # in a convolution, which nothing may pass over
    assert not torch.equal(drawn[first][:, 0], before[first][:, 0])
    probs = predict(job.model, learner, x[0], 3).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(20, dtype=torch.float64))


def test_map_is_torchs_adam_on_the_log_posterior():
    job = task()
    learner = Masked(job, 0.0)
    model = network({"network": "mlp", "hidden": [8]}, seed=0)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, eps=learner_eps())
    for k in range(5):
        x, y = batch(k)
        learner.step(x, y)
        opt.zero_grad()
        decay = sum((2.0 if p.ndim > 1 else 1.0) * p.square().sum() / 2 for p in model.parameters())
        (100 * F.cross_entropy(model(x[0]), y[0]) + decay).backward()
        opt.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    momentum = torch.cat([opt.state[p]["exp_avg"].flatten() for p in model.parameters()])
    torch.testing.assert_close(learner.kept["momentum"][0], momentum, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(learner.kept["loc"][0], expected, rtol=1e-4, atol=1e-6)


def learner_eps() -> float:
    from slangvi.methods._adam import EPS

    return EPS


def test_dropout_spares_the_image_and_drops_the_rest():
    learner = Masked(task(), 0.5)
    drawn = learner.draw(200)
    first, second = (drawn[name][0] for name in ("1.weight", "3.weight"))
    assert float((first == 0).float().mean()) == 0.0
    assert float((second[:, 0] == 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert learner.draws == 2
    assert Masked(task(), 0.0).draws == 1


def test_ivon_is_its_own_loop_and_its_draws_have_its_density():
    pytest.importorskip("ivon")
    job = task(ivon={"hess_init": 0.5, "beta2": 0.99})
    learner = Ivon(job)
    for k in range(20):
        learner.step(*batch(k))
    group = learner.group
    draws = torch.cat([value.flatten(2) for value in learner.draw(4000).values()], -1)[0]
    loc = torch.cat([p.detach().flatten() for p in learner.loc.parameters()])
    scale = (100 * (group["hess"] + 0.02)).rsqrt()
    assert float(((draws.mean(0) - loc).abs() / scale).max()) < 6 / math.sqrt(4000)
    np.testing.assert_allclose(draws.std(0), scale, rtol=0.09)


def test_ivon_goes_on_from_its_arrays():
    pytest.importorskip("ivon")
    whole, job = Ivon(task()), task()
    for k in range(4):
        whole.step(*batch(k))
    part = Ivon(job)
    for k in range(2):
        part.step(*batch(k))
    again = Ivon(job)
    again.restore(part.arrays())
    for k in range(2, 4):
        again.step(*batch(k))
    for name, value in whole.arrays().items():
        np.testing.assert_array_equal(value, again.arrays()[name])


def test_ivon_leaves_torchs_source_alone():
    pytest.importorskip("ivon")
    before = torch.get_rng_state()
    Ivon(task()).step(*batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_without_ivon_its_package_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ivon", None)
    with pytest.raises(ImportError, match=r"IVON is a package of its own: pip install 'slangvi\[rivals\]'"):
        Ivon(task())


def test_last_layer_precision_is_the_hessian_of_the_log_posterior():
    job = task({"network": "mlp", "hidden": [3]})
    x, y = (value[0] for value in batch(size=15))
    spec = job.spec
    loc = job.loc[0].double()
    params = {name: value.double() for name, value in spec.unflatten(loc).items()}
    features = F.linear(x.flatten(1).double(), params["1.weight"], params["1.bias"]).relu()

    def energy(last):
        wide = last.view(10, 4)
        logits = features @ wide[:, :3].mT + wide[:, 3]
        prior = (2.0 * wide[:, :3].square().sum() + 1.0 * wide[:, 3].square().sum()) / 2
        return F.cross_entropy(logits, y, reduction="sum") + prior

    last = torch.cat([params["3.weight"], params["3.bias"].unsqueeze(1)], 1).flatten()
    expected = torch.autograd.functional.hessian(energy, last)
    found = last_layer_precision(job, job.loc[0], x, rows=4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_laplace_draws_have_the_covariance_it_found():
    job = task({"network": "mlp", "hidden": [3]})
    learner = LastLayer(job)
    x, _ = batch()
    learner.settle(x[0])
    assert learner.factor is not None
    drawn = learner.draw(20_000)
    wide = torch.cat([drawn["3.weight"], drawn["3.bias"].unsqueeze(-1)], -1)[0].flatten(1).double()
    covariance = torch.cholesky_inverse(learner.factor)
    start = job.starts(0)
    mean = torch.cat([start["3.weight"], start["3.bias"].unsqueeze(-1)], -1)[0].flatten().double()
    spread = covariance.diagonal().sqrt()
    assert float(((wide.mean(0) - mean).abs() / spread).max()) < 5 / math.sqrt(20_000)
    error = (wide.T.cov() - covariance).abs() / spread.outer(spread)
    assert float(error.max()) < 6 / math.sqrt(20_000)
    assert torch.equal(drawn["1.weight"][0, 0], start["1.weight"][0])  # the rest of the network stays
