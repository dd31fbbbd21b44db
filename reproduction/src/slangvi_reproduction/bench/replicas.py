"""A hundred runs of a small network: in lockstep, and one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slangvi import replicas
from slangvi.likelihoods import Gaussian
from slangvi.methods import slang
from slangvi_reproduction.bench._measure import BASELINE, FLOOR, Contender, Step, compare, measure
from slangvi_reproduction.bench.limits import Rates
from slangvi_reproduction.bench.networks import mlp
from slangvi_reproduction.bench.record import Row, Settings

__all__ = ["ABOUT", "ALONE", "FULL", "LOCKSTEP", "QUICK", "REPEATS", "TITLE", "Work", "notes", "rows", "with_goals"]

TITLE = "Many small runs"
ABOUT = """\
A hundred regression networks with 13 inputs and one hidden layer of 50, $P = 751$, each with its own data and random
stream: $M = 10$ examples, $S = 4$ draws, rank 1. A time is one step of all of them. *One by one* runs them through
`slangvi.slang`, *lockstep* through `slangvi.replicas`. Adam and the plain passes take the networks one by one, each
with $M \\cdot S$ examples.
"""
REPEATS = 7
ALONE, LOCKSTEP = "slang one by one", "slang lockstep"
TIMES = 20.0  # how much faster lockstep must be than the best way to go one by one, on two cores
_OPTIONS: dict[str, Any] = {"lr": 0.01, "rank": 1, "init_precision": 10.0}


@dataclass(frozen=True)
class Work:
    """Replicas K, sizes of the network, batch M, draws S, and N."""

    count: int
    sizes: tuple[int, ...]
    batch: int
    draws: int
    num_data: int = 450


FULL = Work(100, (13, 50, 1), 10, 4)
QUICK = Work(3, (2, 3, 1), 4, 2)


@dataclass(frozen=True)
class Setting:
    """What all contenders train: one network, K batches."""

    work: Work
    model: nn.Module
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, work: Work, device: str) -> Setting:
        """Random inputs, and a smooth function of them with noise."""
        generator = torch.Generator().manual_seed(0)
        shape = (work.count, work.batch, work.sizes[0])
        x = torch.randn(shape, generator=generator)
        noise = torch.randn(*shape[:2], 1, generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = mlp(work.sizes).to(device)
        return cls(work, model, x.to(device), (x.sum(-1, keepdim=True).tanh() + 0.1 * noise).to(device))

    @property
    def params(self) -> dict[str, Tensor]:
        """Where all runs start."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    @property
    def options(self) -> dict[str, Any]:
        """What both ways of running share."""
        return _OPTIONS | {"num_data": self.work.num_data, "mc_samples": self.work.draws}


def rows(settings: Settings, rates: Rates) -> list[Row]:
    """Everybody once; ratios are to Adam."""
    setting = Setting.of(QUICK if settings.quick else FULL, settings.device)
    found = compare(measure(contenders(setting, settings.device), settings))
    return found if settings.quick or settings.device != "cpu" else with_goals(found)


def contenders(setting: Setting, device: str) -> list[Contender]:
    """Plain passes and Adam, then SLANG one by one, by either engine, and in lockstep."""
    found = [Contender(FLOOR, partial(_plain, setting, False)), Contender(BASELINE, partial(_plain, setting, True))]
    found.append(Contender(ALONE, partial(_alone, setting, engine="factored")))
    found.append(Contender(f"{ALONE}, dense", partial(_alone, setting, engine="dense")))
    found.append(Contender(LOCKSTEP, partial(_lockstep, setting)))
    if device == "cuda":  # pragma: no cover
        found.append(Contender(f"{ALONE}, compiled", partial(_alone, setting, engine="factored", compile=True)))
        found.append(Contender(f"{LOCKSTEP}, one generator", partial(_lockstep, setting, one=True)))
    return found


def _plain(setting: Setting, train: bool) -> Step:
    """Networks of their own one by one, M·S examples each, with or without a step of Adam."""
    draws, pairs = setting.work.draws, list(zip(setting.x, setting.y, strict=True))
    models = [mlp(setting.work.sizes).to(setting.x.device) for _ in pairs]
    batches = [(torch.cat([x] * draws), torch.cat([y] * draws)) for x, y in pairs]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]

    def step() -> None:
        for model, opt, (x, y) in zip(models, optimizers, batches, strict=True):
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if train:
                opt.step()

    return step


def _alone(setting: Setting, engine: str, **options: Any) -> Step:
    likelihood = Gaussian().of(setting.model)
    vi = slang.build(likelihood, model=setting.model, engine=engine, **setting.options, **options)  # type: ignore[arg-type]
    states = [vi.init(setting.params) for _ in setting.x]
    generators = replicas.streams(range(len(states)), setting.x.device)
    batches = list(zip(setting.x, setting.y, strict=True))

    def step() -> None:
        for k, batch in enumerate(batches):
            states[k], _ = vi.update(states[k], batch, generator=generators[k])

    return step


def _lockstep(setting: Setting, one: bool = False) -> Step:
    likelihood, count = Gaussian().of(setting.model), setting.work.count
    runs = replicas.build(likelihood, num_replicas=count, **setting.options)
    state = [runs.init(setting.params)]
    streams = replicas.streams(range(1 if one else count), setting.x.device)

    def step() -> None:
        state[0], _ = runs.update(state[0], (setting.x, setting.y), streams[0] if one else streams)

    return step


def with_goals(rows: Sequence[Row]) -> list[Row]:
    """Whether lockstep is as much faster as was asked for."""
    times = _times(rows)
    if times is None:
        return list(rows)
    text = f"{'✓' if times >= TIMES else '✗'} {TIMES:g} × faster than one by one"
    return [replace(row, target=text, met=times >= TIMES) if row.name == LOCKSTEP else row for row in rows]


def _times(rows: Sequence[Row]) -> float | None:
    """How much faster lockstep is than the best way to go one by one."""
    alone = [row.milliseconds for row in rows if row.name.startswith(ALONE) and row.milliseconds]
    together = [row.milliseconds for row in rows if row.name.startswith(LOCKSTEP) and row.milliseconds]
    return min(alone) / min(together) if alone and together else None


def notes(rows: Sequence[Row]) -> list[str]:
    """The factor between the two ways."""
    times = _times(rows)
    return [] if times is None else [f"Lockstep advances all runs {times:.1f} times as fast as one by one."]
