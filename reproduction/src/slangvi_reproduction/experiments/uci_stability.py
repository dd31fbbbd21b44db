"""What makes training of small networks fail, and what prevents it: recipes of rates on held-out training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from slangvi_reproduction.experiments import pages, uci
from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments._logistic_tables import Outcome
from slangvi_reproduction.experiments._uci_cells import settings_of
from slangvi_reproduction.experiments._uci_tables import run_table
from slangvi_reproduction.experiments.results import Row, read_rows
from slangvi_reproduction.experiments.runner import Progress
from slangvi_reproduction.experiments.settings import Settings, choose

__all__ = ["DATASETS", "METHODS", "RECIPES", "Recipe", "run", "section"]

NAME = "uci-stability"
TITLE = "Rates that do not blow up"
# (log τ, log λ) of each: the medians of what a search with the rates of `noise_falls` chose for the splits.
POINTS = {"boston": (-2.33, -0.97), "concrete": (-3.0, -2.0), "energy": (0.1, -2.87), "yacht": (-0.6, -1.18)}
DATASETS = tuple(POINTS)
METRICS = ("validation_rmse", "validation_log_likelihood")


class Recipe(NamedTuple):
    """One row of the table of recipes.

    Args:
        lr: α at the start.
        precision_lr: β at the start; "slow" is that of `slow_precision`.
        init_precision: d at the start; "curvature" is Nτ.
        precision_warmup: whether β is at least 1/(t+1).
        falls: which rates fall along a half cosine.
        total: what α may add up to; both rates are smaller where it would be more.
        noise_start: noise precision at the start, at most; None for the likelihood's own from the first step.
        temperature: of a posterior p(θ | data)^(1/temperature).
    """

    lr: float
    precision_lr: float | str
    init_precision: float | str
    precision_warmup: bool
    falls: tuple[str, ...]
    total: float | None = None
    noise_start: float | None = None
    temperature: float = 1.0


BOTH = ("lr", "precision_lr")
RECIPES = {
    "released": Recipe(0.01, 0.01, 1.0, False, ()),
    "faster_mean": Recipe(0.1, 0.01, 10.0, False, ()),
    "warm": Recipe(0.1, 0.01, 10.0, True, ()),
    "warm_mean_falls": Recipe(0.1, 0.01, 10.0, True, ("lr",)),
    "warm_both_fall": Recipe(0.1, 0.01, 10.0, True, BOTH),
    "slow_mean": Recipe(0.02, 0.02, 10.0, True, BOTH),
    "cold": Recipe(0.05, 0.02, 10.0, False, BOTH),
    "fixed": Recipe(0.05, 0.02, 10.0, True, BOTH),
    "even": Recipe(0.1, 0.1 / 3, 10.0, True, BOTH, 130.0),
    "noise_falls": Recipe(0.1, 0.1 / 3, 10.0, True, BOTH, 130.0, uci.NOISE_START),
    "slow": Recipe(uci.LR, "slow", "curvature", False, BOTH, uci.TOTAL, uci.NOISE_START),
    "tempered": Recipe(uci.LR, "slow", "curvature", False, BOTH, uci.TOTAL, uci.NOISE_START, uci.COLD),
}
# What stands for a number that depends on the run.
SHOWN = {"slow": "10/T", "curvature": "Nτ"}
METHODS = tuple(RECIPES)
ABOUT = f"""\
SLANG at rank 1 with several recipes of rates, 120 epochs on four fifths of each training part, judged on the last
fifth; τ and λ are the medians of what a search like the one above chose with the rates of `noise_falls`. No test data
are involved. Five things go wrong:

- *The mean outruns the precision.* It moves by $\\alpha P^{{-1}} \\hat g$, but a precision that starts at
  $d_0$ hears of the curvature after $1/\\beta$ steps only. With $\\alpha$ well above $\\beta$ the first steps
  overshoot to where gradients are larger still (`faster_mean` on Boston and Energy). `precision_warmup`, the default,
  takes $\\beta_t = \\max(\\beta, 1/(t+1))$, so that the precision averages all it has seen until $\\beta$ is reached.
- *Rates that stay.* Weights of units that are rarely active lose their precision between two visits, biases down to
  their prior's $10^{{-6}}$; now and then a draw far out spoils the mean prediction of a split, though hardly its
  likelihood (`warm` on Concrete, `warm_mean_falls` on Energy). Rates that both fall prevent it.
- *The precision outruns the mean.* Far from the optimum the empirical Fisher grows with the squared residual. If
  $\\beta$ is not smaller than $\\alpha$ it can freeze the mean there (`released` and `slow_mean` on Yacht).
- *One rate for all sizes.* The larger the set, the more steps 120 epochs are. A rate that is right for Yacht moves a
  network on Concrete several times as far, where units die one after the other: their biases, with a prior that
  allows anything, wander to where no example reaches them (`warm_both_fall`). A rate that is right for Concrete leaves
  runs on Yacht unfinished (`fixed`, `cold`). `even` gives all the same way to go.
- *Residuals far above the noise.* The empirical Fisher of an example is $r^2\\tau^2 JJ^\\top$ for a residual $r$, where
  the curvature is $\\tau JJ^\\top$. On Energy and Yacht targets spread over ten times the noise, so that at the start
  precisions are a hundred times too large and the mean crawls. With `even`, two of the twenty runs on whole training
  parts of Yacht never arrived, at four times the others' RMSE and with no sign of it in their tiny variances; here only
  the log-likelihood tells. So the noise starts larger and falls.

`noise_falls` does all that: both rates fall, warm, from $\\beta = \\alpha/3$ and an $\\alpha$ that adds up to 130 in
all steps, but is never above 0.1. The noise precision is at most {uci.NOISE_START:g} on standardised targets at first,
and is its own after {uci.NOISE_FALL:.0%} of all steps: $\\tau_t = \\tau_0 (\\tau/\\tau_0)^{{t/{uci.NOISE_FALL:g}T}}$.
On Boston and Concrete $\\tau$ is smaller than that anyway: `even` and `noise_falls` are the same there, and as every
recipe has random numbers of its own, what they differ by is chance.

`slow` is what the table above uses on all sets, and the estimators use by default: with `slangvi.slow_precision` the
precision starts at what all examples would say of an output, $d_0 = N\\tau$, and learns with $\\beta = 10/T$. Draws
are close and steps short at first without a warm-up, so that neither the mean nor the precision can outrun the other,
and $\\alpha$ may be four times as large: it adds up to {uci.TOTAL:g}, and is never above {uci.LR}.

`tempered` is the same with a cold posterior: likelihood and prior are raised to the power {1 / uci.COLD:g}, a
temperature of {uci.COLD}. RMSE is lower on all four sets, and the log-likelihood better on all but Boston. In the table
above that is `slang_1_cold`.
"""


def chosen(settings: Settings) -> dict[str, Any]:
    """As in `uci`, without a search."""
    common = uci.chosen(settings) | {"learner": "slang_1", "evaluations": 0, "test_draws": 100}
    return {name: value for name, value in common.items() if not name.startswith(("adam", "dropout", "noise"))}


def plan(common: dict[str, Any], datasets: tuple[str, ...], methods: tuple[str, ...]) -> list[Cell]:
    """A cell for every data set and recipe."""
    work = "slangvi_reproduction.experiments._uci_cells:compute_recipe"
    return [
        Cell(NAME, dataset, name, settings_of(dataset, common | _plain(RECIPES[name]) | {"point": list(point)}), work)
        for dataset, point in POINTS.items()
        if dataset in datasets
        for name in methods
    ]


def _plain(recipe: Recipe) -> dict[str, Any]:
    """As JSON can hold it."""
    plain = recipe._asdict() | {"falls": list(recipe.falls)}
    if plain["noise_start"] is None:
        del plain["noise_start"]
    else:
        plain["noise_fall"] = uci.NOISE_FALL
    if plain["temperature"] == 1.0:
        del plain["temperature"]
    return plain


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    common = chosen(settings)
    datasets = choose("dataset", settings.datasets, DATASETS)
    methods = choose("method", settings.methods, METHODS)
    cells = plan(common, datasets, methods), plan(common, DATASETS, METHODS)
    return run_table(NAME, *cells, METRICS, common, settings, progress)


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    rows = read_rows(results / f"{NAME}.csv")
    parts = [ABOUT, pages.made_by(results / f"{NAME}.json")]
    for dataset in dict.fromkeys(row.dataset for row in rows):
        parts.append(_table([row for row in rows if row.dataset == dataset]))
    return "\n".join(parts), []


def _table(rows: list[Row]) -> str:
    """The recipes on one data set."""
    found = {(row.metric, row.method): row for row in rows}
    lines = []
    for name in dict.fromkeys(row.method for row in rows):
        recipe, (error, fit) = RECIPES[name], (found[metric, name] for metric in METRICS)
        falls = {(): "", ("lr",): "α", BOTH: "α, β"}[recipe.falls]
        cells = [name, *(_shown(value, recipe.total is not None) for value in recipe[:2])]
        cells.append(_shown(recipe.init_precision))
        cells += ["✓" if recipe.precision_warmup else "", falls, "✓" if recipe.noise_start else ""]
        cells.append(f"{recipe.temperature:g}")
        cells += [f"{value:.3f}" for value in (error.mean, error.median, error.worst)]
        lines.append([*cells, f"{error.worst / error.median:.1f}", f"{fit.mean:.3f}"])
    header = [pages.DATASETS[rows[0].dataset], "α", "β", "d₀", "warm", "fall", "noise falls", "temperature"]
    return pages.markdown([*header, "RMSE", "median", "worst", "worst/median", "log-likelihood"], lines)


def _shown(value: float | str, at_most: bool = False) -> str:
    """A number, or what stands for it."""
    if isinstance(value, str):
        return SHOWN[value]
    return f"≤ {value:.2g}" if at_most else f"{value:.2g}"
