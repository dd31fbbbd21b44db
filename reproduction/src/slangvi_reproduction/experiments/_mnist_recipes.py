"""How the networks on MNIST are trained: a row for each method, with the grid its settings are chosen from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slangvi_reproduction.experiments._image_recipes import Grid, Recipe, Table

__all__ = ["METHODS", "NAME", "OURS", "QUICK", "RANKS", "table"]

NAME = "mnist"
RANKS = (1, 2, 4, 8, 16, 32)
# How methods by our recipe end.
OURS = "_slow"
# Where several are asked for.
_SEVERAL = 3
# Of a step on an H200: ranks 1, 8 and 32 are measured (`slangvi bench step`), all others guessed.
_STEP_SECONDS = dict(zip(RANKS, (0.00094, 0.0010, 0.0012, 0.00146, 0.0019, 0.00264), strict=True))
# α = β = 0.1/(1 + t^ω), from d = 1, without a warm-up of the precision. A rank takes fifteen runs to tune.
_TUNED = (1, 4, 8)
_PAPER = {"lr": 0.1, "precision_lr": 0.1, "precision_warmup": False, "init_precision": 1.0, "bias_precision": 1e-6}
# Ours: the precision starts high and learns slowly, with the β of `slangvi.slow_precision`, and both rates fall along
# half a cosine. The posterior may be cooled: the noise of half a million weights, most of which the data say little
# about, can cost more than it gives.
_SLOW = {"precision_lr": "slow", "precision_warmup": False, "init_precision": 1e4, "bias_precision": 1.0}
_SLOW_GRID = {"lr": (0.03, 0.1), "temperature": (0.3, 0.2, 0.1, 0.03)}
_SLOW_SIGMAS = (1.0,)
_TUNED_SLOW = 8
_ADAM = {"adam_init_precision": 2500.0, "bias_precision": 1.0}
_ADAM_RATES = {"adam_lr": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)}


def _seeds(rank: int) -> int:
    """Several at the extremes and in the middle."""
    return _SEVERAL if rank in (1, 8, 32) else 1


def _papers(rank: int) -> Recipe:
    """Some ranks are tuned; the others take over what was chosen for one of them."""
    tuned_as = "" if rank in _TUNED else f"slang_{_TUNED[-1]}"
    searched = {"decay": (0.52, 0.54, 0.56, 0.58, 0.60)}
    seconds = _STEP_SECONDS[rank]
    return Recipe(f"slang_{rank}", _PAPER, searched, seconds, longer=True, tuned_as=tuned_as, seeds=_seeds(rank))


def _slow(rank: int) -> Recipe:
    """One rank is tuned for all, which saves five of six searches."""
    tuned_as = "" if rank == _TUNED_SLOW else f"slang_{_TUNED_SLOW}{OURS}"
    return Recipe(
        f"slang_{rank}",
        _SLOW,
        _SLOW_GRID,
        _STEP_SECONDS[rank],
        tuned_as=tuned_as,
        seeds=_seeds(rank),
        neg_log_sigma=_SLOW_SIGMAS,
        ties=True,
    )


def _rival(name: str, fixed: Mapping[str, Any], seconds: float, tuned_as: str = "") -> Recipe:
    """Trained by Adam, and chosen as ours are."""
    return Recipe(name, fixed, _ADAM_RATES, seconds, tuned_as=tuned_as, seeds=_SEVERAL, ties=True)


METHODS: dict[str, Recipe] = {
    **{f"slang_{rank}": _papers(rank) for rank in RANKS},
    **{f"slang_{rank}{OURS}": _slow(rank) for rank in RANKS},
    "bbb": _rival("bbb", _ADAM, 0.0006),
    "map": _rival("map", _ADAM | {"distinct": 1}, 0.0003),
    "ensemble_5": _rival("ensemble_5", _ADAM | {"distinct": 5}, 0.0008, tuned_as="map"),
}
# For a hundred steps: a wider start, from which the mean moves faster, and a precision that is soon learned.
_SOON = {"init_precision": 1e3, "precision_lr": 0.02, "precision_warmup": True}
_FEW_STEPS = {"neg_log_sigma": 1.0, "lr": 0.02, "temperature": 0.01, **_SOON}
# What --quick trains, and with which settings: one each but for the cheapest.
QUICK: dict[str, Grid] = {
    "slang_1": [{"neg_log_sigma": 1.0, "decay": 0.52}],
    "slang_8": [{"neg_log_sigma": 1.0, "decay": 0.52}],
    f"slang_1{OURS}": [_FEW_STEPS],
    f"slang_8{OURS}": [_FEW_STEPS],
    "map": [{"neg_log_sigma": 1.0, "adam_lr": 1e-3}, {"neg_log_sigma": 1.0, "adam_lr": 3e-3}],
}


def table(common: Mapping[str, Any], quick: bool) -> Table:
    """All methods, or those of --quick."""
    return Table(NAME, {name: METHODS[name] for name in QUICK} if quick else METHODS, common, QUICK if quick else None)
