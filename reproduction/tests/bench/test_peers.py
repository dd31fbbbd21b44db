"""Every peer trains on the problem it is given; those that are not installed are skipped here as in the benchmark."""

from __future__ import annotations

import pytest
import torch

from slangvi.params import ParamSpec
from slangvi_reproduction.bench import own, peers
from slangvi_reproduction.bench._measure import BASELINE, FLOOR
from slangvi_reproduction.bench.networks import Problem, mlp, vectors

PEERS = {peer.name: peer for peer in peers.PEERS}
MODULES = {"ivon": "ivon", "pyro low-rank": "pyro", "laplace, diagonal": "laplace", "laplace, last layer": "laplace"}
third_party = pytest.mark.filterwarnings("ignore")  # their warnings are not ours


def learnable() -> tuple[Problem, list[torch.nn.Module]]:
    """A problem whose labels follow from the inputs, and the models that were built for it."""
    models: list[torch.nn.Module] = []

    def build() -> torch.nn.Module:
        models.append(mlp((4, 16, 3)))
        return models[-1]

    made = vectors(build, batch=30, inputs=4, classes=3, draws=2, device="cpu")
    return Problem.of(build, made.x, made.x[:, :3].argmax(1), made.draws), models


def steps_of(name: str, problem: Problem):
    if name in MODULES:
        pytest.importorskip(MODULES[name])
    return PEERS[name].make(problem, 2) if PEERS[name].ranked else PEERS[name].make(problem)


@third_party
@pytest.mark.parametrize("name", [BASELINE, "ivon"])
def test_optimizers_lower_the_loss_of_their_model(name):
    problem, models = learnable()
    step = steps_of(name, problem)
    before = problem.loss(models[0](problem.x), problem.y)
    for _ in range(60):
        step()
    assert len(models) == 1
    assert problem.loss(models[0](problem.x), problem.y) < before - 0.01


@third_party
@pytest.mark.parametrize("name", ["bayes by backprop", "pyro low-rank"])
def test_variational_peers_lower_the_loss_at_their_mean(name, monkeypatch):
    inferred: list[torch.Tensor] = []
    plain = torch.optim.Adam

    def spy(params, **options):
        inferred.extend(params)
        return plain(inferred, **options)

    monkeypatch.setattr(torch.optim, "Adam", spy)
    problem, models = learnable()
    step = steps_of(name, problem)
    size = ParamSpec.of_module(models[0]).num_params
    loc = next(p for p in inferred if p.shape == (size,))  # the mean comes first with both

    def loss() -> torch.Tensor:
        theta = ParamSpec.of_module(models[0]).unflatten(loc.detach())
        return problem.loss(torch.func.functional_call(models[0], theta, (problem.x,)), problem.y)

    start = loss()
    for _ in range(60):
        step()
    assert loss() < start - 0.01


@third_party
@pytest.mark.parametrize("name", ["laplace, diagonal", "laplace, last layer"])
def test_laplace_fits_the_whole_batch_anew_each_time(name):
    problem, _ = learnable()
    step = steps_of(name, problem)
    step()
    first = step.func.__self__.H.clone()
    step()
    assert bool((first.diagonal() if first.ndim == 2 else first).ge(0).all())
    assert bool(first.abs().sum() > 0)
    torch.testing.assert_close(step.func.__self__.H, first)


def test_a_plain_pass_fills_gradients_and_changes_nothing():
    problem, models = learnable()
    step = PEERS[FLOOR].make(problem)
    before = [p.detach().clone() for p in models[0].parameters()]
    step()
    once = [p.grad.clone() for p in models[0].parameters()]
    step()
    for p, value, grad in zip(models[0].parameters(), before, once, strict=True):
        assert torch.equal(p, value)
        torch.testing.assert_close(p.grad, grad)


def test_the_table_gives_rows_by_device_name_and_rank():
    problem, _ = learnable()
    on_cpu, on_gpu = (peers.contenders(problem, device, ranks=(1, 8)) for device in ("cpu", "cuda"))
    assert {c.name for c in on_gpu} - {c.name for c in on_cpu} == {"adam, fused", "adam, fused, CUDA graph"}
    assert [c.settings for c in on_cpu if c.name == "pyro low-rank"] == [{"L": 1}, {"L": 8}]
    assert all(c.peer for c in on_gpu)
    assert [c.name for c in peers.contenders(problem, "cpu", names=(BASELINE, "ivon"))] == [BASELINE, "ivon"]


def test_baseline_and_floor_are_rows_of_the_table():
    assert [peer.name for peer in peers.PEERS[:2]] == [FLOOR, BASELINE]


@pytest.mark.parametrize(
    "contender",
    [
        lambda problem: own.functional(problem, 2),
        lambda problem: own.functional(problem, 2, engine="dense"),
        lambda problem: own.loop(problem, 2),
    ],
    ids=["functional", "dense", "loop"],
)
def test_slang_takes_the_same_number_of_draws_by_every_way(contender, monkeypatch):
    rows = []
    update = own.slang.update

    def spy(state, gradients, **options):
        rows.append(gradients.num_rows)
        return update(state, gradients, **options)

    monkeypatch.setattr(own.slang, "update", spy)
    monkeypatch.setattr(own.slang.SLANG, "_update", staticmethod(spy))
    problem, _ = learnable()
    entry = contender(problem)
    assert entry.settings == {"L": 2}
    assert not entry.peer
    entry.make()()
    assert rows == [30 * 2]


def test_the_compiled_step_is_for_gpus():
    assert own.compiled(learnable()[0], 2) == []
