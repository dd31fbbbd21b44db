"""One task after another: the posterior as the next prior, beside fine-tuning and EWC, on permuted and split MNIST.

`python reproduction/benchmarks/continual.py [--jobs 2]` writes `reproduction/results/continual.json` and prints the
table of docs/continual.md. It needs MNIST in SLANGVI_DATA. Runs that are there already are kept. The settings of each
method are chosen by the validation images of one seed, and tested with other seeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import slangvi
from slangvi_reproduction.data.mnist import load_mnist

PLACE = Path(__file__).parents[1] / "results" / "continual.json"
TASKS = {"permuted": 5, "split": 5}
IMAGES, EPOCHS, BATCH, FISHER = 10_000, 5, 100, 2_000
SEARCH, SEEDS = 100, (0, 1, 2)
# What is tried of every Bayesian method: λ of the first task's prior is 1 unless it is given.
BAYES: list[dict[str, float]] = [
    *({"lr": 0.05, "temperature": t} for t in (1.0, 0.1, 0.01)),
    *({"lr": 0.05, "temperature": t, "prior_precision": 100.0} for t in (1.0, 0.1)),
]
# Methods and what is tried of each: how fast fine-tuning goes, and how strongly others hold on to what was learnt.
GRIDS: dict[str, list[dict[str, float]]] = {
    "fine-tuning": [{"lr": lr} for lr in (1e-4, 3e-4, 1e-3)],
    "EWC": [
        *({"lr": 1e-3, "strength": s} for s in (10.0, 100.0, 1e3)),
        *({"lr": 3e-4, "strength": s} for s in (100.0, 1e3)),
    ],
    "mean-field prior": BAYES,
    "SLANG, rank 8": BAYES,
}
Cell = tuple[str, str, int, int]  # task, method, place in its grid, seed


class Task(NamedTuple):
    """Images of one task to learn from and to score on, and the classes that it tells apart."""

    x: Tensor
    y: Tensor
    x_score: Tensor
    y_score: Tensor
    classes: list[int]


class Network(nn.Module):
    """784-100-100-10, of which a task sees the outputs of its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
        self.classes = list(range(10))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the task's classes."""
        return self.layers(x)[:, self.classes]


def tasks_of(name: str, seed: int) -> list[Task]:
    """The tasks of a seed; those of the search are scored on validation images."""
    parts = [load_mnist("tuning"), load_mnist("validation" if seed == SEARCH else "test")]
    (x, y), (x_score, y_score) = ((images.x.flatten(1), images.y) for images in parts)
    source, found = torch.Generator().manual_seed(seed), []
    for k in range(TASKS[name]):
        if name == "permuted":
            pixels = torch.randperm(784, generator=source)
            pick = torch.randperm(len(x), generator=source)[:IMAGES]
            found.append(Task(x[pick][:, pixels], y[pick], x_score[:, pixels], y_score, list(range(10))))
        else:
            mine, scored = (torch.where((labels // 2) == k)[0] for labels in (y, y_score))
            pick = mine[torch.randperm(len(mine), generator=source)[:IMAGES]]
            found.append(Task(x[pick], y[pick] % 2, x_score[scored], y_score[scored] % 2, [2 * k, 2 * k + 1]))
    return found


class Adam:
    """Fine-tuning; with a strength, EWC: a penalty for each earlier task, by the Fisher information of its optimum."""

    def __init__(self, model: Network, lr: float, strength: float = 0.0) -> None:
        self.model, self.lr, self.strength = model, lr, strength
        self.held: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def learn(self, task: Task, source: torch.Generator) -> None:
        """Train on a task, then note what matters to it."""
        named = dict(self.model.named_parameters())
        opt = torch.optim.Adam(named.values(), lr=self.lr)
        for _ in range(EPOCHS):
            for pick in torch.randperm(len(task.x), generator=source).split(BATCH):
                loss = F.cross_entropy(self.model(task.x[pick]), task.y[pick])
                for fisher, old in self.held:
                    away = (fisher[name] * (value - old[name]).square() for name, value in named.items())
                    loss = loss + 0.5 * self.strength * sum(part.sum() for part in away)
                opt.zero_grad()
                loss.backward()
                opt.step()
        if self.strength:
            self.held.append((self._fisher(task, source), {name: p.detach().clone() for name, p in named.items()}))

    def _fisher(self, task: Task, source: torch.Generator) -> dict[str, Tensor]:
        """Diagonal of the Fisher information per example, from classes that are drawn."""
        params = {name: p.detach() for name, p in self.model.named_parameters()}
        total = {name: torch.zeros_like(p) for name, p in params.items()}

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.model, params, (x[None],)), y[None])

        each = vmap(partial(grad(loss), params))
        x = task.x[torch.randperm(len(task.x), generator=source)[:FISHER]]
        for rows in x.split(100):
            with torch.no_grad():
                drawn = torch.multinomial(self.model(rows).softmax(1), 1, generator=source)[:, 0]
            for name, gradients in each(rows, drawn).items():
                total[name] += gradients.square().sum(0) / len(x)
        return total


class Bayes:
    """Each task with the posterior of the last one as its prior."""

    def __init__(self, kind: Any, model: Network, prior_precision: float = 1.0, **options: Any) -> None:
        self.kind, self.model, self.options = kind, model, options
        self.prior: dict[str, Any] = {"prior_precision": prior_precision}

    def learn(self, task: Task, source: torch.Generator) -> None:
        """Train on a task, and keep the posterior."""
        opt = self.kind(
            self.model,
            num_data=len(task.x),
            precision_lr=0.02,  # the precision is that of the last steps, whatever the schedule of lr
            curvature="fisher",
            likelihood="categorical",
            curvature_rows="auto",
            generator=source,
            on_divergence="ignore",
            **self.prior,
            **self.options,
        )
        steps = EPOCHS * -(-len(task.x) // BATCH)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
        for _ in range(EPOCHS):
            for pick in torch.randperm(len(task.x), generator=source).split(BATCH):
                with opt.sampled_params(train=True):
                    opt.zero_grad()
                    F.cross_entropy(self.model(task.x[pick]), task.y[pick]).backward()
                opt.step()
                sched.step()
        self.prior = {"prior": opt.posterior}


def learner_of(method: str, model: Network, options: dict[str, float]) -> Adam | Bayes:
    """A method with its settings."""
    if method in ("fine-tuning", "EWC"):
        return Adam(model, **options)
    if method == "mean-field prior":
        return Bayes(slangvi.VOGN, model, **options)
    return Bayes(slangvi.SLANG, model, rank=8, **options)


def accuracy(model: Network, task: Task) -> float:
    """Share of images that the mean of the weights gets right."""
    model.classes = task.classes
    with torch.no_grad():
        return float((model(task.x_score).argmax(1) == task.y_score).double().mean())


def run(cell: Cell) -> dict[str, Any]:
    """Learn all tasks in turn, and score all that were seen after each."""
    torch.set_num_threads(1)
    name, method, place, seed = cell
    torch.manual_seed(seed)
    model, source, begin = Network(), torch.Generator().manual_seed(seed), time.perf_counter()
    learner, scores = learner_of(method, model, GRIDS[method][place]), list[list[float]]()
    tasks = tasks_of(name, seed)
    for k, task in enumerate(tasks):
        model.classes = task.classes
        learner.learn(task, source)
        scores.append([accuracy(model, seen) for seen in tasks[: k + 1]])
    best = [max(row[k] for row in scores[k:]) for k in range(len(tasks) - 1)]
    return {
        "accuracy": statistics.mean(scores[-1]),
        "forgetting": statistics.mean(high - last for high, last in zip(best, scores[-1], strict=False)),
        "learning": statistics.mean(row[-1] for row in scores),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def key_of(cell: Cell) -> str:
    """The name of a run in the results."""
    name, method, place, seed = cell
    return " | ".join([name, method, json.dumps(GRIDS[method][place]), f"seed {seed}"])


def best_of(found: dict[str, Any], name: str, method: str) -> int:
    """Place in the grid of the settings with the highest accuracy on validation images."""
    places = range(len(GRIDS[method]))
    return max(places, key=lambda place: found[key_of((name, method, place, SEARCH))]["accuracy"])


def markdown(found: dict[str, Any]) -> str:
    """The table of docs/continual.md."""
    lines = [
        "| tasks | method | average accuracy, % | forgetting, % | accuracy when learnt, % |",
        "|---|---|---:|---:|---:|",
    ]
    for name in TASKS:
        for method in GRIDS:
            runs = [found[key_of((name, method, best_of(found, name, method), seed))] for seed in SEEDS]
            columns = [[100 * one[key] for one in runs] for key in ("accuracy", "forgetting", "learning")]
            shown = [f"{statistics.mean(column):.1f} ± {statistics.stdev(column):.1f}" for column in columns]
            lines.append(f"| {name} | {method} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    jobs = parser.parse_args().jobs
    found: dict[str, Any] = {}
    if PLACE.exists():  # finished runs are kept
        found = json.loads(PLACE.read_text(encoding="utf-8"))["results"]
    begin, pairs = time.perf_counter(), [(name, method) for name in TASKS for method in GRIDS]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        searches = [(*pair, place, SEARCH) for pair in pairs for place in range(len(GRIDS[pair[1]]))]
        for is_search in (True, False):
            cells = searches if is_search else [(*pair, best_of(found, *pair), s) for pair in pairs for s in SEEDS]
            work = {pool.submit(run, cell): cell for cell in cells if key_of(cell) not in found}
            for done in as_completed(work):
                key = key_of(work[done])
                found[key] = done.result()
                print(key, json.dumps(found[key]), flush=True)
                record = {
                    "command": f"python reproduction/benchmarks/continual.py --jobs {jobs}",
                    "seeds": list(SEEDS),
                    "seed of the search": SEARCH,
                    "tasks": TASKS,
                    "training images of a task, at most": IMAGES,
                    "epochs": EPOCHS,
                    "batch": BATCH,
                    "versions": {
                        "slangvi": slangvi.__version__,
                        "torch": torch.__version__,
                        "python": sys.version.split()[0],
                    },
                    "device": platform.processor() or platform.machine(),
                    "threads of a run": 1,
                    "seconds of the last call": round(time.perf_counter() - begin),
                    "results": dict(sorted(found.items())),
                }
                PLACE.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(markdown(found))


if __name__ == "__main__":
    main()
