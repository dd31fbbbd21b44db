"""One data set without a search: on every split a network whose noise and prior are learnt in the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import slangvi
from slangvi_reproduction.data import Standardised, load_uci, standardise
from slangvi_reproduction.experiments._cells import Arrays, Attempt, Cell
from slangvi_reproduction.experiments._lockstep import seed_of
from slangvi_reproduction.experiments._regression import network, starts

__all__ = ["COLUMNS", "compute_cell", "compute_part", "fit"]

COLUMNS = ("test_rmse", "test_log_likelihood", "log_tau", "log_lambda")


def compute_cell(cell: Cell, attempt: Attempt) -> Arrays:
    """Put the splits together, of which the needed cells have a few each."""
    parts = [attempt.needed(need.method) for need in cell.needs]
    attempt.include(sum(float(part["seconds"]) for part in parts))
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def compute_part(cell: Cell, attempt: Attempt) -> Arrays:
    """Train on the training part of each split, one after the other, and test."""
    data, settings, method = load_uci(cell.dataset), cell.settings, cell.method.rpartition("-")[0]
    splits: Sequence[int] = settings["splits"]
    kept = attempt.restored() or {name: np.zeros(0) for name in COLUMNS}
    for place in range(len(kept["test_rmse"]), len(splits)):
        seed = seed_of(settings["seed"], cell.dataset, method, str(splits[place])) % 2**31
        found = fit(standardise(data, data.splits[splits[place]]), settings, seed)
        kept = {name: np.append(kept[name], value) for name, value in zip(COLUMNS, found, strict=True)}
        attempt.tick(place + 1, len(splits), lambda: kept)  # noqa: B023  # called at once
    return kept | {"seconds": np.array(attempt.seconds)}


def fit(parts: Standardised, settings: Mapping[str, Any], seed: int) -> tuple[float, float, float, float]:
    """Train one network; return RMSE, log-likelihood, and the logarithms of τ and of λ of the first weights.

    Args:
        parts: on standardised scales; the results are in the targets' own units.
        settings: the recipe.
        seed: of everything that is random.
    """
    x, y = parts.x_train.float(), parts.y_train.float().unsqueeze(1)
    count, steps, start = len(x), settings["epochs"] * settings["batches"], settings["noise_start"]
    size = min(count, max(settings["least_batch"], count // settings["batches"]))
    source = torch.Generator().manual_seed(seed)
    model, cold = _network(x.shape[1], settings["hidden"], seed), settings["temperature"]
    prior = {key: value if value == "learn" else value / cold for key, value in settings["prior"].items()}
    slow: Any = slangvi.slow_precision(count, steps, curvature=start, temperature=cold)
    opt: Any = slangvi.SLANG(
        model,
        num_data=count,
        rank=settings["rank"],
        lr=settings["lr"],
        curvature="ggn",
        curvature_rows=settings["curvature_rows"],
        projection=settings["projection"],
        likelihood=slangvi.Gaussian(start),
        noise_precision="learn",
        prior_precision=prior,
        mc_samples=settings["mc_samples"],
        temperature=settings["temperature"],
        generator=source,
        on_divergence="ignore",
        verify=False,
        **slow,
    )
    (group,) = opt.param_groups
    rates = {name: group[name] for name in ("lr", "precision_lr")}
    order: Iterator[Tensor] = iter(())
    for step in range(steps):
        for name, first in rates.items():
            group[name] = first * max(0.5 * (1 + math.cos(math.pi * step / steps)), 1e-3)
        rows = next(order, None)
        if rows is None or len(rows) < size:  # what does not fill a batch is left out
            order = iter(torch.randperm(count, generator=source).split(size))
            rows = next(order)
        opt.zero_grad()
        for _ in range(settings["mc_samples"]):
            with opt.sampled_params(train=True):
                (-opt.likelihood.log_prob(model(x[rows]), y[rows]).mean()).backward()
        opt.step()
    known = opt.prior_precision.get("0.weight") or settings["prior"]["*"]
    log_tau = math.log(opt.likelihood.noise_precision) - 2 * math.log(float(parts.y_scale))
    return *_scores(model, opt, parts, settings["test_draws"], source), log_tau, math.log(known)


def _network(inputs: int, hidden: int, seed: int) -> nn.Module:
    model = nn.Sequential(*list(network(inputs, hidden).children())[:3])
    first = starts(inputs, hidden, [seed])
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(first[name][0])
    return model


@torch.no_grad()
def _scores(
    model: nn.Module, opt: Any, parts: Standardised, draws: int, source: torch.Generator
) -> tuple[float, float]:
    """Return RMSE of the mean prediction and the mean log-density of the average over draws, in the targets' units."""
    x, y, scale = parts.x_test.float(), parts.y_test.float().unsqueeze(1), float(parts.y_scale)
    outputs: Tensor = slangvi.functional_samples(model, opt.posterior, x, n_samples=draws, generator=source)
    each = opt.likelihood.log_prob(outputs.flatten(0, 1), y.repeat(draws, 1)).view(draws, -1)
    density = each.double().logsumexp(0) - math.log(draws) - math.log(scale)
    error = (outputs.double().mean(0) - y).square().mean().sqrt() * scale
    return float(error), float(density.mean())
