"""How networks on images are trained: what a row of a table of methods says, and the cells that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from slangvi_reproduction.experiments._cells import Cell

__all__ = ["Recipe", "Table"]

_WORK = "slangvi_reproduction.experiments._image_cells"
Grid = list[dict[str, float]]


@dataclass(frozen=True)
class Recipe:
    """One row of a table of methods.

    Args:
        learner: in `_image_learners`.
        fixed: settings that are not searched.
        searched: settings that are searched beside the prior, and their values.
        step_seconds: what a step takes on a GPU, roughly, for the order of cells and the time left.
        longer: whether the run with all images first repeats the one it was chosen by and then goes on for three
            times as long, as in the paper; otherwise it is a run of the same length.
        tuned_as: the method whose choice is taken over; empty for its own.
        seeds: runs with the chosen setting.
        neg_log_sigma: −log σ of the prior's standard deviation, λ = 1/σ²: what is searched of it.
        ties: whether settings within one standard error of the lowest validation error are alike, and NLL decides.
    """

    learner: str
    fixed: Mapping[str, Any]
    searched: Mapping[str, Sequence[float]]
    step_seconds: float
    longer: bool = False
    tuned_as: str = ""
    seeds: int = 1
    neg_log_sigma: Sequence[float] = (0.0, 1.0, 2.0)
    ties: bool = False

    @property
    def grid(self) -> Grid:
        """All settings to choose from."""
        values = product(self.neg_log_sigma, *self.searched.values())
        return [dict(zip(("neg_log_sigma", *self.searched), each, strict=True)) for each in values]

    def stages(self, epochs: int, final: bool) -> list[list[Any]]:
        """Which images are seen for how many epochs."""
        if not final:
            return [["tuning", epochs]]
        return [["tuning", epochs], ["train", 3 * epochs]] if self.longer else [["train", epochs]]


class Table:
    """The methods of an experiment, and the cells they make.

    Args:
        name: of the experiment.
        recipes: by method.
        common: settings that all cells share; "epochs" and "seeds" are for this table alone.
        grids: instead of the recipes' own.
    """

    def __init__(
        self,
        name: str,
        recipes: Mapping[str, Recipe],
        common: Mapping[str, Any],
        grids: Mapping[str, Grid] | None = None,
    ) -> None:
        self.name, self.recipes, self.common, self.grids = name, recipes, common, grids

    def seeds(self, method: str) -> int:
        """Runs of a method with its chosen setting."""
        return int(self.common["seeds"] or self.recipes[method].seeds)

    @property
    def most_seeds(self) -> int:
        """Of all methods."""
        return max(map(self.seeds, self.recipes))

    def grid(self, method: str) -> Grid:
        """Settings a method is chosen from."""
        method = self.recipes[method].tuned_as or method
        return self.recipes[method].grid if self.grids is None else self.grids[method]

    def finals(self, dataset: str, methods: Sequence[str], own: Mapping[str, Any] | None = None) -> list[Cell]:
        """A cell for every method and seed; each needs the cells its setting is chosen from.

        Args:
            dataset: what the cells call it.
            methods: which.
            own: settings of the data set.
        """
        found = []
        for method in methods:
            recipe = self.recipes[method]
            needs = tuple(self.tuning(dataset, recipe.tuned_as or method, own))
            stages = recipe.stages(self.common["epochs"], final=True)
            settings = {**self._shared(method, own), "stages": stages, "grid": self.grid(method)}
            settings |= {"ties_of_images": self.common["num_images"]["validation"]} if recipe.ties else {}
            work, cost = f"{_WORK}:compute_final", self._seconds(recipe, stages)
            for k in range(self.seeds(method)):
                seeded = settings | {"seed": self.common["seed"] + k}
                found.append(Cell(self.name, dataset, f"{method}-seed{k}", seeded, work, cost, needs))
        return found

    def tuning(self, dataset: str, method: str, own: Mapping[str, Any] | None = None) -> list[Cell]:
        """A cell for every setting of a method's grid; none where there is nothing to choose."""
        recipe, grid = self.recipes[method], self.grid(method)
        stages = recipe.stages(self.common["epochs"], final=False)
        shared = {**self._shared(method, own), "stages": stages}
        work, cost = f"{_WORK}:compute_tuning", self._seconds(recipe, stages)
        return [
            Cell(self.name, dataset, f"{method}-{_named(setting)}", shared | setting, work, cost)
            for setting in (grid if len(grid) > 1 else [])
        ]

    def _shared(self, method: str, own: Mapping[str, Any] | None) -> dict[str, Any]:
        """What all cells of a method share."""
        recipe = self.recipes[method]
        common = {name: value for name, value in self.common.items() if name not in ("epochs", "seeds")}
        return {**common, **(own or {}), **recipe.fixed, "learner": recipe.learner}

    def _seconds(self, recipe: Recipe, stages: Sequence[Sequence[Any]]) -> float:
        """From counted steps; on a CPU about a hundred times as long, which changes no order."""
        sizes, batch = self.common["num_images"], self.common["batch"]
        steps = sum(epochs * (sizes[part] // batch) for part, epochs in stages)
        slower = 1.0 if str(self.common["device"]).startswith("cuda") else 100.0
        return float(steps * recipe.step_seconds * slower)


def _named(setting: Mapping[str, float]) -> str:
    """A setting in a file's name.

    Example:
        >>> _named({"neg_log_sigma": 1.0, "decay": 0.52})
        'neg_log_sigma1-decay0.52'
    """
    return "-".join(f"{name}{value:g}" for name, value in setting.items())
