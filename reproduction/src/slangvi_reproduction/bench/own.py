"""SLANG as a contender: the functional interface, eager or compiled, by either engine, and the optimizer in a loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from slangvi.likelihoods import Categorical
from slangvi.methods import slang
from slangvi_reproduction.bench._measure import WARMUP, Contender, Step
from slangvi_reproduction.bench.networks import Problem
from slangvi_reproduction.bench.peers import sampled_loop

__all__ = ["COMPILED", "COMPILED_LOOP", "FUNCTIONAL", "LOOP", "compiled", "compiled_loop", "functional", "loop"]

FUNCTIONAL, COMPILED = "slang functional", "slang functional, compiled"
LOOP, COMPILED_LOOP = "slang optimizer", "slang optimizer, compiled"
_LARGE = 3_000_000
# The paper's schedule after a thousand steps, when no precision is warming up any more.
_RATES: dict[str, Any] = {"lr": 0.002, "init_precision": 1e4, "precision_warmup": False}


def functional(problem: Problem, rank: int, name: str = FUNCTIONAL, **options: Any) -> Contender:
    """`slang.build(...).update`, with further options of `build`."""
    warmup = _warmup(problem, options.get("compile", False))
    return Contender(name, partial(_functional, problem, rank, **options), {"L": rank}, warmup=warmup)


def compiled(problem: Problem, rank: int) -> list[Contender]:
    """The same with `compile=True`, which is for GPUs: none elsewhere."""
    return [functional(problem, rank, COMPILED, compile=True)] if problem.x.is_cuda else []


def loop(problem: Problem, rank: int) -> Contender:
    """`SLANG` in a loop of one's own."""
    return Contender(LOOP, partial(_loop, problem, rank), {"L": rank}, warmup=_warmup(problem, False))


def compiled_loop(problem: Problem, rank: int) -> list[Contender]:
    """The same with `compile=True`, on a GPU."""
    if not problem.x.is_cuda:
        return []
    make = partial(_loop, problem, rank, compile=True)
    return [Contender(COMPILED_LOOP, make, {"L": rank}, warmup=_warmup(problem, True))]


def _warmup(problem: Problem, compiled: bool) -> int:
    """The first steps are checked, and their eigenproblem has no good start yet; large networks are spared the wait."""
    size = sum(param.numel() for param in problem.model().parameters())
    return WARMUP if size > _LARGE else (100 if compiled else 12)


def _functional(problem: Problem, rank: int, **options: Any) -> Step:
    model = problem.model()
    options |= {"num_data": problem.num_data, "rank": rank, "mc_samples": problem.draws, "model": model}
    vi = slang.build(Categorical().of(model), **_RATES, **options)
    state = [vi.init(dict(model.named_parameters()))]
    generator = torch.Generator(problem.x.device).manual_seed(0)

    def step() -> None:
        state[0], _ = vi.update(state[0], (problem.x, problem.y), generator=generator)

    return step


def _loop(problem: Problem, rank: int, **options: Any) -> Step:
    model = problem.model()
    opt = slang.SLANG(model, num_data=problem.num_data, rank=rank, **_RATES, **options)
    return sampled_loop(opt, model, problem)
