"""Diagnose optimizers, states of the functional interface, and fitted estimators, without changing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slangvi import checks
from slangvi.diagnosis.curvature import BatchCurvature, rows_of_draws
from slangvi.diagnosis.findings import COVERED, judge
from slangvi.diagnosis.history import History
from slangvi.diagnosis.report import Diagnosis, Layer
from slangvi.keywords import bind_settings
from slangvi.methods import bbb, full, mean_field, slang
from slangvi.methods.gather import RowGatherer
from slangvi.optimizer import VariationalOptimizer
from slangvi.optimizer.groups import JOINED
from slangvi.params.values import per_parameter
from slangvi.predict.samples import call, evaluating
from slangvi.priors import Prior, described_prior
from slangvi.rows import GradientRecorder, RowGroup
from slangvi.schedules import rate_at, warmed_up
from slangvi.settings import (
    CompiledSettings,
    CurvatureSettings,
    FunctionalSettings,
    GaussianSettings,
    HessianSettings,
    LogLikelihood,
)

__all__ = ["diagnose", "diagnose_state"]

# Rows of all draws together, of which products are taken in float64: as many as so many entries hold, within bounds.
# Examples tell more than draws: draws are dropped first, down to two, which noise needs.
ENTRIES, LEAST_ROWS, MOST_ROWS = 1 << 26, 128, 2048
# State → name of the method, and the settings that its `build` takes.
_FUNCTIONAL: dict[type, tuple[str, type[GaussianSettings]]] = {
    slang.State: ("slang", CompiledSettings),
    mean_field.State: ("mean_field", HessianSettings),
    full.State: ("full", HessianSettings),
    bbb.State: ("bbb", bbb.BBBSettings),
}
# A draw of the weights (P,) → rows of the batch there.
Gather = Callable[[Tensor], RowGroup]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run as far as it is known, whatever interface it is of; None for what is not known.

    Args:
        method: its name.
        state: of a Gaussian method.
        prior: λ and μ₀.
        num_data: N.
        temperature: of the likelihood.
        init_precision: d at the start, (P,).
        start_share: share of it that is left.
        info: of the last step.
        step_examples: examples of a step.
        skipped: bad batches passed over.
        exceeds_num_data: whether a batch was larger than N.
    """

    method: str
    state: Any
    prior: Prior
    num_data: int
    temperature: float
    init_precision: Tensor | None = None
    start_share: float | None = None
    info: Any = None
    step_examples: int | None = None
    skipped: int = 0
    exceeds_num_data: bool = False


def diagnose(
    opt: Any,
    batch: tuple[Any, Any] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    closure: Callable[[], Tensor] | None = None,
    history: History | None = None,
    start: Mapping[str, Tensor] | None = None,
    draws: int = 4,
    seed: int = 0,
) -> Diagnosis:
    """Look at a trained posterior, and return numbers with plain sentences about them.

    Nothing is changed: draws come from a generator of its own, and weights, gradients, modes of modules and random
    states are put back, so that later steps are the same bit by bit. The model sees the batch in eval mode.

    Args:
        opt: an optimizer with a Gaussian posterior (`SLANG`, `OnlineEig`, `VOGN`, `FullGaussian`, `BBB`), or a fitted
            `SLANGClassifier` or `SLANGRegressor`, which is looked at without a batch.
        batch: inputs and targets; curvature, shrinkage of sds and gradient noise need one. Inputs are a tensor, or a
            tuple (positional arguments) or dict (keyword arguments) of tensors. Take a large batch, at best all of the
            training set. Of more than 1024 examples, of large networks fewer, so many are chosen at random.
        loss: function of (outputs, targets), reduced over examples as `loss_reduction` says, such as
            `F.cross_entropy`.
        closure: in place of batch and loss, returns the loss of a batch at the current weights without backward, as
            for `opt.elbo`.
        history: record of the steps, filled by `slangvi.track(opt, history)`.
        start: name → weights before training, for the distance the mean has gone.
        draws: draws of the weights at which gradients are taken; at least two where the batch is large.
        seed: of the draws.

    Example:
        >>> import slangvi
        >>> torch.manual_seed(0)
        <torch._C.Generator object at 0x...>
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = slangvi.SLANG(model, num_data=50, rank=2)
        >>> report = diagnose(opt)
        >>> print(report["moved"].sentence)
        no step was taken: the posterior is its start.
    """
    draws, seed = checks.count("draws", draws), checks.count("seed", seed, least=0)
    _check_history(history)
    if not isinstance(opt, VariationalOptimizer):
        if batch is not None or closure is not None:
            raise TypeError(
                f"batch and closure need an optimizer, got {type(opt).__name__}. Of an estimator, pass its state_, and "
                "the log-likelihood of its scaled inputs, to slangvi.diagnosis.diagnose_state."
            )
        return _report(_of_estimator(opt), None, history, start)
    own = opt._own()
    own._sync()
    run = _of_optimizer(own, history)
    if (batch is None) != (loss is None) or (batch is not None and closure is not None):
        raise TypeError(
            "give a batch together with its loss, e.g. diagnose(opt, (x, y), F.cross_entropy), or a closure."
        )
    if batch is not None and loss is not None:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(f"batch must be a pair of inputs and targets, got {type(batch).__name__}.")
        (x, y), reduced = batch, loss
        closure = lambda: reduced(call(own.model, {}, x), y)  # noqa: E731
    if closure is None:
        return _report(run, None, history, start)
    thetas = _draws(own, run, draws, seed)
    with _listening(own, closure, _most_rows(run.state) // min(draws, 2), seed) as gather:
        groups = _gathered(gather, thetas, _most_rows(run.state))
    with own._exact():
        return _report(run, groups, history, start)


def diagnose_state(
    state: Any,
    log_likelihood: LogLikelihood | None = None,
    batch: Any = None,
    *,
    info: Any = None,
    history: History | None = None,
    start: Mapping[str, Tensor] | None = None,
    draws: int = 4,
    seed: int = 0,
    **options: Any,
) -> Diagnosis:
    """Do the same as `slangvi.diagnose` for a state of the functional interface.

    Args:
        state: of `slangvi.slang`, `online_eig`, `mean_field`, `full` or `bbb`.
        log_likelihood: (params, batch) → (M,), as `build` takes it; needed with a batch.
        batch: as `update` takes it.
        info: of the last step.
        history: filled by `history.add(info.step, loss=info.loss, kl=info.kl)`.
        start: name → weights before training.
        draws: draws of the weights at which gradients are taken; at least two where the batch is large.
        seed: of the draws.
        options: what `build` was given, `num_data` and `prior_precision` among them.

    Example:
        >>> def log_likelihood(params, batch):
        ...     return -0.5 * (batch["y"] - batch["x"] @ params["w"]) ** 2
        >>> options = {"num_data": 2, "rank": 1, "lr": 0.5}
        >>> vi = slang.build(log_likelihood, **options)
        >>> state = vi.init({"w": torch.zeros(2)})
        >>> diagnose_state(state, **options).effective_parameters
        0.0
    """
    draws, seed = checks.count("draws", draws), checks.count("seed", seed, least=0)
    _check_history(history)
    if type(state) not in _FUNCTIONAL:
        raise TypeError(f"state must be that of a Gaussian method, got {type(state).__name__}.")
    if state.loc.ndim != 1:
        raise ValueError(f"state must be of one run, got leading dimensions {tuple(state.loc.shape[:-1])}.")
    if (log_likelihood is None) != (batch is None):
        raise TypeError("give log_likelihood and batch together, or neither.")
    method, kind = _FUNCTIONAL[type(state)]
    settings = bind_settings("diagnose_state", kind, **options)
    like = state.loc
    run = _Run(
        method=method,
        state=state,
        prior=described_prior(settings, state.spec, like),
        num_data=settings.num_data,
        temperature=settings.temperature,
        init_precision=per_parameter("init_precision", settings.init_precision, state.spec, like),
        start_share=_left_by_schedule(settings, state.step) if isinstance(settings, FunctionalSettings) else None,
        info=info,
        step_examples=_examples_of(info, settings.mc_samples),
    )
    if log_likelihood is None:
        return _report(run, None, history, start)
    known = settings if isinstance(settings, FunctionalSettings) else FunctionalSettings(num_data=1, lr=0.1)
    settings_of_rows = replace(
        known, engine="factored", curvature_rows=_most_rows(state) // min(draws, 2), lr=0.1, precision_lr=None
    )
    gatherer, generator = RowGatherer(log_likelihood, settings_of_rows), torch.Generator(like.device)

    def gather(theta: Tensor) -> RowGroup:
        (group,), _ = gatherer.groups_at(state.spec, theta.unsqueeze(0), batch, generator.manual_seed(seed))
        return group

    thetas = state.precision.sample((draws,), generator.manual_seed(seed), like)
    with _random_states_kept(like.device):
        groups = _gathered(gather, thetas, _most_rows(state))
    return _report(run, groups, history, start)


# ---- where a run comes from


def _of_optimizer(own: VariationalOptimizer[Any, Any], history: History | None) -> _Run:
    state, settings = own._state, own.settings
    if not hasattr(state, "precision"):
        raise TypeError(f"{type(own).__name__} has no Gaussian posterior to diagnose. Its predictions tell of it.")
    has_start = "init_precision" in own.param_groups[0]
    return _Run(
        method=type(own).__name__,
        state=state,
        prior=own._hyper.prior(),
        num_data=settings.num_data,
        temperature=settings.temperature,
        init_precision=own._hyper.per_parameter("init_precision") if has_start else None,
        start_share=_left_by_groups(own, settings, history) if isinstance(settings, CurvatureSettings) else None,
        info=own.info,
        step_examples=_examples_of(own.info, settings.mc_samples),
        skipped=own.num_skipped,
        exceeds_num_data="small data" in own._warned,
    )


def _of_estimator(fitted: Any) -> _Run:
    state: Any = getattr(fitted, "state_", None)
    if type(state) not in _FUNCTIONAL or not hasattr(fitted, "prior_precision"):
        raise TypeError(
            "opt must be one of slangvi's optimizers or a fitted estimator, got "
            f"{type(fitted).__name__}. For a state of the functional interface call slangvi.diagnosis.diagnose_state."
        )
    lam = per_parameter("prior_precision", fitted.prior_precision, state.spec, state.loc)
    given = fitted.init_precision
    return _Run(
        method=type(fitted).__name__,
        state=state,
        prior=Prior(lam, torch.zeros_like(lam)),
        num_data=round(fitted.n_samples_seen_),
        temperature=float(fitted.temperature),
        init_precision=None if given == "auto" else per_parameter("init_precision", given, state.spec, state.loc),
    )


def _examples_of(info: Any, mc_samples: int) -> int | None:
    """Return the examples of the last step, each of which has a row at every draw."""
    return None if info is None else max(1, info.num_rows // mc_samples)


def _check_history(history: Any) -> None:
    if history is not None and not isinstance(history, History):
        raise TypeError(f"history must be a slangvi.History, got {type(history).__name__}.")


# ---- memory of the start


def _left_by_groups(own: VariationalOptimizer[Any, Any], settings: CurvatureSettings, history: History | None) -> float:
    """Estimate the share of the starting precision that is left: the largest of all groups.

    Where β follows a learning rate that has changed, it is taken as the mean of those recorded, or else of the first
    and the present one.
    """
    shares = []
    for group in own.param_groups:
        beta = group.get("precision_lr")
        if beta is None:
            recorded = [rate for rate in history["lr"] if rate > 0] if history is not None else []
            ends = [float(group.get("initial_lr", group["lr"])), float(group["lr"])]
            rates = recorded if recorded and len(own.param_groups) == 1 else ends
            beta = sum(rates) / len(rates)
        shares.append(_left(float(beta), own._state.step - group.get(JOINED, 0), settings.precision_warmup))
    return max(shares)


def _left(beta: float, steps: int, warms_up: bool) -> float:
    """Return Π(1 − βₜ) over steps with one β, which averages all it has seen at first where it warms up.

    Example:
        >>> _left(0.5, 3, warms_up=False), _left(0.25, 3, warms_up=True), _left(1.0, 1, warms_up=False)
        (0.125, 0.25, 0.0)
    """
    if beta >= 1.0 and steps:
        return 0.0
    # While 1/(t+1) exceeds β the product telescopes to 1/(t+1).
    averaging = min(steps, math.ceil(1 / beta) - 1) if warms_up and beta > 0 else 0
    return float((1 - beta) ** (steps - averaging) / (averaging + 1))


def _left_by_schedule(settings: FunctionalSettings, steps: int) -> float:
    """Return Π(1 − βₜ) of schedules that are known."""
    schedule, left = settings.lr if settings.precision_lr is None else settings.precision_lr, 1.0
    for step in range(1, steps + 1):
        beta = rate_at("precision_lr", schedule, step)
        left *= 1.0 - (warmed_up(beta, step) if settings.precision_warmup else beta)
    return left


# ---- rows of a batch


def _draws(own: VariationalOptimizer[Any, Any], run: _Run, draws: int, seed: int) -> Tensor:
    """Return draws of the weights, (S, P), from a generator of their own."""
    generator = torch.Generator(run.state.loc.device).manual_seed(seed)
    with torch.no_grad(), own._exact():
        thetas: Tensor = run.state.precision.sample((draws,), generator, run.state.loc)
    return thetas


def _most_rows(state: Any) -> int:
    """Return the number of rows to take at all draws together."""
    size: int = state.spec.num_params
    return min(MOST_ROWS, max(LEAST_ROWS, ENTRIES // size))


def _gathered(gather: Gather, thetas: Tensor, most: int) -> list[RowGroup]:
    """Return the rows of each draw, or of fewer draws if rows would be too many."""
    groups = [gather(thetas[0])]
    draws = min(len(thetas), max(2, most // groups[0].height))
    return groups + [gather(theta) for theta in thetas[1:draws]]


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """Put torch's random states back after the block, and let it differentiate."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def _listening(
    own: VariationalOptimizer[Any, Any], closure: Callable[[], Tensor], rows: int, seed: int
) -> Iterator[Gather]:
    """Yield a function from draws to rows; after the block model and optimizer are as they were."""
    model, state, loc = own.model, own._state, own._state.loc
    grads = [(param, param.grad) for param in model.parameters()]
    unrecorded, generator = set(own._recorder.unrecorded), torch.Generator(loc.device)
    recorder = GradientRecorder(model, state.spec, loc.dtype, curvature_rows=rows, generator=generator)
    leaves = [param for group in own.param_groups for param in group["params"]]
    is_mean = own.settings.loss_reduction == "mean"

    def gather(theta: Tensor) -> RowGroup:
        own._write(theta)
        generator.manual_seed(seed)  # the same examples at every draw
        with recorder.recording():
            value = closure()
            if recorder.has_passes or not isinstance(value, Tensor) or not value.requires_grad:
                raise RuntimeError(
                    "the closure must return the loss as a tensor, without calling backward(); the one of "
                    "step(closure) calls it. Pass a function that computes the loss alone."
                )
            value.backward(inputs=leaves)
        for param in leaves:
            param.grad = None
        (group,) = recorder.collect()
        return group.scaled(group.num_rows) if is_mean else group

    try:
        for param, _ in grads:
            param.grad = None
        with evaluating(model), _random_states_kept(loc.device):
            yield gather
    finally:
        recorder.close()
        own._write(loc)
        for param, grad in grads:
            param.grad = grad
        own._recorder.unrecorded.clear()
        own._recorder.unrecorded.update(unrecorded)


# ---- numbers


@torch.no_grad()
def _report(
    run: _Run,
    groups: list[RowGroup] | None,
    history: History | None,
    start: Mapping[str, Tensor] | None,
) -> Diagnosis:
    """Return the diagnosis of a run, and of the batch where rows of it were taken."""
    state, prior = run.state, run.prior
    variances = state.precision.inv_diag().double()
    begun = None if start is None else _flat_start(start, state)
    layers = tuple(_layers(run, variances, begun))
    found = Diagnosis(
        method=run.method,
        step=state.step,
        num_params=state.spec.num_params,
        num_data=run.num_data,
        temperature=run.temperature,
        rank=_rank_of(state),
        layers=layers,
        kl=float(slang.kl_to_prior(state, prior)),
        effective_parameters=sum(layer.effective for layer in layers),
        captured=getattr(run.info, "captured", None),
        start_share=run.start_share,
        moved=None if begun is None else _root_mean_square((state.loc.double() - begun) / variances.sqrt()),
        skipped=run.skipped,
        step_examples=run.step_examples,
        rank_used=getattr(run.info, "rank_used", None),
        exceeds_num_data=run.exceeds_num_data,
        curves={} if history is None else history.curves,
    )
    if groups is not None:
        gradients = rows_of_draws(state.spec, groups, state.loc.new_empty(0))
        curvature = BatchCurvature(gradients, len(groups), run.num_data / run.temperature, prior)
        found = _with_batch(found, curvature, variances)
    return replace(found, findings=judge(found))


def _with_batch(found: Diagnosis, curvature: BatchCurvature, variances: Tensor) -> Diagnosis:
    """Return the diagnosis with what a batch tells."""
    count, noise = curvature.num_examples, curvature.noise()
    is_whole = count >= found.num_data and curvature.height == count * curvature.num_draws
    coverage = 1.0 if is_whole else curvature.coverage()
    shrinkage = faithful = None
    if coverage <= COVERED:
        reference = curvature.variances()
        shrinkage, faithful = curvature.shrinkage(variances, reference), curvature.faithful_rank(reference)
    return replace(
        found,
        captured=1.0 if found.rank is None else curvature.captured(found.rank),
        enough_rank=curvature.enough_rank(),
        faithful_rank=faithful,
        shrinkage=shrinkage,
        coverage=coverage,
        spectrum=tuple(curvature.spectrum.tolist()),
        gradient_noise=noise.scale,
        draw_share=noise.draw_share(found.step_examples or count),
        batch_examples=count,
        exceeds_num_data=found.exceeds_num_data or count > found.num_data,
    )


def _layers(run: _Run, variances: Tensor, begun: Tensor | None) -> Iterator[Layer]:
    state, lam = run.state, run.prior.diagonal.double()
    stddev, loc = variances.sqrt(), state.loc.double()
    for name, part in state.spec.slices.items():
        sd = stddev[part]
        if not len(sd):
            continue
        start_ratio = moved = None
        if run.init_precision is not None:
            start_ratio = _median(sd * run.init_precision[part].double().sqrt())
        if begun is not None:
            moved = _root_mean_square((loc[part] - begun[part]) / sd)
        yield Layer(
            name=name,
            size=len(sd),
            stddev=_median(sd),
            smallest=float(sd.min()),
            largest=float(sd.max()),
            prior_stddev=_median(lam[part].rsqrt()),
            ratio=_median(sd * lam[part].sqrt()),
            signal_to_noise=_median(loc[part].abs() / sd),
            effective=float((1 - lam[part] * variances[part]).sum()),
            start_ratio=start_ratio,
            moved=moved,
        )


def _flat_start(start: Mapping[str, Tensor], state: Any) -> Tensor:
    """Return given weights as one vector, (P,)."""
    missing = [name for name in state.spec.names if name not in start]
    if missing:
        raise ValueError(f"start lacks {', '.join(map(repr, missing))}. Pass copies of model.named_parameters().")
    for name, shape in zip(state.spec.names, state.spec.shapes, strict=True):
        if start[name].shape != shape:
            raise ValueError(f"start[{name!r}] must have shape {tuple(shape)}, got {tuple(start[name].shape)}.")
    found: Tensor = state.spec.flatten(start, torch.float64).to(state.loc.device)
    return found


def _rank_of(state: Any) -> int | None:
    """Return L; None for a dense precision."""
    if hasattr(state, "prec_matrix"):
        return None
    return len(state.prec_factor) if hasattr(state, "prec_factor") else 0


def _median(values: Tensor) -> float:
    return float(values.median())


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
