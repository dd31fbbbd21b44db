"""Bayesian optimisation of two numbers for many splits, each on its own, with proposals in rounds.

Proposals depend on the finished evaluations, the seed and the number of the round alone, so that a search can be
stopped and taken up anywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, NamedTuple

__all__ = ["Box", "History", "propose", "propose_all"]


class Box(NamedTuple):
    """Where to look.

    Args:
        log_tau: bounds of the logarithm of the noise precision, on the targets' own scale.
        log_lambda: bounds of the logarithm of the weights' prior precision.
    """

    log_tau: tuple[float, float]
    log_lambda: tuple[float, float]


# Points (log τ, log λ) and what was found there.
History = Sequence[tuple[tuple[float, float], float]]


def propose(box: Box, history: History, count: int, seed: int) -> list[tuple[float, float]]:
    """Points to evaluate next: random ones first, then by expected improvement of a Gaussian process.

    Args:
        box: bounds.
        history: finished evaluations; larger is better.
        count: how many points; they take each other into account.
        seed: of this round.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("the search needs Optuna: pip install 'slangvi[bo]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    inside: dict[str, Any] = {
        name: optuna.distributions.FloatDistribution(*bounds) for name, bounds in box._asdict().items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls its sampler experimental
        guided = optuna.samplers.GPSampler(seed=seed, n_startup_trials=1)
        sampler = guided if history else optuna.samplers.RandomSampler(seed=seed)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for point, value in history:
            params = dict(zip(inside, point, strict=True))
            study.add_trial(optuna.trial.create_trial(params=params, distributions=inside, value=value))
        asked = [study.ask(inside).params for _ in range(count)]
    return [(params["log_tau"], params["log_lambda"]) for params in asked]


def propose_all(
    box: Box, histories: Sequence[History], count: int, seeds: Sequence[int], jobs: int = 1
) -> list[list[tuple[float, float]]]:
    """The same for every split, in several processes where that pays: a proposal takes a second or so."""
    splits = len(histories)
    arguments = [[box] * splits, histories, [count] * splits, seeds]
    if jobs == 1 or splits == 1 or not histories[0]:
        return [propose(*each) for each in zip(*arguments, strict=True)]
    with ProcessPoolExecutor(min(jobs, splits), mp_context=_context(), initializer=_one_thread) as pool:
        return list(pool.map(propose, *arguments))


@lru_cache(maxsize=1)
def _context() -> Any:
    """Processes come from one that has imported everything and holds neither threads nor a GPU."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["optuna", "scipy.optimize", "torch", __name__])
    return context


def _one_thread() -> None:  # pragma: no cover
    import torch

    torch.set_num_threads(1)
