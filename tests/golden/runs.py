"""Golden runs: twenty steps of every method through its public interface, at draws that are given and not drawn.

A rebuilt core has to reproduce the stored results to 1e-9, however it draws. Two devices make that possible:

- Methods that use draws only as places to take gradients at (SLANG, OnlineEig, mean-field, full) get their places from
  `noise`: a loop overwrites the model's weights inside the block, and a log-likelihood those it is called with.
- Methods whose update uses the noise itself (BBB, MC dropout) run under `GivenRandomness`, which fills every random
  tensor from the same sequence.

How draws are made is not covered here: `tests/linalg` and `tests/test_distributions.py` hold their mean and covariance.

What is stored does not depend on a choice of signs or rotations of the factor either: the mean, the variances and the
product of the precision with a vector in the end, and four numbers along the way.

`PYTHONPATH=tests python -m golden.runs` writes `runs.npz` anew, after a change that is meant to change results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import slangvi

FILE = Path(__file__).with_name("runs.npz")
STEPS, NUM_DATA, BATCH = 20, 40, 6
DOUBLE = torch.float64
Results = dict[str, np.ndarray[Any, Any]]
# How far from the mean gradients are taken.
SPREAD = 0.1


# ---- numbers that no generator makes, so that they are the same everywhere


def uniform(count: int, key: int) -> Tensor:
    """Return numbers between 0 and 1 that are spread evenly: fractions of multiples of an irrational number."""
    places = torch.arange(1, count + 1, dtype=DOUBLE) + 1000.0 * key
    return (places * 0.6180339887498949 + 0.1 * (places * 0.7548776662466927).frac()).frac().clamp(1e-3, 1 - 1e-3)


def noise(count: int, key: int) -> Tensor:
    """Return standard normal numbers, the quantiles of `uniform`."""
    return math.sqrt(2.0) * torch.erfinv(2 * uniform(count, key) - 1)


class GivenRandomness(TorchDispatchMode):
    """Fill every random tensor from `uniform` or `noise`, element after element since `begin_step`.

    Args:
        strict: raise where a random operation is not known; else it stays random.

    Example:
        >>> with GivenRandomness() as given:
        ...     given.begin_step(3)
        ...     bool((torch.empty(2, dtype=DOUBLE).normal_() == noise(2, 3)).all())
        True
    """

    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict = strict

    def begin_step(self, key: int) -> None:
        """Start the sequence of a step."""
        self.key, self.used = key, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        name, given = func.overloadpacket.__name__, dict(kwargs or {})
        found = func(*args, **given)
        if name in ("randn", "randn_like"):
            return found.copy_(self._next(noise, found))
        if name in ("rand", "rand_like"):
            return found.copy_(self._next(uniform, found))
        low, high = (*args[1:3], *(given.get(key) for key in ("from", "to") if key in given), None, None)[:2]
        if name == "normal_":
            mean, std = (0.0 if low is None else low), (1.0 if high is None else high)
            return found.copy_(mean + std * self._next(noise, found))
        if name == "uniform_":
            start, end = (0.0 if low is None else low), (1.0 if high is None else high)
            return found.copy_(start + (end - start) * self._next(uniform, found))
        if name in ("bernoulli", "bernoulli_"):
            chances = args[1] if len(args) > 1 else given.get("p", args[0] if name == "bernoulli" else 0.5)
            return found.copy_(self._next(uniform, found) < chances)
        if self.strict:
            raise NotImplementedError(f"{name} is random, and nothing is given for it: add it here.")
        return found

    def _next(self, source: Callable[[int, int], Tensor], like: Tensor) -> Tensor:
        start, self.used = self.used, self.used + like.numel()
        return source(self.used, self.key)[start:].view(like.shape)


# ---- models


class Transformer(nn.Module):
    """One attention layer over five tokens, with position embeddings that the batch shares and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(3, 4)
        self.places = nn.Parameter(torch.zeros(5, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # fused kernels have no second derivatives
            hidden = self.layer(self.tokens(x) + self.places)
        return hidden.mean(1) @ self.tokens.weight.T


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, stride=2), nn.GroupNorm(3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "conv": _conv, "transformer": Transformer}
INPUTS = {"mlp": (4,), "conv": (1, 4, 4), "transformer": (5,)}


def build_model(name: str) -> nn.Module:
    """The model at weights that are always the same."""
    model = MODELS[name]().double()
    with torch.no_grad():
        for k, param in enumerate(model.parameters()):
            param.copy_(0.4 * noise(param.numel(), 7 + k).view(param.shape))
    return model


def batch_of(name: str, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a step."""
    shape = (BATCH, *INPUTS[name])
    x = noise(math.prod(shape), 100 + step).view(shape)
    y = (3 * uniform(BATCH, 200 + step)).long()
    return ((x.abs() * 2).long().clamp(max=2) if name == "transformer" else x), y


# ---- runs


@dataclass(frozen=True)
class Method:
    """One method with its settings.

    Args:
        functional: module of `slangvi` with its `build`.
        optimizer: name of its optimizer in `slangvi`; None where there is none.
        options: settings that both interfaces take.
        functional_options: settings of `build` alone.
        by_noise: whether the update uses the noise itself.
    """

    functional: str
    optimizer: str | None
    options: dict[str, Any] = field(default_factory=dict)
    functional_options: dict[str, Any] = field(default_factory=dict)
    by_noise: bool = False


PRIOR = {"prior_precision": {"*bias": 0.5, "*": 2.0}, "prior_mean": 0.05, "init_precision": 30.0, "temperature": 0.8}
RATES = {"lr": 0.1, "precision_lr": 0.07}
DROPOUT = {"lr": 0.02, "rates": 0.2, "prior_precision": {"*bias": 0.5, "*": 2.0}, "temperature": 0.8}
METHODS = {
    "slang": Method("slang", "SLANG", {**PRIOR, **RATES, "rank": 3, "momentum": 0.8}),
    "slang_rank0": Method("slang", "SLANG", {**PRIOR, "lr": 0.1, "rank": 0, "precision_warmup": False}),
    "online_eig": Method("online_eig", "OnlineEig", {**PRIOR, **RATES, "rank": 2, "momentum": 0.8}),
    "vogn": Method("mean_field", "VOGN", {**PRIOR, **RATES, "momentum": 0.5}),
    "mean_field_hessian": Method(
        "mean_field",
        None,
        {**PRIOR, "lr": 0.05, "precision_lr": 0.01, "precision_warmup": False, "curvature": "hessian"},
    ),
    "full": Method("full", "FullGaussian", {**PRIOR, **RATES}),
    "full_hessian": Method(
        "full", None, {**PRIOR, "lr": 0.05, "precision_lr": 0.01, "precision_warmup": False, "curvature": "hessian"}
    ),
    "bbb": Method("bbb", "BBB", {**PRIOR, "lr": 0.02}, by_noise=True),
    "mc_dropout": Method(
        "mc_dropout",
        "MCDropout",
        DROPOUT,
        {"masks": "draw"},
        by_noise=True,
    ),
    "bbb_log": Method("bbb", "BBB", {**PRIOR, "lr": 0.02, "scale": "log"}, by_noise=True),
    "mc_dropout_kl": Method("mc_dropout", "MCDropout", {**DROPOUT, "decay": "kl"}, {"masks": "draw"}, by_noise=True),
    "mc_dropout_examples": Method("mc_dropout", None, {**DROPOUT, "mc_samples": 2}, by_noise=True),
    "bbb_draws": Method("bbb", None, {**PRIOR, "lr": 0.02, "mc_samples": 2}, by_noise=True),
}


class Trace:
    """Results of one run, by name, as they are stored."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def add(self, posterior: Any, expected_log_likelihood: float, kl: float) -> None:
        """Note one step: mean, variance, fit and divergence, a number each."""
        probe = noise(len(posterior.mean), 999)
        numbers = [float(posterior.mean @ probe), float(posterior.variance.sum()), expected_log_likelihood, kl]
        self.rows.append([number for number in numbers if not math.isnan(number)])  # q of dropout has no divergence

    def finish(self, posterior: Any) -> Results:
        """The numbers of all steps, and the distribution after the last one."""
        matrix = getattr(posterior, "precision_matrix", None)
        found = {"trace": torch.tensor(self.rows, dtype=DOUBLE), "mean": posterior.mean, "variance": posterior.variance}
        if matrix is not None:
            found["precision_product"] = matrix @ noise(len(posterior.mean), 998)
        return {name: value.detach().numpy() for name, value in found.items()}


def draw_places(loc: Tensor, step: int, draw: int = 0) -> Tensor:
    """Where gradients are taken: the mean and some of `noise`, (P,)."""
    return loc + SPREAD * noise(len(loc), 300 + step + 50 * draw)


def run_functional(method: Method, model_name: str, engine: str, **others: Any) -> Results:
    """Twenty steps of `build(...)`; several draws of a step are at the same place."""
    model = build_model(model_name)
    place: dict[str, Tensor] = {}

    def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            for name, value in place.items():
                params[name].copy_(value)
        return -F.cross_entropy(functional_call(model, params, (batch[0],)), batch[1], reduction="none")

    options = {**method.options, **method.functional_options, **others}
    if not method.by_noise:
        options |= {"model": model, "engine": engine}
    vi = getattr(slangvi, method.functional).build(log_likelihood, num_data=NUM_DATA, **options)
    state, trace = vi.init(dict(model.named_parameters())), Trace()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    with GivenRandomness(strict=method.by_noise) as given:
        for step in range(1, STEPS + 1):
            given.begin_step(step)
            if not method.by_noise:
                pieces = draw_places(vi.posterior(state).mean, step).split([s.numel() for s in shapes.values()])
                place |= {n: x.view(s) for (n, s), x in zip(shapes.items(), pieces, strict=True)}
            state, info = vi.update(state, batch_of(model_name, step))
            trace.add(vi.posterior(state), info.expected_log_likelihood, info.kl)
    return trace.finish(vi.posterior(state))


def write_weights(model: nn.Module, flat: Tensor) -> None:
    """Put a flat vector into the model's parameters."""
    with torch.no_grad():
        for param, piece in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            param.copy_(piece.view(param.shape))


def run_closures(method: Method, model_name: str, engine: str) -> Results:
    """Twenty times `opt.step(closure)`."""
    assert method.optimizer is not None
    model, trace = build_model(model_name), Trace()
    options = {**method.options} if method.by_noise else {**method.options, "engine": engine}
    opt = getattr(slangvi, method.optimizer)(model, num_data=NUM_DATA, **options)
    with GivenRandomness(strict=method.by_noise) as given:
        for step in range(1, STEPS + 1):
            given.begin_step(step)
            x, y = batch_of(model_name, step)
            loc = opt.posterior.mean

            def closure(x: Tensor = x, y: Tensor = y, loc: Tensor = loc, step: int = step) -> Tensor:
                if not method.by_noise:
                    write_weights(model, draw_places(loc, step))
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            opt.step(closure)
            trace.add(opt.posterior, opt.info.expected_log_likelihood, opt.kl())
    return trace.finish(opt.posterior)


def run_loop(method: Method, model_name: str, engine: str) -> Results:
    """A loop of one's own: two draws a step, two micro-batches of unequal size each, summed losses, a schedule."""
    assert method.optimizer is not None
    model, trace = build_model(model_name), Trace()
    options = {key: value for key, value in method.options.items() if key != "precision_lr"}
    opt = getattr(slangvi, method.optimizer)(model, num_data=NUM_DATA, loss_reduction="sum", engine=engine, **options)
    schedule = slangvi.inverse_time(opt, decay=0.4)
    for step in range(1, STEPS + 1):
        loc = opt.posterior.mean
        for draw in range(2):
            with opt.sampled_params(train=True):
                write_weights(model, draw_places(loc, step, draw))
                x, y = batch_of(model_name, step + draw)
                for part in (slice(0, 2), slice(2, None)):
                    opt.zero_grad()
                    F.cross_entropy(model(x[part]), y[part], reduction="sum").backward()
        opt.step()
        schedule.step()
        trace.add(opt.posterior, 0.0, opt.kl())
    return trace.finish(opt.posterior)


def run_groups(model_name: str) -> Results:
    """SLANG with groups that differ, one of which joins after five steps, and losses divided for accumulation."""
    model, trace = build_model(model_name), Trace()
    params = list(model.parameters())
    groups = [{"params": params[:1], "lr": 0.05, "prior_precision": 3.0}, {"params": params[1:-1], "precision_lr": 0.2}]
    opt = slangvi.SLANG(model, groups, num_data=NUM_DATA, rank=2, lr=0.1, init_precision=30.0, accumulation_steps=2)
    for step in range(1, STEPS + 1):
        if step == 6:
            opt.add_param_group({"params": params[-1:], "momentum": 0.5})
        loc = opt.posterior.mean
        x, y = batch_of(model_name, step)
        for part in (slice(0, 3), slice(3, None)):
            with opt.sampled_params(train=True):
                whole = torch.cat([loc, torch.cat([p.detach().flatten() for p in params])[len(loc) :]])
                write_weights(model, draw_places(whole, step))
                opt.zero_grad()
                (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
        opt.step()
        trace.add(opt.posterior, 0.0, opt.kl())
    return trace.finish(opt.posterior)


def run_replicas(method: str, model_name: str) -> Results:
    """Two runs in lockstep with rates of their own, each at its own places."""
    model = build_model(model_name)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    place = torch.zeros(2, sum(shape.numel() for shape in shapes.values()), dtype=DOUBLE)

    def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor, Tensor], own: Tensor) -> Tensor:
        pieces = own.split([shape.numel() for shape in shapes.values()])
        with torch.no_grad():
            for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
                params[name].copy_(piece.view(shape))
        return -F.cross_entropy(functional_call(model, params, (batch[0],)), batch[1], reduction="none")

    options: dict[str, Any] = {**PRIOR, "rank": 3, "momentum": 0.8, "lr": [0.1, 0.05], "precision_lr": 0.07}
    runs = slangvi.replicas.build(
        log_likelihood,
        num_replicas=2,
        num_data=NUM_DATA,
        constants=lambda steps: place,
        method=method,
        **options,
    )
    state = runs.init(dict(model.named_parameters()))
    for step in range(1, STEPS + 1):
        place = torch.stack([draw_places(loc, step) for loc in state.loc])
        batch = tuple(torch.stack([part, part]) for part in batch_of(model_name, step))
        state, _ = runs.update(state, batch)
    q = runs.posterior(state)
    product_ = q.precision_matrix @ noise(place.shape[1], 998)
    return {"mean": q.mean.numpy(), "variance": q.variance.numpy(), "precision_product": product_.numpy()}


def run_exact(family: str) -> Results:
    """The best Gaussian of a logistic regression."""
    x = noise(30 * 4, 1).view(30, 4)
    y = (uniform(30, 2) < torch.sigmoid(x @ noise(4, 3))).double()
    options = {"prior_precision": torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=DOUBLE), "prior_mean": 0.1, "family": family}
    fit, trace = slangvi.exact.fit(x, y, **options), Trace()
    vi = slangvi.exact.build(x, y, **options)
    state = vi.init()
    for _ in range(STEPS):
        state, _ = vi.update(state)
    trace.add(vi.posterior(state), float(fit.elbo), 0.0)
    return {**trace.finish(vi.posterior(state)), "fit_mean": fit.loc.numpy(), "fit_covariance": fit.covariance.numpy()}


class Run(NamedTuple):
    """One run; interfaces and engines that must agree share a key.

    Args:
        name: of the run.
        key: under which its results are stored.
        compute: takes the twenty steps and returns the results.
    """

    name: str
    key: str
    compute: Callable[[], Results]


def all_runs() -> Iterator[Run]:
    """Every method on every model, through every interface it has."""
    for (name, method), model in product(METHODS.items(), MODELS):
        key = f"{name}/{model}"
        engines = ("dense",) if method.by_noise else ("dense", "factored")
        for engine in engines:
            yield Run(f"{key}/functional-{engine}", key, partial(run_functional, method, model, engine))
            if method.optimizer is not None:
                yield Run(f"{key}/closures-{engine}", key, partial(run_closures, method, model, engine))
        if method.optimizer is not None and not method.by_noise:
            for engine in ("dense", "factored"):
                yield Run(f"{key}/loop-{engine}", f"{key}/loop", partial(run_loop, method, model, engine))
    draws = {"mc_samples": 2, "lr": slangvi.inverse_time(0.5, decay=0.6), "precision_lr": None}
    for model, engine in product(MODELS, ("dense", "factored")):
        key = f"slang-draws/{model}"
        yield Run(f"{key}/{engine}", key, partial(run_functional, METHODS["slang"], model, engine, **draws))
    for model in MODELS:
        yield Run(f"slang-groups/{model}", f"slang-groups/{model}", partial(run_groups, model))
    for method in ("slang", "online_eig"):
        key = f"replicas/{method}/mlp"
        yield Run(key, key, partial(run_replicas, method, "mlp"))
    for family in ("full", "mean_field"):
        yield Run(f"exact/{family}", f"exact/{family}", partial(run_exact, family))


def record() -> None:
    """Store the results of the first run of each key."""
    stored: Results = {}
    for run in all_runs():
        if f"{run.key}|mean" not in stored:
            stored |= {f"{run.key}|{name}": value for name, value in run.compute().items()}
    np.savez_compressed(FILE, **stored)


if __name__ == "__main__":
    record()
