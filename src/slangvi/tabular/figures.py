"""Pictures of a report as PNG bytes; no text of the data is drawn in them, so that nothing in it can spoil them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slangvi import plots
from slangvi.tabular.model import Classes, Model, Numbers
from slangvi.tabular.scores import LEVELS, coverages

__all__ = ["figures"]

Array = Any
_BLUE, _GREY, _RED = "#2563a8", "0.6", "#c0392b"


def figures(model: Model, held: Numbers | Classes, y: Array) -> list[tuple[str, str, bytes]]:
    """Return title, meaning, and PNG of each picture, for predictions of held-out rows and their targets (n,)."""
    drawn: list[tuple[str, str, Callable[[Any], object]]]
    if isinstance(held, Classes):
        probs, labels = torch.from_numpy(held.probs), torch.from_numpy(y)
        drawn = [
            (
                "Calibration",
                "Share of right predictions among those with the same confidence. On the diagonal a prediction is as "
                "good as it says; below it, the model is too sure.",
                lambda ax: plots.reliability_diagram(probs, labels, bins=10, ax=ax),
            ),
            (
                "Error if unsure rows are set aside",
                "Rows are answered from the surest on. A curve that rises to the right says that confidence tells good "
                "predictions from bad ones.",
                lambda ax: plots.risk_coverage_curve(probs, labels, ax=ax),
            ),
        ]
    else:
        drawn = [
            (
                "Calibration",
                "Share of held-out targets inside intervals of each level. Below the diagonal they are too narrow, "
                "above it too wide.",
                lambda ax: _calibration(ax, held, y),
            ),
            (
                "Predicted and observed",
                "Each point is a held-out row; on the line the prediction is right. Bars are one standard deviation.",
                lambda ax: _scatter(ax, held, y),
            ),
            (
                "Residuals",
                "(Observed − predicted) / predicted standard deviation. They should look like the standard normal "
                "curve; what lies far outside was a surprise.",
                lambda ax: _residuals(ax, held, y),
            ),
        ]
    drawn += [
        (
            "Posterior spectrum",
            "Directions of the weights that the data determine best: eigenvalues of the low-rank part of the posterior "
            "precision, beside the precision of the prior.",
            lambda ax: _spectrum(ax, model),
        ),
        (
            "Uncertainty of the weights",
            "Posterior standard deviation of every weight. Weights at the prior's value were not touched by the data.",
            lambda ax: _weights(ax, model),
        ),
    ]
    return [(title, about, _png(draw)) for title, about, draw in drawn]


def _png(draw: Callable[[Any], object]) -> bytes:
    """Draw a picture without pyplot, which keeps figures and may open windows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    draw(ax)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=170)
    return file.getvalue()


def _calibration(ax: Any, held: Numbers, y: Array) -> None:
    ax.plot([0, 1], [0, 1], color=_GREY, lw=1, ls="--", zorder=0)
    ax.plot(LEVELS, coverages(held, y), marker="o", ms=4, lw=1.3, color=_BLUE)
    ax.set(xlabel="level of the interval", ylabel="share inside", xlim=(0, 1), ylim=(0, 1), aspect="equal")


def _scatter(ax: Any, held: Numbers, y: Array) -> None:
    ends = [float(min(y.min(), held.mean.min())), float(max(y.max(), held.mean.max()))]
    ax.plot(ends, ends, color=_GREY, lw=1, ls="--", zorder=0)
    alpha = float(np.clip(60 / len(y), 0.05, 0.7))
    ax.errorbar(held.mean, y, xerr=held.std, fmt="o", ms=3, lw=0.6, color=_BLUE, alpha=alpha)
    ax.set(xlabel="predicted", ylabel="observed")
    ax.locator_params(axis="x", nbins=4)  # labels of prices are wide


def _residuals(ax: Any, held: Numbers, y: Array) -> None:
    z = (y - held.mean) / held.std
    ends = max(4.0, float(np.abs(z).max()))
    ax.hist(z, bins=max(20, min(60, len(z) // 8)), range=(-ends, ends), density=True, color=_BLUE, alpha=0.6)
    grid = np.linspace(-ends, ends, 300)
    ax.plot(grid, np.exp(-0.5 * grid**2) / np.sqrt(2 * np.pi), color=_RED, lw=1.3, label="standard normal")
    ax.set(xlabel="residual in standard deviations", ylabel="density")
    ax.legend(fontsize=8, frameon=False)


def _spectrum(ax: Any, model: Model) -> None:
    values = torch.linalg.svdvals(model.posterior.prec_factor).square().numpy()
    values = values[values > 0]
    ax.bar(range(1, len(values) + 1), values, color=_BLUE, width=0.6)
    ax.axhline(_prior(model), color=_RED, lw=1.3, label="prior precision")
    ax.set(xlabel="direction", ylabel="precision", yscale="log")
    ax.set_xticks(range(1, len(values) + 1) if len(values) <= 20 else [1, len(values)])
    ax.legend(fontsize=8, frameon=False)


def _weights(ax: Any, model: Model) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    std = model.posterior.variance.sqrt().numpy()
    prior = _prior(model) ** -0.5
    low, high = min(float(std.min()), prior), max(float(std.max()), prior)
    bins = np.geomspace(low * 0.9, high * 1.1, 40)
    ax.hist(std, bins=bins, color=_BLUE, alpha=0.6)
    ax.axvline(prior, color=_RED, lw=1.3, label="prior")
    ax.set(xlabel="standard deviation", ylabel="weights", xscale="log", yscale="log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.legend(fontsize=8, frameon=False)


def _prior(model: Model) -> float:
    return float(model.record["settings"]["prior_precision"])
