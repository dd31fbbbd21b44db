"""How many rows of curvature a step needs: logistic regression against the exact answer, and networks.

`python reproduction/benchmarks/curvature_rows.py [beginning of a task's name …]` writes
`reproduction/results/curvature-rows.json`, which the table of docs/settings.md is taken from. It needs MNIST and
two UCI sets in SLANGVI_DATA; the other data are bundled with scikit-learn. Tasks that are there already are kept.
MNIST is trained on a GPU where there is one.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import slangvi
from slangvi_reproduction.data.mnist import load_mnist
from slangvi_reproduction.data.uci import load_uci

ROWS = (4, 8, 16, 32, None)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = (0, 1, 2)
NAMES = {"kl": "symmetric KL", "nll": "NLL", "error": "error", "rmse": "RMSE", "log-likelihood": "log-likelihood"}
PLACE = Path(__file__).parents[1] / "results" / "curvature-rows.json"


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-6)


def logistic(rows: int | None, rank: int, epochs: int, seed: int) -> dict[str, float]:
    """Symmetric KL to the best Gaussian, the paper's rates: batches of 32, 12 draws."""
    data = load_breast_cancer()
    x = torch.cat([torch.ones(len(data.data), 1), standardised(torch.tensor(data.data))], 1).double()[:, :11]
    y = torch.tensor(data.target).double()
    best = slangvi.exact.fit(x, y, prior_precision=1.0, family="full")
    exact = MultivariateNormal(best.loc, best.covariance)
    vi = slangvi.slang.build(
        lambda params, batch: slangvi.Bernoulli().log_prob(batch[0] @ params["w"], batch[1]),
        num_data=len(x),
        rank=rank,
        lr=slangvi.inverse_time(0.05, 0.51),
        mc_samples=12,
        engine="factored",
        curvature_rows=rows,
        precision_warmup=False,
        on_divergence="ignore",
    )
    source = torch.Generator().manual_seed(seed)
    state = vi.init({"w": torch.zeros(x.shape[1], dtype=torch.float64)})
    begin = time.perf_counter()
    for _ in range(epochs * len(x) // 32):
        pick = torch.randint(len(x), (32,), generator=source)
        state, _ = vi.update(state, (x[pick], y[pick]), generator=source)
    seconds = time.perf_counter() - begin
    q = vi.posterior(state)
    mine = MultivariateNormal(q.loc, q.covariance_matrix)
    divergence = 0.5 * (kl_divergence(mine, exact) + kl_divergence(exact, mine))
    return {"kl": float(divergence), "seconds": seconds}


def digits(rows: int | None, rank: int, epochs: int, seed: int) -> dict[str, float]:
    """Test NLL and error of a 64-100-100-10 network, batches of 100, one draw."""
    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(seed))
    x, y = (torch.tensor(data.data / 16.0).float()[order], torch.tensor(data.target)[order])
    return train_network((x[:1300], y[:1300]), (x[1300:], y[1300:]), 100, 100, 0.1, rows, rank, epochs, seed)


def mnist(rows: int | None, rank: int, epochs: int, lr: float, seed: int) -> dict[str, float]:
    """Test NLL and error of a 784-400-400-10 network on MNIST, batches of 200, one draw."""
    parts = load_mnist("train"), load_mnist("test")
    train, test = ((part.x.flatten(1).to(DEVICE), part.y.to(DEVICE)) for part in parts)
    return train_network(train, test, 400, 200, lr, rows, rank, epochs, seed)


def train_network(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    width: int,
    batch: int,
    lr: float,
    rows: int | None,
    rank: int,
    epochs: int,
    seed: int,
) -> dict[str, float]:
    (x_train, y_train), (x_test, y_test) = train, test
    size, inputs = x_train.shape
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model.to(x_train.device)
    source, order = torch.Generator(x_train.device).manual_seed(seed), torch.Generator().manual_seed(seed)
    opt = slangvi.SLANG(
        model,
        num_data=size,
        rank=rank,
        generator=source,
        curvature_rows=rows,
        lr=lr,
        **slangvi.slow_precision(size, steps=-(-size // batch) * epochs),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, -(-size // batch) * epochs)
    begin = time.perf_counter()
    try:
        for _ in range(epochs):
            for pick in torch.randperm(size, generator=order).to(x_train.device).split(batch):
                with opt.sampled_params(train=True):
                    opt.zero_grad()
                    F.cross_entropy(model(x_train[pick]), y_train[pick]).backward()
                opt.step()
                schedule.step()
    except slangvi.NumericalError:  # the run diverged
        return {"nll": math.nan, "error": math.nan, "seconds": math.nan}
    seconds = time.perf_counter() - begin
    probs = slangvi.predictive_samples(model, opt.posterior, x_test, n_samples=64, generator=source).mean(0)
    return {
        "nll": float(slangvi.metrics.nll(probs, y_test)),
        "error": float((probs.argmax(1) != y_test).double().mean()),
        "seconds": seconds,
    }


def uci(name: str, rows: int | None, rank: int, epochs: int, seed: int) -> dict[str, float]:
    """Test RMSE and log-likelihood of a network with 50 hidden units on the split of the seed, batches of 100."""
    data = load_uci(name)
    train, test = data.splits[seed].train, data.splits[seed].test
    x = (data.x - data.x[train].mean(0)) / data.x[train].std(0).clamp_min(1e-6)
    mean, scale = data.y[train].mean(), data.y[train].std()
    x, y = x.float(), ((data.y - mean) / scale).float()
    torch.manual_seed(seed)
    model, noise = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1)), 0.2
    source, steps = torch.Generator().manual_seed(seed), -(-len(train) // 100) * epochs
    slow = slangvi.slow_precision(len(train), steps=steps)
    opt = slangvi.SLANG(model, num_data=len(train), rank=rank, generator=source, curvature_rows=rows, lr=0.02, **slow)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    begin = time.perf_counter()
    try:
        for _ in range(epochs):
            for pick in train[torch.randperm(len(train), generator=source)].split(100):
                with opt.sampled_params(train=True):
                    opt.zero_grad()
                    (0.5 * F.mse_loss(model(x[pick])[:, 0], y[pick]) / noise**2).backward()
                opt.step()
                schedule.step()
    except slangvi.NumericalError:  # the run diverged
        return {"rmse": math.nan, "log-likelihood": math.nan, "seconds": math.nan}
    seconds = time.perf_counter() - begin
    draws = slangvi.functional_samples(model, opt.posterior, x[test], n_samples=64, generator=source)[..., 0]
    each = torch.distributions.Normal(draws, noise).log_prob(y[test])
    likelihood = each.logsumexp(0) - math.log(len(draws)) - scale.log()
    return {
        "rmse": float((draws.mean(0) - y[test]).square().mean().sqrt() * scale),
        "log-likelihood": float(likelihood.mean()),
        "seconds": seconds,
    }


def summary(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and standard deviation of each number over the seeds; NaN if a run diverged."""
    columns = {key: [run[key] for run in runs] for key in runs[0]}
    return {
        key: [math.nan] * 2 if any(map(math.isnan, v)) else [statistics.mean(v), statistics.stdev(v)]
        for key, v in columns.items()
    }


def markdown(found: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """The table of docs/settings.md, without times; a run that diverged with any seed is a dash."""
    lines = ["| run | " + " | ".join(f"{rows or 'all'}" for rows in ROWS) + " |", "|---|" + "---:|" * len(ROWS)]
    for name, by_rows in found.items():
        for key in next(iter(by_rows.values())):
            if key != "seconds":
                cells = [by_rows.get(str(rows or "all"), {}).get(key) for rows in ROWS]
                lines.append(f"| {name}: {NAMES[key]} | " + " | ".join(map(cell, cells)) + " |")
    return "\n".join(lines)


def cell(value: list[float] | None) -> str:
    """Mean ± standard deviation."""
    if value is None:
        return ""
    return "–" if math.isnan(value[0]) else f"{value[0]:.3g} ± {value[1]:.1g}"


def main() -> None:
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    if PLACE.exists():  # finished tasks are kept
        found = json.loads(PLACE.read_text(encoding="utf-8"))["results"]
    tasks = {
        "breast cancer, L = 1, 30 epochs": lambda rows, seed: logistic(rows, 1, 30, seed),
        "breast cancer, L = 5, 30 epochs": lambda rows, seed: logistic(rows, 5, 30, seed),
        "breast cancer, L = 5, 100 epochs": lambda rows, seed: logistic(rows, 5, 100, seed),
        "digits, L = 8, 30 epochs": lambda rows, seed: digits(rows, 8, 30, seed),
        "concrete, L = 4, 60 epochs": lambda rows, seed: uci("concrete", rows, 4, 60, seed),
        "kin8nm, L = 4, 20 epochs": lambda rows, seed: uci("kin8nm", rows, 4, 20, seed),
        "MNIST, L = 8, 3 epochs, lr 0.02": lambda rows, seed: mnist(rows, 8, 3, 0.02, seed),
        "MNIST, L = 8, 3 epochs, lr 0.05": lambda rows, seed: mnist(rows, 8, 3, 0.05, seed),
        "MNIST, L = 8, 3 epochs, lr 0.1": lambda rows, seed: mnist(rows, 8, 3, 0.1, seed),
    }
    only = sys.argv[1:] or [""]
    for name, run in tasks.items():
        if name in found or not name.startswith(tuple(only)):
            continue
        found[name] = {}
        for rows in ROWS:
            if rows == 32 and name.startswith("breast"):
                continue  # that is all of a batch
            found[name][str(rows or "all")] = summary([run(rows, seed) for seed in SEEDS])
            print(name, rows or "all", found[name][str(rows or "all")], flush=True)
        record = {
            "command": "python reproduction/benchmarks/curvature_rows.py",
            "seeds": list(SEEDS),
            "versions": {"slangvi": slangvi.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
            "device": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "results": found,
        }
        PLACE.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
