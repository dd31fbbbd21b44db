"""Public networks in a training loop of one's own: SLANG against AdamW, IVON and EVON, one draw a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import slangvi
from slangvi_reproduction.bench import public_models as models
from slangvi_reproduction.bench._measure import BASELINE, Contender, Step, compare, failure_message, measure
from slangvi_reproduction.bench.limits import Rates
from slangvi_reproduction.bench.networks import Problem
from slangvi_reproduction.bench.record import Row, Settings
from slangvi_reproduction.bench.step import Goal, judge, notes

__all__ = ["ABOUT", "COMPILED", "REPEATS", "SLANG", "TITLE", "contenders", "notes", "rows", "with_goals"]

TITLE = "Public networks"
ABOUT = """\
Model code of torchvision and transformers with random weights and without dropout, in a training loop as users write
it: one draw a step, float32, TF32 off. A multilayer perceptron 784-400-400-10 with 200 images; resnet18 with GroupNorm
and 128 images of $64 \\times 64$; a VisionTransformer of 8 layers and width 384 with 64 images of $64 \\times 64$ in
patches of 8; a BERT-base classifier with 16 texts of 128 tokens; GPT-2 small with 8 texts of 256 tokens, trained as a
whole or by LoRA adapters of rank 8 on its attention layers. *P* counts trainable parameters, *adam* is AdamW, and *K*
is `curvature_rows`, the examples of a batch whose gradients estimate the curvature; the batches of BERT and GPT-2 have
no more than 16, so that all of them have to meet the targets for 16. *Bound MB* is 1.15 times the sum of Adam's peak
and $4 (L + 2) P$ bytes.
"""
REPEATS, REPEATS_QUICK = 9, 3
SLANG, COMPILED = "slang", "slang, compiled"
ALL_ROWS, CURVATURE_ROWS, CURVATURE_ROWS_QUICK = "all", 16, 2
WARMUP, WARMUP_COMPILED, WARMUP_QUICK = 8, 40, 2
MEMORY_MARGIN = 1.15
TARGET_RANK = 8
# Most × Adam of the eager optimizer at the target rank: with 16 curvature rows, and with all rows.
RATIOS = {
    models.MLP: (3.5, 5.0),
    models.RESNET: (2.2, 5.0),
    models.VIT: (1.7, 3.0),
    models.BERT: (2.2, 3.0),
    models.GPT2: (1.6, 1.7),
    models.GPT2_LORA: (1.03, 1.03),
}

# All rows of these are no more than 16, and have to meet both targets.
SMALL_BATCHES = (models.BERT, models.GPT2, models.GPT2_LORA)

BuildOptimizer = Callable[[nn.Module, int], Any]
Labels = Mapping[str, int | str]
Losses = dict[str, Tensor]


def rows(settings: Settings, rates: Rates) -> list[Row]:
    """Measure every contender on every network; ratios are to AdamW on the same network."""
    if settings.quick:
        settings = replace(settings, repeats=min(settings.repeats, REPEATS_QUICK))
    found = []
    # torch multiplies matrices in full float32 unless told otherwise, but convolves in TF32.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for name, problem in models.problems(settings.quick, settings.device).items():
            measured = _measure_network(name, problem, settings)
            found += measured if settings.quick else with_goals(measured)
    return found


def _measure_network(name: str, problem: Problem, settings: Settings) -> list[Row]:
    """Return a row for each contender, or one row that says why the network could not be measured."""
    losses: Losses = {}
    try:
        # Weights of large networks take seconds to draw: all contenders get a copy.
        problem = replace(problem, build=partial(copy.deepcopy, problem.model()))
        size = sum(param.numel() for param in _trainable(problem.model()))
        measured = measure(contenders(problem, {"network": name, "P": size}, settings, losses), settings)
    except Exception as error:  # the other networks are measured all the same
        return [Row(name, {"network": name}, skipped=failure_message(error))]
    return compare([row if row.skipped else _with_loss(row, float(losses[_key(row)])) for row in measured])


def _with_loss(row: Row, loss: float) -> Row:
    """Record the last loss; a contender whose loss is not finite has failed, and its time is dropped."""
    if math.isfinite(loss):
        return replace(row, loss=loss)
    return Row(row.name, row.settings, skipped=f"the loss became {loss}")


# ---- contenders ----


def contenders(problem: Problem, labels: Labels, settings: Settings, losses: Losses) -> list[Contender]:
    """Return AdamW, IVON, EVON and SLANG; their steps write the loss into `losses`."""
    some_rows = CURVATURE_ROWS_QUICK if settings.quick else CURVATURE_ROWS

    def entry(name: str, build: BuildOptimizer, warmup: int = WARMUP, **more: int | str) -> Contender:
        row = Row(name, {**labels, **more})
        make = partial(_loop, problem, build, losses, _key(row))
        return Contender(name, make, row.settings, peer=True, warmup=WARMUP_QUICK if settings.quick else warmup)

    found = [
        entry(BASELINE, _adamw),
        entry("ivon", partial(_published, "ivon", "IVON", 1e-3)),
        entry("evon", partial(_published, "evon", "EVON", 1e-4)),
        entry(SLANG, partial(_slang, rank=1), L=1, K=ALL_ROWS),
        entry(SLANG, partial(_slang, rank=8), L=8, K=ALL_ROWS),
    ]
    if len(problem.x) > some_rows:  # else these are all of a batch
        found.append(entry(SLANG, partial(_slang, rank=8, curvature_rows=some_rows), L=8, K=some_rows))
    if settings.device == "cuda" and labels.get("network") == models.MLP:  # kernels of the others are not small
        found.append(entry(COMPILED, partial(_slang, rank=8, compile=True), WARMUP_COMPILED, L=8, K=ALL_ROWS))
    return found


def _key(row: Row) -> str:
    return f"{row.name} {dict(row.settings)}"


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _adamw(model: nn.Module, num_data: int) -> Any:
    return torch.optim.AdamW(_trainable(model), lr=1e-4)


def _published(library: str, optimizer: str, lr: float, model: nn.Module, num_data: int) -> Any:
    """Build IVON or EVON, which have the same interface."""
    return getattr(import_module(library), optimizer)(_trainable(model), lr=lr, ess=num_data, hess_init=1.0)


def _slang(model: nn.Module, num_data: int, rank: int, **options: Any) -> Any:
    options |= {"num_data": num_data, "rank": rank, "lr": 1e-3, "init_precision": 1e4, "on_divergence": "ignore"}
    return slangvi.SLANG(model, **options)


def _loop(problem: Problem, build: BuildOptimizer, losses: Losses, key: str) -> Step:
    """Return one iteration of a user's training loop."""
    model = problem.model()
    opt = build(model, problem.num_data)

    def loss_of_batch() -> Tensor:
        outputs = model(problem.x)
        return problem.loss(getattr(outputs, "logits", outputs), problem.y)  # transformers returns an object

    def step() -> None:
        with opt.sampled_params(train=True) if hasattr(opt, "sampled_params") else nullcontext():
            opt.zero_grad()
            loss = loss_of_batch()
            loss.backward()
        opt.step()
        losses[key] = loss.detach()

    return step


# ---- targets ----


def with_goals(rows: Sequence[Row]) -> list[Row]:
    """Judge the rows of one network: time by the table of ratios, and the peak by its bound."""
    adam_mb = next((row.peak_mb for row in rows if row.name == BASELINE), None)
    return [_judged(row, adam_mb) if row.name in (SLANG, COMPILED) and not row.skipped else row for row in rows]


def _judged(row: Row, adam_mb: float | None) -> Row:
    rank, goals = int(row.settings["L"]), []
    if row.name == SLANG and rank == TARGET_RANK:
        network, takes_all = str(row.settings["network"]), row.settings["K"] == ALL_ROWS
        most = RATIOS[network][takes_all and network not in SMALL_BATCHES]
        goals.append(Goal(row.ratio, most, f"≤ {most:g} × Adam"))
    if adam_mb is not None:
        bound = MEMORY_MARGIN * (adam_mb + (rank + 2) * 4 * int(row.settings["P"]) / 1e6)
        row = replace(row, bound_mb=bound)
        goals.append(Goal(row.peak_mb, bound, "peak ≤ bound"))
    return judge(row, goals)
