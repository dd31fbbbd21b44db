"""SLANG as a contender: the functional interface, eager or compiled, by either engine, and the optimizer in a loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from slangvi.bench._measure import Contender, Step
from slangvi.bench.networks import Problem
from slangvi.bench.peers import sampled_loop
from slangvi.likelihoods import Categorical
from slangvi.methods import slang

__all__ = ["COMPILED", "FUNCTIONAL", "LOOP", "compiled", "functional", "loop"]

FUNCTIONAL, COMPILED, LOOP = "slang functional", "slang functional, compiled", "slang optimizer"
_RATES: dict[str, Any] = {"lr": 0.05, "init_precision": 100.0}  # stay finite on random labels, for many steps


def functional(problem: Problem, rank: int, name: str = FUNCTIONAL, **options: Any) -> Contender:
    """`slang.build(...).update`, with further options of `build`."""
    return Contender(name, partial(_functional, problem, rank, **options), {"L": rank})


def compiled(problem: Problem, rank: int) -> list[Contender]:
    """The same with `compile=True`, which is for GPUs: none elsewhere."""
    return [functional(problem, rank, COMPILED, compile=True)] if problem.x.is_cuda else []


def loop(problem: Problem, rank: int) -> Contender:
    """`SLANG` in a loop of one's own."""
    return Contender(LOOP, partial(_loop, problem, rank), {"L": rank})


def _functional(problem: Problem, rank: int, **options: Any) -> Step:
    model = problem.model()
    options |= {"num_data": problem.num_data, "rank": rank, "mc_samples": problem.draws, "model": model}
    vi = slang.build(Categorical().of(model), **_RATES, **options)
    state = [vi.init(dict(model.named_parameters()))]
    generator = torch.Generator(problem.x.device).manual_seed(0)

    def step() -> None:
        state[0], _ = vi.update(state[0], (problem.x, problem.y), generator=generator)

    return step


def _loop(problem: Problem, rank: int) -> Step:
    model = problem.model()
    opt = slang.SLANG(model, num_data=problem.num_data, rank=rank, **_RATES)
    return sampled_loop(opt, model, problem)
