"""The demo: SLANG and Adam train the same networks on a curve and on patients' data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi import metrics
from slangvi.data.toy import Split, breast_cancer, cubic
from slangvi.likelihoods import Gaussian
from slangvi.methods.slang import SLANG
from slangvi.predict import functional_samples, predictive_samples

Progress = Callable[[str, int, int], None]


class Row(NamedTuple):
    """One line of the table: a score such as "98.2 %" or "RMSE 4.1", the NLL in nats and the calibration error."""

    data: str
    method: str
    score: str
    nll: float
    calibration: float


@dataclass(frozen=True)
class Setting:
    """One data set and how to train on it: options of SLANG, whether its rates fall to zero, and lengths."""

    label: str
    hidden: int
    outputs: int
    slang: dict[str, Any]
    falls: bool
    mc_samples: int
    epochs: int
    batch: int
    adam_lr: float
    adam_epochs: int


_CUBIC_SLANG = {"rank": 5, "lr": 0.3, "precision_lr": 0.03, "prior_precision": 0.03}
_PATIENTS_SLANG = {"rank": 4, "lr": 0.02, "precision_lr": 0.02, "prior_precision": 1.0}
CUBIC = Setting("noisy cubic", 20, 1, _CUBIC_SLANG, False, 4, 1200, 30, 1e-2, 2000)
PATIENTS = Setting("breast cancer", 50, 2, _PATIENTS_SLANG, True, 2, 100, 32, 3e-3, 100)
NOISE = 3.0
TEST_DRAWS = 256


class Curve(NamedTuple):
    """The regression in the picture: data, grid, draws of f on the grid, and Adam's curve."""

    x: Tensor
    y: Tensor
    grid: Tensor
    draws: Tensor
    adam: Tensor


class DemoResult(NamedTuple):
    """The table and the contents of the picture.

    The confidence of each method is the probability of the predicted class, and whether that was right, (n,) each.
    """

    rows: list[Row]
    curve: Curve
    confidence: dict[str, tuple[Tensor, Tensor]]


def run(seed: int = 0, progress: Progress = lambda label, done, total: None, quick: bool = False) -> DemoResult:
    """Train SLANG and Adam on both data sets, a twentieth of the epochs if `quick`."""
    curve, rows = _run_cubic(seed, progress, quick)
    confidence, more = _run_patients(seed, progress, quick)
    return DemoResult(rows + more, curve, confidence)


def _run_cubic(seed: int, progress: Progress, quick: bool) -> tuple[Curve, list[Row]]:
    x, y = cubic(30, generator=torch.Generator().manual_seed(seed))
    x_test, y_test = cubic(500, half_width=5.0, generator=torch.Generator().manual_seed(seed + 1))
    x_scale, y_scale = x.std(), y.std()
    likelihood = Gaussian(float((y_scale / NOISE) ** 2))
    generator = torch.Generator().manual_seed(seed)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return -likelihood.log_prob(outputs, targets).mean()

    split = Split(x / x_scale, y / y_scale, x_test / x_scale, y_test / y_scale)
    slang, adam = _train_both(CUBIC, split, loss, seed, generator, progress, quick)

    def draws_at(points: Tensor) -> Tensor:
        inputs = points / x_scale
        return functional_samples(slang.model, slang.posterior, inputs, TEST_DRAWS, generator=generator) * y_scale

    grid = torch.linspace(-6, 6, 241).unsqueeze(1)
    with torch.no_grad():
        fits = {"SLANG": draws_at(x_test), "Adam": adam(x_test / x_scale).unsqueeze(0) * y_scale}
        curve = Curve(x, y, grid, draws_at(grid), adam(grid / x_scale) * y_scale)
    rows = []
    for method, draws in fits.items():
        noisy = draws.expand(TEST_DRAWS, -1, -1) + NOISE * torch.randn(TEST_DRAWS, *y_test.shape, generator=generator)
        score = f"RMSE {metrics.rmse(draws.mean(0), y_test):.1f}"
        nll = metrics.mixture_nll(draws, NOISE, y_test)
        rows.append(Row(CUBIC.label, method, score, nll, metrics.interval_error(noisy, y_test)))
    return curve, rows


def _run_patients(seed: int, progress: Progress, quick: bool) -> tuple[dict[str, tuple[Tensor, Tensor]], list[Row]]:
    split = breast_cancer(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    slang, adam = _train_both(PATIENTS, split, F.cross_entropy, seed, generator, progress, quick)
    draws = predictive_samples(slang.model, slang.posterior, split.x_test, TEST_DRAWS, generator=generator)
    with torch.no_grad():
        probs = {"SLANG": draws.mean(0), "Adam": adam(split.x_test).softmax(-1)}
    rows, confidence = [], {}
    for method, p in probs.items():
        score = f"{100 * metrics.accuracy(p, split.y_test):.1f} %"
        rows.append(Row(PATIENTS.label, method, score, metrics.nll(p, split.y_test), metrics.ece(p, split.y_test)))
        top, predicted = p.max(-1)
        confidence[method] = (top, predicted == split.y_test)
    return confidence, rows


def _train_both(
    setting: Setting,
    data: Split,
    loss: Callable[[Tensor, Tensor], Tensor],
    seed: int,
    generator: torch.Generator,
    progress: Progress,
    quick: bool,
) -> tuple[SLANG, nn.Module]:
    """Train the same network from the same start, once with SLANG and once with Adam."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(data.x_train), generator=generator).split(setting.batch):
            yield data.x_train[index], data.y_train[index]

    lengths = setting.epochs, setting.adam_epochs
    epochs, adam_epochs = (max(1, length // 20) for length in lengths) if quick else lengths
    sizes = data.x_train.shape[1], setting.hidden, setting.outputs
    network, twin = _network(*sizes, seed), _network(*sizes, seed)
    slang = SLANG(network, num_data=len(data.x_train), generator=generator, **setting.slang)
    steps = epochs * -(-len(data.x_train) // setting.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(slang, steps) if setting.falls else None
    for epoch in range(epochs):
        for x, y in batches():
            for _ in range(setting.mc_samples):
                with slang.sampled_params(train=True):
                    slang.zero_grad()
                    loss(network(x), y).backward()
            slang.step()
            if schedule is not None:
                schedule.step()
        progress(f"{setting.label}: SLANG", epoch + 1, epochs)
    adam = torch.optim.Adam(twin.parameters(), lr=setting.adam_lr)
    for epoch in range(adam_epochs):
        for x, y in batches():
            adam.zero_grad()
            loss(twin(x), y).backward()
            adam.step()
        progress(f"{setting.label}: Adam", epoch + 1, adam_epochs)
    return slang, twin


def _network(inputs: int, hidden: int, outputs: int, seed: int) -> nn.Module:
    """Make a network of one hidden layer; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def plot(result: DemoResult, path: Path) -> None:
    """Write one PNG: predictive bands of the regression, and the losses of the classification."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'slangvi[plot]'") from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
    _plot_curve(left, result.curve)
    _plot_confidence(right, result.confidence)
    figure.savefig(path, dpi=120)


def _plot_curve(axes: Any, curve: Curve) -> None:
    grid = curve.grid[:, 0]
    mean, std = curve.draws[..., 0].mean(0), curve.draws[..., 0].std(0)
    total = (std.square() + NOISE**2).sqrt()
    axes.axvspan(-4, 4, color="0.95", label="where the data lie")
    axes.fill_between(grid, mean - 2 * total, mean + 2 * total, color="#9ecae1", label="SLANG ± 2 sd, with noise")
    axes.fill_between(grid, mean - 2 * std, mean + 2 * std, color="#4292c6", label="SLANG ± 2 sd, of the function")
    axes.plot(grid, mean, color="#08306b", lw=1.5, label="SLANG mean")
    axes.plot(grid, curve.adam[:, 0], color="#d94801", lw=1.2, label="Adam")
    axes.plot(grid, grid**3, color="black", lw=1, ls="--", label="truth")
    axes.plot(curve.x, curve.y, "o", color="black", ms=3.5, label="30 training points")
    axes.set(xlim=(-6, 6), ylim=(-220, 220), xlabel="x", ylabel="y", title="Noisy cubic: bands widen where data end")
    axes.legend(fontsize=7.5, loc="upper left")


def _plot_confidence(axes: Any, confidence: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Draw the negative log-probability of the truth, worst examples first."""
    for (method, (top, right)), color in zip(confidence.items(), ("#08306b", "#d94801"), strict=True):
        truth = torch.where(right, top, 1 - top).double().clamp_min(1e-12)
        worst = truth.log().neg().sort(descending=True).values[:40]
        axes.plot(range(1, len(worst) + 1), worst, "o-", ms=3, lw=1, color=color, label=method)
    axes.set(xlabel="test patients, worst first", ylabel="−log p(true class), nats", title="Breast cancer: test loss")
    axes.legend(fontsize=8)
