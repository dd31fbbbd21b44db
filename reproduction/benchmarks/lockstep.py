"""Milliseconds for one whole step of logistic regressions in lockstep, on one CPU thread.

    OMP_NUM_THREADS=1 python reproduction/benchmarks/lockstep.py [--steps 200] [--warm 400] [--late 1] [--methods A,B]
        [--cases A,B]

A step is: S = 12 draws of the weights, f = xᵀθ, its slopes, the operator, and the method's own `update`. `single` is
the same for one of the problems alone, and `gain` what K steps one by one would take relative to the step in lockstep.
Rates fall as in the paper; after `--warm` steps they are those of a step `--late` times as far, since long runs spend
most of their time there. Numbers are medians of the CPU time of the thread; caches that others use still cost.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor

from slangvi.priors import Prior
from slangvi.rows.linear_predictor import LinearPredictorGradients
from slangvi.schedules import Rate

# Name, K problems, P parameters, M examples a step.
CASES = [
    ("australian", 20, 15, 32),
    ("breast_cancer", 20, 11, 32),
    ("a1a", 1, 124, 128),
    ("usps_3vs5", 20, 257, 64),
]
METHODS = ["slang_1", "slang_2", "slang_5", "slang_10", "mean_field", "full", "online_eig_1"]
DRAWS, EXAMPLES = 12, 500


class Run:
    """K problems of one case with one method; `single` takes the first problem alone, without a batch dimension."""

    def __init__(self, method: str, K: int, P: int, M: int, single: bool) -> None:
        name, _, rank = method.rpartition("_") if method[-1].isdigit() else (method, "", "")
        self.method = import_module(f"slangvi.methods.{name}")
        self.source = torch.Generator().manual_seed(0)
        lead = () if single else (K,)
        x = torch.randn(*lead, EXAMPLES, P, generator=self.source, dtype=torch.float64)
        self.x = x * torch.arange(1, P + 1, dtype=torch.float64) ** -0.75  # a spectrum that falls, as data have it
        noise = torch.randn(*lead, EXAMPLES, generator=self.source, dtype=torch.float64)
        self.y = (self.x.sum(-1) + noise > 0).double()
        self.M, ones = M, torch.ones(P, dtype=torch.float64)
        self.prior = Prior(ones, torch.zeros_like(ones))
        state = self.method.init({"w": torch.zeros_like(ones)}, *([int(rank)] if rank else []))
        tensors = {k: v.expand(*lead, *v.shape).clone() for k, v in vars(state).items() if isinstance(v, Tensor)}
        self.state: Any = replace(state, **tensors)

    def step(self, late: float) -> float:
        """CPU seconds of one step; picking the examples is not counted."""
        pick = torch.randint(EXAMPLES, (self.M,), generator=self.source)
        x, y = self.x[..., pick, :].contiguous(), self.y[..., pick].unsqueeze(-2)
        rate = Rate(0.05 / (1 + (late * (self.state.step + 1)) ** 0.51))
        before = time.thread_time()
        thetas = self.state.precision.sample((DRAWS,), self.source, self.state.loc)
        slopes = (thetas.movedim(0, -2) @ x.mT).sigmoid_().sub_(y)
        gradients = LinearPredictorGradients(x, slopes)
        self.state, _ = self.method.update(self.state, gradients, num_data=EXAMPLES, prior=self.prior, lr=rate)
        return time.thread_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=400)
    parser.add_argument("--late", type=float, default=1.0)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cases", default=",".join(case[0] for case in CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'case':15}{'method':15}{'ms':>8}{'single':>9}{'gain':>7}")
    for name, K, P, M in (case for case in CASES if case[0] in options.cases.split(",")):
        for method in options.methods.split(","):
            with torch.inference_mode():
                runs = [Run(method, K, P, M, single) for single in (False, True)]
                for run in runs:
                    for _ in range(options.warm):
                        run.step(1.0)
                pairs = [[run.step(options.late) for run in runs] for _ in range(options.steps)]
            batch, single = (1e3 * median(times) for times in zip(*pairs, strict=True))
            print(f"{name:15}{method:15}{batch:8.2f}{single:9.2f}{K * single / batch:7.1f}", flush=True)


if __name__ == "__main__":
    main()
