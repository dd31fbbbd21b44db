"""The plan against the truth: every byte that torch's CPU allocator gave out while real steps ran."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slangvi
from helpers.allocated_bytes import allocated
from slangvi.linalg.topk import TOLERANCE

# Plan over truth. Where an iteration for eigenvectors converges, steps take less than planned: see the slow test.
BAND = (0.97, 1.2)
# Steps that are compared: so many until the length of a step is measured for the first time, which takes more.
STEPS_TAKEN = 8


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.words(x)).mean(1))


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(64, 64)


def convnet() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)]
    return nn.Sequential(*layers), torch.randn(32, 3, 8, 8)


def encoder() -> tuple[nn.Module, Tensor]:
    return Encoder(), torch.randint(100, (12, 20))


MODELS = {"mlp": mlp, "convnet": convnet, "encoder": encoder}


def by_optimizer(model: nn.Module, x: Tensor, y: Tensor, rank: int, draws: int, **options: object) -> None:
    opt = slangvi.SLANG(model, num_data=1000, rank=rank, init_precision=100.0, **options)
    for _ in range(STEPS_TAKEN):
        for _ in range(draws):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
        opt.step()


def by_function(model: nn.Module, x: Tensor, y: Tensor, rank: int, draws: int, **options: object) -> None:
    options = {"curvature": "ef"} | {name: value for name, value in options.items() if name != "likelihood"}
    vi = slangvi.slang.build(
        slangvi.Categorical().of(model),
        num_data=1000,
        rank=rank,
        lr=0.05,
        mc_samples=draws,
        init_precision=100.0,
        model=model,
        **options,
    )
    state = vi.init(dict(model.named_parameters()))
    for _ in range(STEPS_TAKEN):
        state, _ = vi.update(state, (x, y))


STEPS = {"optimizer": by_optimizer, "functional": by_function}


def test_the_measure_counts_what_is_alive_at_once():
    def run() -> None:
        x = torch.zeros(1000)
        y = x + 1
        del x
        torch.zeros(500)
        del y

    assert 8000 <= allocated(run) < 8100  # and a few numbers beside


def compare(name: str, interface: str, rank: int, draws: int, **options: object) -> float:
    model, x = MODELS[name]()
    y = torch.arange(len(x)) % 10
    plan = slangvi.estimate_memory(model, (x, y), rank, draws, interface=interface, **options)
    truth = allocated(lambda: STEPS[interface](copy.deepcopy(model), x.clone(), y.clone(), rank, draws, **options))
    return plan.peak / truth


@pytest.mark.parametrize(
    ("name", "interface", "rank", "draws", "options"),
    [
        ("mlp", "optimizer", 0, 1, {}),
        ("mlp", "functional", 8, 4, {}),
        ("mlp", "optimizer", 1, 1, {"engine": "dense"}),
        ("convnet", "functional", 1, 4, {"verify": False}),
        ("convnet", "optimizer", 8, 1, {"memory_limit": 2_000_000}),
        ("encoder", "optimizer", 8, 1, {}),
        ("mlp", "optimizer", 8, 1, {"curvature_rows": 8}),
        ("mlp", "functional", 1, 2, {"curvature_rows": 8}),
        ("convnet", "optimizer", 8, 2, {"curvature_rows": 8}),
        ("encoder", "functional", 8, 1, {"curvature_rows": 4}),
    ],
)
def test_the_plan_is_near_what_steps_take(name, interface, rank, draws, options):
    assert BAND[0] <= compare(name, interface, rank, draws, **options) <= BAND[1]


GGN = {"curvature": "ggn", "likelihood": "categorical"}
FISHER = {"curvature": "fisher", "likelihood": "categorical"}


@pytest.mark.parametrize(
    ("name", "interface", "rank", "draws", "options"),
    [
        ("mlp", "optimizer", 8, 2, {**GGN, "curvature_rows": 8}),
        ("mlp", "functional", 8, 1, {**GGN, "curvature_rows": 4}),
        ("convnet", "optimizer", 2, 1, {**GGN, "curvature_rows": 4}),
        ("encoder", "functional", 1, 1, {**FISHER, "curvature_rows": 4}),
        ("encoder", "optimizer", 8, 1, FISHER),
        ("mlp", "functional", 4, 2, {"projection": "em", "curvature_rows": 8}),
        ("mlp", "optimizer", 4, 1, {"projection": "em"}),
        ("convnet", "optimizer", 4, 1, {"projection": "em", "memory_limit": 2_000_000}),
        ("encoder", "functional", 4, 2, {"projection": "em"}),
        ("encoder", "optimizer", 4, 1, {**GGN, "projection": "em", "curvature_rows": 4}),
    ],
)
def test_other_curvatures_and_projections_are_planned_too(name, interface, rank, draws, options):
    assert BAND[0] <= compare(name, interface, rank, draws, **options) <= BAND[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("interface", STEPS)
@pytest.mark.parametrize("rank", [0, 1, 8])
@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize("options", [{}, {"curvature_rows": 4}])
def test_the_plan_is_near_what_steps_take_for_all(name, interface, rank, draws, options, monkeypatch):
    assert BAND[0] <= compare(name, interface, rank, draws, **options)
    for dtype in list(TOLERANCE):
        monkeypatch.setitem(TOLERANCE, dtype, 1e-300)
    # No iteration for eigenvectors converges now.
    assert BAND[0] <= compare(name, interface, rank, draws, **options) <= BAND[1]
