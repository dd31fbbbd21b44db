"""The cells of logistic regression: which there are, what they cost, and how one is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from slangvi.methods import exact
from slangvi_reproduction.data.libsvm import LIBSVM, libsvm_splits
from slangvi_reproduction.experiments._cells import Arrays, Attempt, Cell
from slangvi_reproduction.experiments._lockstep import METHODS, seed_of, train
from slangvi_reproduction.experiments._logistic import BIAS_PRECISION, DATASETS, Gaussian, Problem, measure, prior_of

__all__ = ["EXACT", "Recipe", "compute_exact", "compute_trained", "load_problem", "plan"]

# Raised by one when the same settings give other numbers, so that kept cells are computed again.
EDITION = 1
EXACT: dict[str, exact.Family] = {"mf_exact": "mean_field", "full_exact": "full"}
REFERENCE = "full_exact"


@dataclass(frozen=True)
class Recipe:
    """How the cells of an experiment are trained.

    Args:
        group: folder of the cells.
        epochs: passes over the training set, in examples drawn.
        splits: numbers of the splits of a data set, one of which may come several times.
        seed: of minibatches and draws.
        lr: α₀ = β₀, for a data set and a method.
        decay: ω of α₀/(1 + t^ω); None holds the rate constant.
        mc_samples: S.
        trace_points: how often metrics are taken along the way.
        device: "cpu" or "cuda".
        single: whether a data set and a method are trained in float32.
    """

    group: str
    epochs: int
    splits: Callable[[str], Sequence[int]]
    seed: int
    lr: Callable[[str, str], float]
    decay: float | None
    mc_samples: int = 12
    trace_points: int = 60
    device: str = "cpu"
    single: Callable[[str, str], bool] = lambda dataset, method: False

    def cell(self, dataset: str, method: str) -> Cell:
        """One data set with one method."""
        splits = list(self.splits(dataset))
        row = DATASETS[dataset]
        shared: dict[str, Any] = {
            "edition": EDITION,
            "splits": splits,
            "prior_precision": row.prior_precision,
            "bias_prior_precision": BIAS_PRECISION,
            "device": self.device,
        }
        work = f"{__name__}:compute_exact" if method in EXACT else f"{__name__}:compute_trained"
        if method in EXACT:
            needs = () if method == REFERENCE else (self.cell(dataset, REFERENCE),)
            cost = 0.5 + 2e-8 * len(splits) * LIBSVM[dataset].num_features ** 3
            return Cell(self.group, dataset, method, shared, work, cost, needs)
        trained: dict[str, Any] = {
            "batch_size": row.batch_size,
            "epochs": self.epochs,
            "mc_samples": self.mc_samples,
            "lr": self.lr(dataset, method),
            "decay": self.decay,
            "momentum": METHODS[method].momentum,
            "seed": self.seed,
            "trace_points": self.trace_points,
        }
        cost = _seconds(dataset, method, len(splits), self.epochs)
        if self.single(dataset, method):
            trained["dtype"], cost = "float32", 0.6 * cost
        return Cell(self.group, dataset, method, shared | trained, work, cost, (self.cell(dataset, REFERENCE),))


def plan(recipe: Recipe, datasets: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """All cells of a table."""
    return [recipe.cell(dataset, method) for dataset in datasets for method in methods]


def _seconds(dataset: str, method: str, splits: int, epochs: int) -> float:
    """A guess at the time of one core that a cell takes, from a few that were timed."""
    num_data, num_params = LIBSVM[dataset].num_train, LIBSVM[dataset].num_features + 1
    batch, module = DATASETS[dataset].batch_size, METHODS[method].module
    entries = splits * batch * num_params
    milliseconds = 0.35 + 7e-6 * entries
    if module == "full":
        milliseconds += 0.2 + 5e-8 * splits * num_params**3
    elif module != "mean_field":
        milliseconds += 1.2 + 1.5e-5 * entries
    return 1e-3 * milliseconds * epochs * num_data / batch


@lru_cache(maxsize=4)
def load_problem(dataset: str, splits: tuple[int, ...]) -> Problem:
    """The splits of a data set, stacked; kept, since a process computes many cells."""
    data = libsvm_splits(dataset, splits)
    return Problem(*data, prior_of(dataset, data.x_train.shape[-1]))


def _problem_of(cell: Cell) -> Problem:
    return load_problem(cell.dataset, tuple(cell.settings["splits"])).to(cell.settings["device"])


def compute_trained(cell: Cell, attempt: Attempt) -> Arrays:
    """A method that samples."""
    problem, reference = _problem_of(cell), _reference(attempt, cell.settings)
    seed = seed_of(cell.settings["seed"], cell.dataset, cell.method)
    found = train(METHODS[cell.method], problem, reference, cell.settings, seed, attempt)
    trace = {"trace_steps": found.steps, "trace_elbo": found.elbo, "trace_kl": found.kl}
    arrays = {name: value.cpu().numpy() for name, value in trace.items()}
    return arrays | _measured(found.q, problem, reference, covariances=1)


def compute_exact(cell: Cell, attempt: Attempt) -> Arrays:
    """A method that does not sample."""
    problem = _problem_of(cell)
    fit = exact.fit(
        problem.x_train,
        problem.y_train,
        prior_precision=problem.prior.precision,
        prior_mean=problem.prior.mean,
        family=EXACT[cell.method],
    )
    q = Gaussian(fit.loc, fit.covariance)
    reference = q if cell.method == REFERENCE else _reference(attempt, cell.settings)
    arrays = _measured(q, problem, reference, covariances=len(q.loc) if cell.method == REFERENCE else 1)
    return arrays | {"gradient_norm": fit.gradient_norm.cpu().numpy()}


def _reference(attempt: Attempt, settings: Mapping[str, Any]) -> Gaussian:
    kept = attempt.needed(REFERENCE)
    return Gaussian(*(torch.tensor(kept[name], device=settings["device"]) for name in ("loc", "covariance")))


def _measured(q: Gaussian, problem: Problem, reference: Gaussian, covariances: int) -> Arrays:
    """Metrics of all splits, all means and variances, and the covariances of the first few."""
    variance = q.covariance.diagonal(dim1=-2, dim2=-1)
    found = {"loc": q.loc, "variance": variance, "covariance": q.covariance[:covariances]}
    return {name: value.cpu().numpy() for name, value in (found | measure(q, problem, reference)).items()}
