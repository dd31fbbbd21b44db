"""Where curvature comes from, and how it comes back to the family: the same runs with the library's default rates.

`python reproduction/benchmarks/curvatures.py [beginning of a task's name …]` writes
`reproduction/results/curvatures.json` and prints the table of docs/curvature.md. It needs UCI and LIBSVM sets in
SLANGVI_DATA; the other data are made here or bundled with scikit-learn. Tasks that are there already are kept.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import slangvi
from slangvi_reproduction.data.libsvm import libsvm_splits
from slangvi_reproduction.data.uci import load_uci

WAYS = (("ef", "eig"), ("ef", "em"), ("ggn", "eig"), ("ggn", "em"), ("fisher", "eig"), ("fisher", "em"))
SEEDS = (0, 1, 2)
PLACE = Path(__file__).parents[1] / "results" / "curvatures.json"
Numbers = dict[str, float]
Options = dict[str, Any]
Task = Callable[[Options, int], Numbers]
Results = dict[str, dict[str, dict[str, list[float]]]]


def fit(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    likelihood: slangvi.likelihoods.Likelihood,
    options: Options,
    seed: int,
    steps: int,
    batch: int,
) -> tuple[Any, Numbers]:
    """Train with one draw a step, by a constant learning rate of 0.05 if the options say no other."""
    x, y = data
    source = torch.Generator().manual_seed(seed)
    always: Options = {"num_data": len(x), "likelihood": likelihood, "generator": source, "on_divergence": "ignore"}
    opt = slangvi.SLANG(model, **always, **options)
    begin = time.perf_counter()
    for _ in range(steps):
        pick = torch.randint(len(x), (min(batch, len(x)),), generator=source)
        with opt.sampled_params(train=True):
            opt.zero_grad()
            (-likelihood.log_prob(model(x[pick]), y[pick]).mean()).backward()
        opt.step()
    seconds = time.perf_counter() - begin
    fits = []
    with torch.no_grad():
        for _ in range(32):
            with opt.sampled_params():
                fits.append(float(likelihood.log_prob(model(x), y).sum()))
    elbo = statistics.mean(fits) - opt.kl()
    return opt, {"ELBO / N": elbo / len(x), "ms a step": 1e3 * seconds / steps}


def logistic(name: str, options: Options, seed: int) -> Numbers:
    """Symmetric KL to the best Gaussian; 2,000 steps of 32 examples."""
    split = libsvm_splits(name, (1 if name == "a1a" else seed + 1,))  # it has one
    x, y = split.x_train[0], split.y_train[0]
    model = nn.Linear(x.shape[1], 1, bias=False).double()
    nn.init.zeros_(model.weight)
    opt, found = fit(model, (x, y.unsqueeze(1)), slangvi.Bernoulli(), options, seed, 2000, 32)
    best = slangvi.exact.fit(x, y, prior_precision=1.0, family="full")
    exact = MultivariateNormal(best.loc, best.covariance)
    mine = MultivariateNormal(opt.posterior.loc, opt.posterior.covariance_matrix)
    return {"KL": float(0.5 * (kl_divergence(mine, exact) + kl_divergence(exact, mine))), **found}


def digits(options: Options, seed: int) -> Numbers:
    """Test NLL of a 64-100-10 network; 600 steps of 100 examples."""
    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(data.data / 16).float()[order], torch.tensor(data.target)[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    opt, found = fit(model, (x[:1300], y[:1300]), slangvi.Categorical(), options, seed, 600, 100)
    draws = slangvi.functional_samples(model, opt.posterior, x[1300:], n_samples=64)
    probs = draws.softmax(-1).mean(0)
    return {"NLL": float(F.nll_loss(probs.log(), y[1300:])), **found}


def toy(options: Options, seed: int) -> Numbers:
    """ELBO of a network with 100 units on twenty points of a cubic; 1,500 steps of all."""
    source = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(20, 1, generator=source) - 4
    y = (x**3 + 3 * torch.randn(20, 1, generator=source)) / 25
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 1))
    return fit(model, (x / 2.3, y), slangvi.Gaussian((25 / 3) ** 2), options, seed, 1500, 20)[1]


def uci(name: str, options: Options, seed: int) -> Numbers:
    """Test log-likelihood of a network with 50 units on the split of the seed; 1,200 steps, noise 0.3 of the spread."""
    data = load_uci(name)
    train, test = data.splits[seed].train, data.splits[seed].test
    x = ((data.x - data.x[train].mean(0)) / data.x[train].std(0).clamp_min(1e-6)).float()
    mean, scale = data.y[train].mean(), data.y[train].std()
    y = ((data.y - mean) / scale).float().unsqueeze(1)
    torch.manual_seed(seed)
    model, likelihood = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1)), slangvi.Gaussian(11.0)
    opt, found = fit(model, (x[train], y[train]), likelihood, options, seed, 1200, 64)
    draws = slangvi.functional_samples(model, opt.posterior, x[test], n_samples=64)
    each = torch.stack([likelihood.log_prob(draw, y[test]) for draw in draws])
    return {"NLL": float(-(each.logsumexp(0) - math.log(len(draws))).mean()), **found}


TASKS: dict[str, Task] = {
    **{f"logistic, {name}": partial(logistic, name) for name in ("australian", "breast_cancer", "a1a", "usps_3vs5")},
    "toy cubic": toy,
    "digits": digits,
    **{f"UCI, {name}": partial(uci, name) for name in
       ("boston", "concrete", "energy", "kin8nm", "naval", "power", "wine", "yacht")},
}  # fmt: skip
RANKS = {"logistic": 5, "toy": 5, "digits": 8, "UCI": 4}


def options_of(name: str, way: tuple[str, str]) -> Options:
    """Options of a task for a curvature and a projection; 32 rows where an example has nine."""
    rank = next(rank for word, rank in RANKS.items() if name.startswith(word))
    # With so few the empirical Fisher diverges on the digits, and takes all.
    rows = 32 if name == "digits" and way[0] != "ef" else None
    return {"rank": rank, "curvature": way[0], "projection": way[1], "curvature_rows": rows}


def run(task: Task, options: Options) -> dict[str, list[float]]:
    """Mean and standard deviation of each number over the seeds; empty if a run diverged."""
    try:
        runs = [task(options, seed) for seed in SEEDS]
    except slangvi.NumericalError:
        return {}
    if not all(math.isfinite(value) for numbers in runs for value in numbers.values()):
        return {}
    columns = {key: [numbers[key] for numbers in runs] for key in runs[0]}
    return {key: [statistics.mean(column), statistics.stdev(column)] for key, column in columns.items()}


def markdown(found: Results) -> str:
    """The table of docs/curvature.md: the first number of each task, whose lowest is best, and ELBOs of the toy."""
    heads = [f"{curvature}, {projection}" for curvature, projection in WAYS]
    lines = ["| run | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(WAYS)]
    for name, by_way in found.items():
        key = next((key for way in by_way.values() for key in way), "")
        cells = [by_way.get(head, {}).get(key) for head in heads]
        shown = ["diverged" if cell is None else f"{cell[0]:.3g} ± {cell[1]:.1g}" for cell in cells]
        lines.append(f"| {name}: {key} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def study(place: Path, tasks: dict[str, Task], ways_of: Callable[[str], dict[str, Options]]) -> Results:
    """Run the tasks that the command line names, but for those in the file already, and write it after each.

    Args:
        place: the file.
        tasks: by name.
        ways_of: name of a task → options by the name of a column.

    Returns:
        Task → column → number → mean and standard deviation, all that the file holds.
    """
    found: Results = {}
    if place.exists():  # finished tasks are kept
        found = json.loads(place.read_text(encoding="utf-8"))["results"]
    only, begin = sys.argv[1:] or [""], time.perf_counter()
    torch.set_num_threads(1)
    for name, task in tasks.items():
        if name in found or not name.startswith(tuple(only)):
            continue
        found[name] = {column: run(task, options) for column, options in ways_of(name).items()}
        print(name, json.dumps(found[name]), flush=True)
        record = {
            "command": f"python reproduction/benchmarks/{place.stem}.py",
            "seeds": list(SEEDS),
            "versions": {"slangvi": slangvi.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
            "device": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "seconds of the last call": round(time.perf_counter() - begin),
            "results": found,
        }
        place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return found


def main() -> None:
    print(markdown(study(PLACE, TASKS, lambda name: {", ".join(way): options_of(name, way) for way in WAYS})))


if __name__ == "__main__":
    main()
