"""Diagnoses as they are shown: findings in sentences, a table of layers, numbers, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Diagnosis", "Finding", "Layer"]

# Columns of the text, and those before a sentence.
_WIDTH, _INDENT = 110, 9


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        level: "ok", "note" for what is worth knowing, or "warning" for what should be changed.
        name: of what was looked at.
        sentence: what was found.
        remedy: what to do about it; empty where nothing is.
    """

    level: str
    name: str
    sentence: str
    remedy: str = ""


@dataclass(frozen=True)
class Layer:
    """Posterior of one parameter tensor; numbers of its entries are medians unless said otherwise.

    Args:
        name: of the parameter.
        size: number of entries.
        stddev: posterior standard deviation.
        smallest: least standard deviation.
        largest: greatest standard deviation.
        prior_stddev: 1/√λ.
        ratio: standard deviation over the prior's.
        signal_to_noise: absolute mean over standard deviation.
        effective: effective number of parameters, Σ (1 − λᵢΣᵢᵢ).
        start_ratio: standard deviation over that at the start; None if the start is not known.
        moved: root mean square of (μ − start)/sd; None without the weights of the start.
    """

    name: str
    size: int
    stddev: float
    smallest: float
    largest: float
    prior_stddev: float
    ratio: float
    signal_to_noise: float
    effective: float
    start_ratio: float | None = None
    moved: float | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    r"""Numbers of a diagnosis, and findings about them; print it. Build it with `slangvi.diagnose`.

    Numbers that need a batch, a history, or what a method does not have, are None.

    Args:
        method: name of the optimizer or of the functional method.
        step: steps taken.
        num_params: P.
        num_data: N.
        temperature: of the likelihood.
        rank: L; None for a dense precision.
        layers: a `Layer` for each parameter tensor.
        kl: KL(q ‖ prior), in nats.
        effective_parameters: $\gamma = \sum_i (1 - \lambda_i \Sigma_{ii})$, how many parameters the data determine.
        captured: share of the curvature that rank L holds: of the batch's relative to its diagonal, see
            `BatchCurvature.captured`; without a batch `info.captured` of the last step.
        enough_rank: smallest rank that captures 90 % of the batch's curvature.
        faithful_rank: smallest of 0, 1, 2, 4, … whose best approximation keeps 80 % of the reference sd.
        shrinkage: median of sd over that of the reference (λ + Ĝ)⁻¹, over entries that the data inform.
        coverage: tr(Σ_A Ĝ_B)/tr(Σ_A Ĝ_A) of two halves of the batch; 1 where the batch knows all directions, and
            exactly 1 if it holds all N examples.
        spectrum: eigenvalues of the batch's curvature relative to its diagonal, largest first.
        gradient_noise: simple noise scale tr Cov(g)/‖E g‖², the batch size at which noise equals signal.
        draw_share: share of draws in the noise of the gradient of a step's examples at one draw.
        step_examples: examples of a step, as far as its rows tell.
        batch_examples: examples of the batch.
        start_share: estimated share of the starting precision that is left, Π(1 − βₜ).
        moved: root mean square over all parameters of (μ − start)/sd.
        skipped: batches with NaN or Inf that were passed over.
        rank_used: directions above rounding in the last step.
        exceeds_num_data: whether a batch was larger than N.
        curves: name → numbers over `curves["step"]`, from a `History`.
        findings: in the order of looking.
    """

    method: str
    step: int
    num_params: int
    num_data: int
    temperature: float
    rank: int | None
    layers: tuple[Layer, ...]
    kl: float
    effective_parameters: float
    captured: float | None = None
    enough_rank: int | None = None
    faithful_rank: int | None = None
    shrinkage: float | None = None
    coverage: float | None = None
    spectrum: tuple[float, ...] = ()
    gradient_noise: float | None = None
    draw_share: float | None = None
    batch_examples: int | None = None
    step_examples: int | None = None
    start_share: float | None = None
    moved: float | None = None
    skipped: int = 0
    rank_used: int | None = None
    exceeds_num_data: bool = False
    curves: Mapping[str, list[float]] = field(default_factory=dict, repr=False)
    findings: tuple[Finding, ...] = ()

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that ask for a change."""
        return tuple(finding for finding in self.findings if finding.level == "warning")

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of one name."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"{name!r} was not looked at; there are {', '.join(f.name for f in self.findings)}.")

    def __str__(self) -> str:
        """Return a head line, the table of layers, and the findings with what to do about them."""
        width = max(5, *(len(layer.name) for layer in self.layers))
        lines = [*self.summary, ""]
        lines += [f"{name:<{width}}" + "".join(f" {cell:>10}" for cell in cells) for name, *cells in self.table]
        lines.append("")
        for finding in self.findings:
            lines.append(_wrapped(f"{finding.level:<{_INDENT}}", f"{finding.name}: {finding.sentence}"))
            if finding.remedy:
                lines.append(_wrapped(" " * _INDENT, f"→ {finding.remedy}"))
        return "\n".join(lines)

    @property
    def summary(self) -> tuple[str, str]:
        """Two sentences: what it is a diagnosis of, and how much the data say."""
        rank = "dense precision" if self.rank is None else f"rank {self.rank}"
        share = self.effective_parameters / self.num_params
        return (
            f"{self.method} after {self.step:,} steps: {self.num_params:,} parameters, {rank}, N = {self.num_data:,}.",
            f"Effective parameters {self.effective_parameters:,.1f} ({share:.1%}), KL to prior {self.kl:,.1f} nats.",
        )

    @property
    def table(self) -> list[list[str]]:
        """The table of layers as text, its head first."""
        rows = [["layer", "size", "sd", "smallest", "largest", "prior sd", "ratio", "|mean|/sd", "effective", "moved"]]
        for layer in self.layers:
            numbers = (layer.stddev, layer.smallest, layer.largest, layer.prior_stddev, layer.ratio)
            cells = [f"{layer.size:,}", *(f"{x:.3g}" for x in (*numbers, layer.signal_to_noise))]
            moved = "–" if layer.moved is None else f"{layer.moved:.3g}"
            rows.append([layer.name, *cells, f"{layer.effective:.1f}", moved])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as dicts, lists, numbers and strings for JSON; numbers that are not finite become None."""
        found: dict[str, Any] = _plain(asdict(self))
        return found

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw sds by layer, the spectrum of the curvature, and curves over steps; return a matplotlib figure.

        Args:
            path: file to write the picture to; None writes none.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("pictures need matplotlib: pip install 'slangvi[plot]'") from error
        drawn = [self._draw_layers, self._draw_spectrum, self._draw_curves]
        known = [True, bool(self.spectrum), bool({"loss", "kl"} & self.curves.keys())]
        drawn = [draw for draw, is_known in zip(drawn, known, strict=True) if is_known]
        figure, axes = plt.subplots(1, len(drawn), figsize=(4.2 * len(drawn), 3.4), layout="constrained", squeeze=False)
        for draw, ax in zip(drawn, axes[0], strict=True):
            draw(ax)
            ax.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path)
        return figure

    def _draw_layers(self, ax: Axes) -> None:
        """Draw the range and median of each layer's sd over the prior's."""
        places = list(range(len(self.layers)))
        for place, layer in zip(places, self.layers, strict=True):
            ends = [layer.smallest / layer.prior_stddev, layer.largest / layer.prior_stddev]
            ax.plot(ends, [place, place], color="0.6", lw=2)
        ax.plot([layer.ratio for layer in self.layers], places, "o", ms=5)
        ax.axvline(1.0, color="0.3", lw=1, ls="--")
        ax.set_yticks(places, [layer.name for layer in self.layers])
        ax.invert_yaxis()
        ax.set(xscale="log", xlabel="posterior sd / prior sd")

    def _draw_spectrum(self, ax: Axes) -> None:
        """Draw the eigenvalues of the batch's curvature relative to its diagonal, and the rank."""
        ax.plot(range(1, len(self.spectrum) + 1), self.spectrum, marker=".", ms=4, lw=1)
        if self.rank:
            ax.axvline(self.rank, color="0.3", lw=1, ls="--", label=f"rank {self.rank}")
            ax.legend(fontsize=8)
        ax.set(xscale="log", yscale="log", xlabel="direction", ylabel="relative eigenvalue")

    def _draw_curves(self, ax: Axes) -> None:
        """Draw loss and KL over steps."""
        for name in [name for name in ("loss", "kl") if name in self.curves]:
            ax.plot(self.curves["step"], self.curves[name], lw=1.2, label=name)
        ax.set(xlabel="step", ylabel="nats")
        ax.legend(fontsize=8)


def _wrapped(head: str, text: str) -> str:
    """Return text behind a head, in lines that fit a terminal."""
    return fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _plain(value: Any) -> Any:
    """Return a nested value with lists for tuples, and None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
