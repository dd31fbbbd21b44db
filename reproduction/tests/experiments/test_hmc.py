"""HMC: the motion is reversible and keeps its volume, and chains find what is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slangvi_reproduction.experiments import _hmc

PRECISION = torch.tensor([[4.0, 1.8, 0.0], [1.8, 1.0, 0.1], [0.0, 0.1, 0.5]], dtype=torch.float64)
CENTRE = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def gaussian(theta):
    away = theta - CENTRE
    return -0.5 * ((away @ PRECISION) * away).sum(-1)


def bent(theta):
    """No Gaussian, and not even smooth."""
    return -0.25 * theta[:, 0] ** 4 - (theta[:, 1] - theta[:, 0].relu()).square() - 0.5 * theta[:, 2].square()


def somewhere(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 3, generator=generator, dtype=torch.float64)


def follow(log_density, theta, momentum, step, count):
    chains = _hmc.begin(log_density, theta)
    return _hmc.leapfrog(log_density, theta, chains.gradient, momentum, step, count)


def run(log_density, chains, draws, generator, longest=8, **options):
    kept = []
    for _ in range(draws):
        chains = _hmc.advance(log_density, chains, longest, generator, **options)
        kept.append(chains.theta)
    return chains, torch.stack(kept, 1)


def warm(count, seed):
    generator = torch.Generator().manual_seed(seed)
    start = 5.0 * torch.randn(count, 3, generator=generator, dtype=torch.float64)
    chains, _ = run(gaussian, _hmc.begin(gaussian, start), 300, generator, target=0.8)
    return chains, generator


@pytest.mark.parametrize("log_density", [gaussian, bent])
def test_the_motion_runs_back_to_where_it_began(log_density):
    theta, momentum = somewhere(5)
    step = torch.full((5, 1), 0.1, dtype=torch.float64)
    there, density, gradient, fast = follow(log_density, theta, momentum, step, 7)
    assert bool(((there - theta).abs().amax(1) > 0.1).all())
    torch.testing.assert_close(density, log_density(there))
    back, _, _, slow = _hmc.leapfrog(log_density, there, gradient, -fast, step, 7)
    torch.testing.assert_close(back, theta)
    torch.testing.assert_close(-slow, momentum)


def test_the_motion_keeps_its_volume():
    theta, momentum = somewhere(1)
    step = torch.full((1, 1), 0.3, dtype=torch.float64)

    def flow(point):
        there, _, _, fast = follow(gaussian, point[None, :3], point[None, 3:], step, 4)
        return torch.cat([there[0], fast[0]])

    # Through the gradient inside no derivative is taken, so that the map is differentiated by differences.
    point, size = torch.cat([theta[0], momentum[0]]), 1e-4
    columns = [(flow(point + size * unit) - flow(point - size * unit)) / (2 * size) for unit in torch.eye(6).double()]
    assert float(torch.linalg.det(torch.stack(columns, 1))) == pytest.approx(1.0, abs=1e-6)


def test_the_error_of_the_energy_falls_with_the_square_of_the_step():
    theta, momentum = somewhere(50)
    errors = []
    for step, count in ((0.1, 10), (0.05, 20)):
        sizes = torch.full((50, 1), step, dtype=torch.float64)
        _, density, _, fast = follow(gaussian, theta, momentum, sizes, count)
        before = gaussian(theta) - 0.5 * momentum.square().sum(1)
        errors.append(float((density - 0.5 * fast.square().sum(1) - before).abs().mean()))
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.1)


def test_chains_find_mean_and_covariance_of_a_correlated_gaussian():
    chains, generator = warm(40, seed=1)
    _, draws = run(gaussian, chains, 1500, generator)
    flat = draws.flatten(0, 1)
    covariance = torch.linalg.inv(PRECISION)
    scale = covariance.diagonal().sqrt()
    assert bool(((flat.mean(0) - CENTRE).abs() < 0.05 * scale).all())
    assert bool(((flat.T.cov() - covariance).abs() < 0.06 * scale * scale[:, None]).all())
    assert float(_hmc.split_rhat(draws).max()) < 1.02


def test_a_density_that_is_not_smooth_is_found_too():
    generator = torch.Generator().manual_seed(2)
    chains, _ = run(bent, _hmc.begin(bent, torch.zeros(60, 3, dtype=torch.float64)), 300, generator, target=0.8)
    _, draws = run(bent, chains, 1000, generator)
    x = torch.linspace(-4, 4, 4001, dtype=torch.float64)
    weight = (-0.25 * x**4).exp()
    second = float((x.square() * weight).sum() / weight.sum())
    middle = float((x.relu() * weight).sum() / weight.sum())
    assert float(draws[..., 0].square().mean()) == pytest.approx(second, rel=0.04)
    assert float(draws[..., 1].mean()) == pytest.approx(middle, abs=0.03)


@pytest.mark.parametrize("target", [0.6, 0.9])
@pytest.mark.parametrize("step", [1e-3, 3.0])
def test_step_sizes_bring_about_the_wanted_acceptance(target, step):
    """In fifty dimensions, where acceptance falls smoothly with the step; in few it drops where the motion breaks."""
    normal = lambda theta: -0.5 * theta.square().sum(1)  # noqa: E731
    generator = torch.Generator().manual_seed(3)
    start = _hmc.begin(normal, torch.zeros(20, 50, dtype=torch.float64), step)
    chains, _ = run(normal, start, 400, generator, target=target)
    sizes = chains.adaptation.average
    seen = []
    for _ in range(200):
        chains = _hmc.advance(normal, chains, 8, generator)
        seen.append(chains.acceptance)
    assert float(torch.stack(seen).mean()) == pytest.approx(target, abs=0.07)
    assert chains.adaptation.average is sizes, "it is fixed after warming up"


def test_chains_have_step_sizes_of_their_own():
    wide = torch.tensor([1.0, 100.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    normal = lambda theta: -0.5 * (theta / wide[:, None]).square().sum(1)  # noqa: E731
    start = _hmc.begin(normal, torch.ones(2, 3, dtype=torch.float64))
    chains, _ = run(normal, start, 800, generator, target=0.8)
    small, large = chains.adaptation.average.exp().tolist()
    assert 30 < large / small < 300


def test_a_trajectory_that_leaves_the_numbers_is_refused():
    def walled(theta):
        return torch.where(theta[:, 0] > 0, torch.nan, -0.5 * theta.square().sum(1))

    generator = torch.Generator().manual_seed(5)
    chains = _hmc.begin(walled, torch.full((50, 2), -0.5, dtype=torch.float64), step=0.5)
    chains, draws = run(walled, chains, 30, generator)
    assert bool((draws[..., 0] <= 0).all())
    assert bool(torch.isfinite(chains.density).all())
    assert float(chains.acceptance.min()) == 0.0


def test_chains_do_not_look_at_each_other():
    """What one chain does depends on its own numbers: density, gradient and step size."""
    chains, generator = warm(6, seed=6)
    state = generator.get_state()
    alike = _hmc.advance(gaussian, chains, 8, generator)
    generator.set_state(state)
    theta = chains.theta.clone()
    theta[3:] += 100.0
    density, gradient = gaussian(theta), -(theta - CENTRE) @ PRECISION
    moved = _hmc.advance(gaussian, replace(chains, theta=theta, density=density, gradient=gradient), 8, generator)
    torch.testing.assert_close(moved.theta[:3], alike.theta[:3])


def test_rhat_tells_chains_that_differ_and_chains_that_drift():
    generator = torch.Generator().manual_seed(7)
    same = torch.randn(8, 400, 2, generator=generator)
    assert float((_hmc.split_rhat(same) - 1).abs().max()) < 0.02
    apart = same + torch.tensor([0.0, 1.0]) * torch.arange(8).view(-1, 1, 1)
    drifting = same + torch.tensor([0.0, 3.0]) * torch.linspace(0, 1, 400).view(1, -1, 1)
    for bad in (apart, drifting):
        first, second = _hmc.split_rhat(bad).tolist()
        assert first < 1.02
        assert second > 1.2
