"""How the networks on MNIST are trained: a row for each method, with the grid its settings are chosen from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from slangvi.experiments._cells import Cell

__all__ = ["METHODS", "QUICK", "RANKS", "Recipe", "most_seeds", "plan", "seeds_of", "tuning_cells"]

NAME = "mnist"
RANKS = (1, 2, 4, 8, 16, 32)
# −log σ of the prior's standard deviation, λ = 1/σ².
NEG_LOG_SIGMA = (0.0, 1.0, 2.0)
# Where the targets ask for several seeds.
_SEVERAL = 3
# What a step takes on an H200, in seconds: ranks 1, 8 and 32 are measured (`slangvi bench step`), others guessed.
STEP_SECONDS = {
    **{f"slang_{rank}": ms / 1000 for rank, ms in zip(RANKS, (0.94, 1.0, 1.2, 1.46, 1.9, 2.64), strict=True)},
    **{"bbb": 0.0006, "map": 0.0003, "ensemble_5": 0.0008},
}
_WORK = "slangvi.experiments._image_cells"


@dataclass(frozen=True)
class Recipe:
    """One row of the table of methods.

    Args:
        learner: in `_image_learners`.
        fixed: settings that are not searched.
        rates: name of the setting that is searched beside the prior, and its values.
        longer: whether the run with all images first repeats the one it was chosen by and then goes on for three
            times as long, as in the paper; otherwise it is a run of the same length.
        tuned_as: the method whose choice is taken over; empty for its own.
        seeds: runs with the chosen setting.
    """

    learner: str
    fixed: Mapping[str, Any]
    rates: tuple[str, Sequence[float]]
    longer: bool = False
    tuned_as: str = ""
    seeds: int = 1

    @property
    def grid(self) -> list[dict[str, float]]:
        """All settings to choose from."""
        name, values = self.rates
        return [{"neg_log_sigma": sigma, name: value} for sigma, value in product(NEG_LOG_SIGMA, values)]

    def stages(self, epochs: int, final: bool) -> list[list[Any]]:
        """Which images are seen for how many epochs."""
        if not final:
            return [["tuning", epochs]]
        return [["tuning", epochs], ["train", 3 * epochs]] if self.longer else [["train", epochs]]


# ---- the table ----

# α = β = 0.1/(1 + t^ω), from d = 1, without a warm-up of the precision.
_PAPER = {"lr": 0.1, "precision_lr": 0.1, "precision_warmup": False, "init_precision": 1.0, "bias_precision": 1e-6}
# Both rates fall along half a cosine, from a narrow Gaussian: a wide one drowns what a deep network says.
_COSINE = {"precision_lr": 0.02, "precision_warmup": True, "init_precision": 1e4, "bias_precision": 1.0}
_ADAM = {"adam_init_precision": 2500.0, "bias_precision": 1.0}
_ADAM_RATES = ("adam_lr", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2))


def _seeds(rank: int) -> int:
    return _SEVERAL if rank in (1, 8, 32) else 1


METHODS: dict[str, Recipe] = {
    **{
        f"slang_{rank}": Recipe(
            f"slang_{rank}", _PAPER, ("decay", (0.52, 0.54, 0.56, 0.58, 0.60)), longer=True, seeds=_seeds(rank)
        )
        for rank in RANKS
    },
    **{
        f"slang_{rank}_cosine": Recipe(
            f"slang_{rank}", _COSINE, ("lr", (0.02, 0.05, 0.1, 0.2, 0.4)), seeds=_seeds(rank)
        )
        for rank in RANKS
    },
    "bbb": Recipe("bbb", _ADAM, _ADAM_RATES, seeds=_SEVERAL),
    "map": Recipe("map", _ADAM | {"distinct": 1}, _ADAM_RATES, seeds=_SEVERAL),
    "ensemble_5": Recipe("ensemble_5", _ADAM | {"distinct": 5}, _ADAM_RATES, tuned_as="map", seeds=_SEVERAL),
}
# What --quick trains, each with one setting but the cheapest, and which.
QUICK: dict[str, list[dict[str, float]]] = {
    "slang_1": [{"neg_log_sigma": 1.0, "decay": 0.52}],
    "slang_8": [{"neg_log_sigma": 1.0, "decay": 0.52}],
    "slang_1_cosine": [{"neg_log_sigma": 1.0, "lr": 0.1}],
    "slang_8_cosine": [{"neg_log_sigma": 1.0, "lr": 0.1}],
    "map": [{"neg_log_sigma": 1.0, "adam_lr": 1e-3}, {"neg_log_sigma": 2.0, "adam_lr": 1e-3}],
}


# ---- cells ----


def seeds_of(method: str, common: Mapping[str, Any]) -> int:
    """Runs of a method with its chosen setting."""
    return int(common["seeds"] or METHODS[method].seeds)


def most_seeds(common: Mapping[str, Any]) -> int:
    """Of all methods."""
    return max(seeds_of(method, common) for method in METHODS)


def plan(common: Mapping[str, Any], methods: Sequence[str]) -> list[Cell]:
    """A final cell for every method and seed; each needs the cells its setting is chosen from."""
    found = []
    for method in methods:
        recipe, needs = METHODS[method], tuning_cells(common, METHODS[method].tuned_as or method)
        stages = recipe.stages(common["epochs"], final=True)
        own = {**_own(common, method), "stages": stages, "grid": _grid(common, method)}
        for k in range(seeds_of(method, common)):
            settings = own | {"seed": common["seed"] + k}
            cost = _seconds(common, recipe, stages)
            found.append(
                Cell(NAME, NAME, f"{method}-seed{k}", settings, f"{_WORK}:compute_final", cost, needs=tuple(needs))
            )
    return found


def tuning_cells(common: Mapping[str, Any], method: str) -> list[Cell]:
    """A cell for every setting of a method's grid; none where there is nothing to choose."""
    recipe, grid = METHODS[method], _grid(common, method)
    stages = recipe.stages(common["epochs"], final=False)
    own = {**_own(common, method), "stages": stages}
    cost = _seconds(common, recipe, stages)
    return [
        Cell(NAME, NAME, f"{method}-{_named(setting)}", own | setting, f"{_WORK}:compute_tuning", cost)
        for setting in (grid if len(grid) > 1 else [])
    ]


def _own(common: Mapping[str, Any], method: str) -> dict[str, Any]:
    """What all cells of a method share."""
    recipe = METHODS[method]
    shared = {name: value for name, value in common.items() if name not in ("epochs", "seeds", "quick_grid")}
    return {**shared, **recipe.fixed, "learner": recipe.learner}


def _grid(common: Mapping[str, Any], method: str) -> list[dict[str, float]]:
    method = METHODS[method].tuned_as or method
    return QUICK[method] if common["quick_grid"] else METHODS[method].grid


def _named(setting: Mapping[str, float]) -> str:
    """A setting in a file's name.

    Example:
        >>> _named({"neg_log_sigma": 1.0, "decay": 0.52})
        'neg_log_sigma1-decay0.52'
    """
    return "-".join(f"{name}{value:g}" for name, value in setting.items())


def _seconds(common: Mapping[str, Any], recipe: Recipe, stages: Sequence[Sequence[Any]]) -> float:
    """From counted steps; on a CPU about a hundred times as long, which changes no order."""
    steps = sum(epochs * (common["num_images"][part] // common["batch"]) for part, epochs in stages)
    slower = 1.0 if str(common["device"]).startswith("cuda") else 100.0
    return float(steps * STEP_SECONDS[recipe.learner] * slower)
