"""What `slangvi.SLANG(model, num_data=N, likelihood=…)` reaches with no other argument, and what tuning would add.

`python reproduction/benchmarks/defaults.py [beginning of a task's name …]` writes
`reproduction/results/defaults.json` and prints a table of docs/settings.md. It needs UCI, LIBSVM and MNIST sets in
SLANGVI_DATA. The tasks are those of `curvatures.py`, and MNIST. Tasks that are there already are kept.

Tuned is the best of learning rates 0.02, 0.05, 0.1 and 0.2 at rank 8, by the number in the table itself: what a search
could reach at most.
"""

from __future__ import annotations

from pathlib import Path

import curvatures
import torch
import torch.nn.functional as F
from curvatures import Numbers, Options, Results, fit, study
from torch import nn

import slangvi
from slangvi_reproduction.data.mnist import load_mnist

PLACE = Path(__file__).parents[1] / "results" / "defaults.json"
PAPER: Options = {"curvature": "ef", "projection": "eig"}
LEARNING_RATES = (0.02, 0.05, 0.1, 0.2)


def mnist(options: Options, seed: int) -> Numbers:
    """Test NLL of a 784-400-400-10 network after 900 steps of 200 images, three epochs."""
    (x, y), (x_test, y_test) = ((part.x.flatten(1), part.y) for part in (load_mnist("train"), load_mnist("test")))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    opt, found = fit(model, (x, y), slangvi.Categorical(), options, seed, 900, 200)
    draws = slangvi.functional_samples(model, opt.posterior, x_test, n_samples=16)
    return {"NLL": float(F.nll_loss(draws.softmax(-1).mean(0).log(), y_test)), **found}


TASKS: dict[str, curvatures.Task] = {
    **curvatures.TASKS,
    "MNIST": mnist,
}
LARGE = ("MNIST",)  # not searched


def best(found: dict[str, dict[str, list[float]]], key: str) -> list[float] | None:
    """The best of the searched runs: the lowest number, or the highest ELBO."""
    sign = -1 if key.startswith("ELBO") else 1
    values = [numbers[key] for name, numbers in found.items() if name.startswith("lr") and numbers]
    return min(values, key=lambda value: sign * value[0], default=None)


def markdown(found: Results) -> str:
    """The table of docs/settings.md."""
    lines = ["| run | defaults | the paper's curvature | tuned |", "|---|---:|---:|---:|"]
    for name, by_way in found.items():
        key = next((key for way in by_way.values() for key in way), "")
        cells = [by_way["defaults"].get(key), by_way["paper"].get(key)]
        shown = ["diverged" if cell is None else f"{cell[0]:.3g} ± {cell[1]:.1g}" for cell in cells]
        tuned = best(by_way, key)
        shown.append("" if tuned is None else f"{tuned[0]:.3g} ± {tuned[1]:.1g}")
        lines.append(f"| {name}: {key} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def ways_of(name: str) -> dict[str, Options]:
    """Options of a task by column."""
    searched = () if name in LARGE else LEARNING_RATES
    return {"defaults": {}, "paper": PAPER} | {f"lr {rate:g}": {"rank": 8, "lr": rate} for rate in searched}


def main() -> None:
    found = study(PLACE, TASKS, ways_of)
    print(markdown({name: found[name] for name in TASKS if name in found}))


if __name__ == "__main__":
    main()
