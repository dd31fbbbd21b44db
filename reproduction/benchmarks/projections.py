"""Compare projections to the low-rank family: logistic regression with the paper's settings, and what a step costs.

`python reproduction/benchmarks/projections.py [beginning of a task's name …]` writes
`reproduction/results/projections.json`, which the tables of docs/projection.md are taken from. It needs the LIBSVM
data in SLANGVI_DATA. Results that are there already are kept, so that a run can be stopped and taken up again.

All splits, ranks and curvatures of a data set run in lockstep with the same examples and noise. A projection is a
function (U, d, target) → (U⁺, d⁺) in the few lines that define it; `slangvi.methods.projection` has the last one in
the form that streams over segments. Unused columns of U are zero, which every projection but the eigenvectors keeps.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import slangvi
from slangvi.methods import exact, slang
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.rows.blocks import Formed
from slangvi.rows.linear_predictor import LinearPredictorGradients
from slangvi.rows.operator import Segment
from slangvi.schedules import Rate
from slangvi_reproduction.experiments._logistic import DATASETS, Gaussian, Problem, symmetric_kl
from slangvi_reproduction.experiments._logistic_cells import load_problem

RANKS = (1, 5, 10)
CURVATURES = ("EF", "GGN")
RUNS = tuple((curvature, rank) for curvature in CURVATURES for rank in RANKS)
DRAWS, RATE, DECAY, MOMENTUM, SEED = 12, 0.05, 0.51, 0.9, 0
START = 20  # steps that keep eigenvectors before another projection takes over
LEAST_FREE = 0.1  # see `newton`
NAMES = {"australian": "Australian", "breast_cancer": "Breast cancer", "a1a": "a1a", "usps_3vs5": "USPS"}
PLACE = Path(__file__).parents[1] / "results" / "projections.json"


class Target:
    """The precision Λ = (1−β)(UUᵀ + D) + GᵀG + βλ of a step, for a batch of runs.

    Args:
        U: factor before the step, (K, P, L).
        d: diagonal before the step, (K, P).
        rows: G with all weights multiplied in, (K, R, P).
        prior: λ, (P,).
        beta: β.
        mask: ones for the columns that a run may use, (K, 1, L).
    """

    def __init__(self, U: Tensor, d: Tensor, rows: Tensor, prior: Tensor, beta: float, mask: Tensor) -> None:
        self.U, self.rows, self.beta, self.mask = U, rows, beta, mask
        self.base = torch.lerp(d, prior.expand_as(d), beta)  # (1−β)d + βλ
        self.diag = self.base + (1 - beta) * U.square().sum(-1) + rows.square().sum(-2)

    def times(self, X: Tensor) -> Tensor:
        """ΛX."""
        if X.shape[-2] <= 64:
            return self.matrix @ X
        old = (1 - self.beta) * (self.U @ (self.U.mT @ X))
        return self.base.unsqueeze(-1) * X + old + self.rows.mT @ (self.rows @ X)

    @cached_property
    def columns(self) -> Tensor:
        """C with Λ = CCᵀ + diag(base), (K, P, L + R)."""
        return torch.cat([(1 - self.beta) ** 0.5 * self.U, self.rows.mT], -1)

    @cached_property
    def matrix(self) -> Tensor:
        """Λ itself."""
        return self.columns @ self.columns.mT + torch.diag_embed(self.base)


class Exact(Target):
    """A dense matrix Λ as a target; β = 0 because nothing of it is old."""

    def __init__(self, matrix: Tensor, mask: Tensor) -> None:
        self.matrix, self.mask, self.beta = matrix, mask, 0.0
        self.diag = matrix.diagonal(dim1=-2, dim2=-1)

    def times(self, X: Tensor) -> Tensor:
        """ΛX."""
        return self.matrix @ X


Projection = Callable[[Tensor, Tensor, Target], tuple[Tensor, Tensor]]


def eigenvectors(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """The paper: leading eigenvectors of Λ − diag(base)."""
    new = _leading(target.columns, target.mask)
    return new, torch.maximum(target.diag - new.square().sum(-1), target.base)


def whitened_eigenvectors(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Leading eigenvectors of base^(−1/2)Λ base^(−1/2) − I: the best U for the noise `base`."""
    scale = target.base.sqrt().unsqueeze(-1)
    new = _leading(target.columns / scale, target.mask) * scale
    return new, torch.maximum(target.diag - new.square().sum(-1), target.base)


def alternation(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """The best U for the noise d, by eigenvectors of d^(−1/2)Λd^(−1/2); then d⁺ = diag(Λ − U⁺U⁺ᵀ)."""
    scale, rank = d.sqrt(), U.shape[-1]
    values, vectors = torch.linalg.eigh(target.matrix / (scale.unsqueeze(-1) * scale.unsqueeze(-2)))
    lengths = (values[..., -rank:].flip(-1) - 1).clamp_min(0.0).sqrt().unsqueeze(-2)
    new = scale.unsqueeze(-1) * vectors[..., -rank:].flip(-1) * lengths * target.mask
    return new, target.diag - new.square().sum(-1)


def em(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """One EM step of factor analysis."""
    C, E = _moments(U, d, target)
    new = torch.linalg.solve(E, C.mT).mT
    return new, target.diag - (new * C).sum(-1)


def px_em(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """EM with the covariance of the factors as a further parameter: E^(−1/2) in place of E⁻¹."""
    C, E = _moments(U, d, target)
    new = _factor(C, E)
    return new, target.diag - new.square().sum(-1)


def nystrom(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Products with Λ − (1−β)D in place of Λ, which removes the lag of weak directions."""
    keep = 1 - target.beta
    scaled = U / d.unsqueeze(-1)
    image = target.times(scaled)
    small = scaled.mT @ image + (1 - 2 * keep) * (U.mT @ scaled) + max(target.beta**2, 1e-12) * _eye(U)
    new = _factor(image - keep * U, small)
    return new, target.diag - new.square().sum(-1)


def newton(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """`nystrom`, with changes of d divided by the share of Q⁻¹ that is not the low-rank part's."""
    new, diag = nystrom(U, d, target)
    scaled = U / d.unsqueeze(-1)
    free = 1 - (torch.linalg.solve(_eye(U) + U.mT @ scaled, scaled.mT).mT * U).sum(-1)
    free = free.clamp_min(LEAST_FREE)
    change = diag - d
    return new, torch.where(change > 0, d + change / free, d * diag / (d + change * (1 - 1 / free)))


def repeated(projection: Projection, times: int) -> Projection:
    """Return some steps in a row toward the same target."""

    def several(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        for _ in range(times):
            U, d = projection(U, d, target)
        return U, d

    return several


PROJECTIONS: dict[str, Projection] = {
    "eig": eigenvectors,
    "whitened eig": whitened_eigenvectors,
    "alternation": alternation,
    "EM": em,
    "3 × EM": repeated(em, 3),
    "PX-EM": px_em,
    "Nyström": nystrom,
    "Nyström, scaled d": newton,
    "3 × PX-EM": repeated(px_em, 3),
}
CHOSEN = "Nyström, scaled d"
ORDER = [*PROJECTIONS, "optimum"]
CHEAP = (CHOSEN, "eig", "EM")  # in long runs, the ones that matter most first


def _leading(columns: Tensor, mask: Tensor) -> Tensor:
    """The leading L scaled eigenvectors of CCᵀ."""
    rank = mask.shape[-1]
    if columns.shape[-2] <= columns.shape[-1]:
        values, vectors = torch.linalg.eigh(columns @ columns.mT)
        return vectors[..., -rank:].flip(-1) * values[..., -rank:].flip(-1).clamp_min(0).sqrt().unsqueeze(-2) * mask
    return columns @ torch.linalg.eigh(columns.mT @ columns)[1][..., -rank:].flip(-1) * mask


def _moments(U: Tensor, d: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """ΛBᵀ and E = I − BU + BΛBᵀ."""
    scaled = U / d.unsqueeze(-1)
    inverse = torch.linalg.inv(_eye(U) + U.mT @ scaled)
    B_t = scaled @ inverse
    C = target.times(B_t)
    return C, inverse + B_t.mT @ C


def _factor(C: Tensor, small: Tensor) -> Tensor:
    """A factor of C small⁻¹ Cᵀ."""
    return torch.linalg.solve_triangular(torch.linalg.cholesky(0.5 * (small + small.mT)), C.mT, upper=False).mT


def _eye(U: Tensor) -> Tensor:
    return torch.eye(U.shape[-1], dtype=U.dtype)


# ---- training


class Trained(NamedTuple):
    """What a run leaves.

    Args:
        divergences: epochs → symmetric KL of every run and split, (RUNS, splits).
        seconds: of one step.
    """

    divergences: dict[int, Tensor]
    seconds: float


def mask_of(splits: int) -> Tensor:
    """Columns that each run may use, (RUNS · splits, 1, L)."""
    used = torch.arange(max(RANKS)) < torch.tensor([rank for _, rank in RUNS]).unsqueeze(-1)
    return used.double().unsqueeze(1).repeat_interleave(splits, 0)


def reference(problem: Problem) -> Gaussian:
    """The best full Gaussian of each split."""
    prior = problem.prior
    found = exact.fit(problem.x_train, problem.y_train, prior_precision=prior.precision, prior_mean=prior.mean)
    return Gaussian(found.loc, found.covariance)


def train(dataset: str, problem: Problem, best: Gaussian, projection: Projection, marks: tuple[int, ...]) -> Trained:
    """Train all runs; `marks` are the epochs after which the divergence is taken, the last one ends the run."""
    (splits, num_data, size), batch = problem.shape, DATASETS[dataset].batch_size
    count, rank, mask = len(RUNS), max(RANKS), mask_of(splits)
    signs = 2 * problem.y_train.unsqueeze(-1) - 1  # with the sign of its label in each row no step looks labels up
    data = (signs * problem.x_train).reshape(splits * num_data, size)
    starts = num_data * torch.arange(splits).unsqueeze(-1)
    is_ggn = torch.tensor([curvature == "GGN" for curvature, _ in RUNS]).repeat_interleave(splits).view(-1, 1, 1)
    best = Gaussian(best.loc.repeat(count, 1), best.covariance.repeat(count, 1, 1))
    source = torch.Generator().manual_seed(SEED)
    prior = problem.prior.precision
    U = torch.zeros(count * splits, size, rank, dtype=torch.float64)
    mean, momentum, d = torch.zeros_like(U[..., 0]), torch.zeros_like(U[..., 0]), torch.ones_like(U[..., 0])
    scaled, small = U, torch.linalg.cholesky(_eye(U) + U.mT @ U)
    when = {epochs * num_data // batch: epochs for epochs in marks}
    found: dict[int, Tensor] = {}
    begin = time.perf_counter()
    for step in range(1, max(when) + 1):
        rate = RATE / (1 + step**DECAY)
        noise = torch.randn(splits, DRAWS, size + rank, generator=source).double().repeat(count, 1, 1)
        image = noise[..., :size] * d.sqrt().unsqueeze(-2) + noise[..., size:] @ U.mT  # has the covariance UUᵀ + D
        thetas = mean.unsqueeze(-2) + image / d.unsqueeze(-2)
        thetas -= torch.cholesky_solve((image @ scaled).mT, small).mT @ scaled.mT
        pick = torch.randint(num_data, (splits, batch), generator=source) + starts
        x = data.index_select(0, pick.view(-1)).view(splits, batch, size).repeat(count, 1, 1)
        probability = torch.sigmoid(x @ thetas.mT)  # of the label that was seen
        slope = probability - 1
        gradient = num_data / (batch * DRAWS) * (slope.sum(-1, keepdim=True) * x).sum(-2)
        weights = torch.where(is_ggn, -probability * slope, slope.square()).sum(-1, keepdim=True)
        rows = x * (rate * num_data / (batch * DRAWS) * weights).sqrt()
        target = Target(U, d, rows, prior, rate, mask)
        U, d = (eigenvectors if step <= START else projection)(U, d, target)
        scaled = U / d.unsqueeze(-1)
        small = torch.linalg.cholesky(_eye(U) + U.mT @ scaled)
        momentum = torch.lerp(gradient, momentum, MOMENTUM)
        slope = momentum / (1 - MOMENTUM**step) + prior * mean
        within = torch.cholesky_solve((slope.unsqueeze(-2) @ scaled).mT, small).mT @ scaled.mT
        mean = mean - rate * (slope / d - within.squeeze(-2))
        if step in when:
            found[when[step]] = symmetric_kl(Gaussian(mean, _covariance(U, d)), best).view(count, splits)
    return Trained(found, (time.perf_counter() - begin) / max(when))


def _covariance(U: Tensor, d: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(U @ U.mT + torch.diag_embed(d)))


def exact_projections(problem: Problem, best: Gaussian) -> dict[str, dict[str, list[float]]]:
    """Project the exact precision: eigenvectors, whitened ones, and the optimum of the family in KL(q‖p)."""
    splits = problem.shape[0]
    matrix = torch.cholesky_inverse(torch.linalg.cholesky(best.covariance)).repeat(len(RANKS), 1, 1)
    mask = mask_of(splits)[: len(RANKS) * splits]
    target = Exact(matrix, mask)
    lam = problem.prior.precision.expand_as(target.diag)
    curvature = matrix - torch.diag_embed(lam)
    values, vectors = torch.linalg.eigh(curvature)
    target.columns, target.base = vectors * values.clamp_min(0).sqrt().unsqueeze(-2), lam
    points = {"eig": eigenvectors(curvature, lam, target)}
    U, d = points["eig"]
    for _ in range(3000):
        U, d = px_em(U, d, target)
    points["optimum"] = (U, d)
    center = best.loc.repeat(len(RANKS), 1)
    best = Gaussian(center, best.covariance.repeat(len(RANKS), 1, 1))
    found = {}
    for name, (factor, diag) in points.items():
        apart = symmetric_kl(Gaussian(center, _covariance(factor, diag)), best).view(len(RANKS), splits)
        found[name] = {f"any {rank}": _summary(row) for rank, row in zip(RANKS, apart, strict=True)}
    return found


def _summary(values: Tensor) -> list[float]:
    """Mean, and its standard error."""
    error = values.std() / len(values) ** 0.5 if len(values) > 1 else torch.zeros(())
    return [float(f"{float(x):.5g}") for x in (values.mean(), error)]


# ---- cost of the library's own step


class RowsAboveFactor:
    """Rows that are held above those of U in one tensor for each segment, as a network's are."""

    scale, spectrum_route = 1.0, "auto"

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.num_rows, self.height = rows, len(rows), len(rows)
        self.kept: dict[int, Tensor] = {}

    def sum(self) -> Tensor:
        """Their sum."""
        return self.rows.sum(0)

    def square_sum(self) -> Tensor:
        """The sum of their squares."""
        return self.rows.square().sum(0)

    def form(self) -> Tensor:
        """The rows."""
        return self.rows

    def segments(self, cuts: Sequence[int] = (), below: Tensor | None = None) -> Iterator[Segment]:
        """100,000 columns at a time."""
        assert below is not None
        size = self.rows.shape[1]
        for start in range(0, size, 100_000):
            columns = slice(start, min(size, start + 100_000))
            if start not in self.kept:
                self.kept[start] = torch.cat([self.rows[:, columns], below[:, columns]])
            yield Segment(columns, Formed(self.kept[start][: self.height], self.kept[start]))


def milliseconds(size: int, rank: int, height: int, is_network: bool) -> dict[str, float]:
    """Median time of `slang.update` by projection, taken in turn."""
    torch.manual_seed(SEED)
    dtype = torch.float32 if is_network else torch.float64
    rows, slopes = torch.randn(height, size, dtype=dtype), torch.randn(DRAWS, height, dtype=dtype)
    spec = ParamSpec(("weights",), (torch.Size((size,)),))
    diag = torch.rand(size, dtype=dtype) + 1
    factor = torch.randn(rank, size, dtype=dtype)
    state = slang.State(torch.randn(size, dtype=dtype), factor, diag, torch.zeros(size, dtype=dtype), 1000, spec)
    prior = Prior(torch.ones(size, dtype=dtype), torch.zeros(size, dtype=dtype))
    times: dict[str, list[float]] = {"eig": [], "em": []}
    for _ in range(15 if is_network else 200):
        for name, taken in times.items():
            gradients = RowsAboveFactor(rows) if is_network else LinearPredictorGradients(rows, slopes)
            if isinstance(gradients, RowsAboveFactor):
                list(gradients.segments(below=factor))
            begin = time.perf_counter()
            slang.update(state, gradients, num_data=1000.0, prior=prior, lr=Rate(0.01), projection=name, in_place=True)
            taken.append(1e3 * (time.perf_counter() - begin))
    return {name: float(f"{statistics.median(taken[2:]):.3g}") for name, taken in times.items()}


SIZES = {  # P, L, R, and whether float32 rows lie above U, as a network's do
    "P = 500,000, R = 32, L = 1": (500_000, 1, 32, True),
    "P = 500,000, R = 32, L = 8": (500_000, 8, 32, True),
    "P = 500,000, R = 32, L = 32": (500_000, 32, 32, True),
    "Australian: P = 15, R = 32, L = 5": (15, 5, 32, False),
    "a1a: P = 124, R = 128, L = 10": (124, 10, 128, False),
    "USPS: P = 257, R = 64, L = 10": (257, 10, 64, False),
}


def cost_table(costs: dict[str, dict[str, float]]) -> str:
    """Milliseconds of an update by size."""
    lines = ["| size | eig, ms | em, ms | ratio |", "|---|---:|---:|---:|"]
    lines += [f"| {k} | {t['eig']:.3g} | {t['em']:.3g} | {t['em'] / t['eig']:.2f} |" for k, t in costs.items()]
    return "\n".join(lines)


# ---- tables and file


def table(entry: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """One line for each projection, one column for each curvature and rank."""
    first = next(iter(entry.values()))
    columns = list(first)
    lines = ["| projection | " + " | ".join(_heading(c) for c in columns) + " |", "|---|" + "---:|" * len(columns)]
    for name in sorted(entry, key=ORDER.index):
        label = f'**{name}**: `projection="em"`' if name == CHOSEN else name
        lines.append(f"| {label} | " + " | ".join(f"{entry[name][c][0]:.3g}" for c in columns) + " |")
    return "\n".join(lines)


def _heading(column: str) -> str:
    curvature, rank = column.split()
    return f"L = {rank}" if curvature == "any" else f"{curvature}, L = {rank}"


class Task(NamedTuple):
    """One table.

    Args:
        dataset: name of the data.
        splits: how many, from the first.
        epochs: passes over the data.
        projections: names.
    """

    dataset: str
    splits: int
    epochs: int
    projections: tuple[str, ...]


ALL = tuple(PROJECTIONS)
TASKS = {
    "Australian, 1,000 epochs, 4 splits": Task("australian", 4, 1000, ALL),
    "Breast cancer, 1,000 epochs, 4 splits": Task("breast_cancer", 4, 1000, ALL),
    "a1a, 100 epochs": Task("a1a", 1, 100, tuple(n for n in ALL if n != "alternation")),
    "USPS, 300 epochs, 5 splits": Task("usps_3vs5", 5, 300, CHEAP),
    "a1a, 1,000 epochs": Task("a1a", 1, 1000, CHEAP),
    "Breast cancer, 10,000 epochs, 20 splits": Task("breast_cancer", 20, 10_000, CHEAP),
    "Australian, 10,000 epochs, 20 splits": Task("australian", 20, 10_000, CHEAP[:2]),
    "a1a, 10,000 epochs": Task("a1a", 1, 10_000, CHEAP[:1]),
    "USPS, 10,000 epochs, 5 splits": Task("usps_3vs5", 5, 10_000, CHEAP[:1]),
}
OFFLINE = {"Australian": ("australian", 20), "Breast cancer": ("breast_cancer", 20), "a1a": ("a1a", 1)}


def main() -> None:
    torch.set_num_threads(1)
    record = json.loads(PLACE.read_text(encoding="utf-8")) if PLACE.exists() else {}
    found, seconds, costs = (record.get(key, {}) for key in ("results", "seconds", "milliseconds"))
    only = tuple(sys.argv[1:] or [""])

    def save() -> None:
        about = {
            "command": "python reproduction/benchmarks/projections.py",
            "seed": SEED,
            "versions": {
                "slangvi": slangvi.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "device": platform.processor() or platform.machine(),
            "threads": 1,
            "results": found,
            "seconds": seconds,
            "milliseconds": costs,
        }
        PLACE.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    for name, (dataset, splits) in OFFLINE.items():
        key = f"{name}, exact precision"
        if key not in found and key.startswith(only):
            problem = load_problem(dataset, tuple(range(1, splits + 1)))
            found[key] = exact_projections(problem, reference(problem))
            print(key, found[key], flush=True)
            save()
    for key, sizes in SIZES.items():
        if key not in costs and f"cost, {key}".startswith(only):
            with torch.inference_mode():
                costs[key] = milliseconds(*sizes)
            print(key, costs[key], flush=True)
            save()
    for key, (dataset, splits, epochs, projections) in TASKS.items():
        if not key.startswith(only) or set(projections) <= set(found.get(key, {})):
            continue
        problem = load_problem(dataset, tuple(range(1, splits + 1)))
        best = reference(problem)
        for name in projections:
            if name in found.get(key, {}):
                continue
            trained = train(dataset, problem, best, PROJECTIONS[name], (epochs,))
            rows = trained.divergences[epochs]
            each = {f"{c} {r}": _summary(row) for (c, r), row in zip(RUNS, rows, strict=True)}
            found.setdefault(key, {})[name] = each
            seconds.setdefault(key, {})[name] = float(f"{trained.seconds:.3g}")
            print(key, name, {run: value[0] for run, value in each.items()}, trained.seconds, flush=True)
            save()


if __name__ == "__main__":
    main()
