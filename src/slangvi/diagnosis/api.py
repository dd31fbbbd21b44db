"""Diagnose optimizers, states of the functional interface, and fitted estimators, without changing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slangvi import checks
from slangvi.diagnosis.curvature import BatchCurvature
from slangvi.diagnosis.findings import COVERED, judge
from slangvi.diagnosis.history import History
from slangvi.diagnosis.report import Diagnosis, Layer
from slangvi.keywords import bind_settings
from slangvi.methods import bbb, full, mean_field, slang
from slangvi.methods.gather import RowGatherer
from slangvi.methods.learning import at_learnt_noise, prior_precision_of
from slangvi.optimizer import Inspection, VariationalOptimizer
from slangvi.optimizer.groups import JOINED
from slangvi.params.values import per_parameter
from slangvi.predict.samples import call, evaluating
from slangvi.priors import Prior, described_prior
from slangvi.rows import GradientRecorder, RowGroup
from slangvi.schedules import Schedule, warmed_up
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
_FUNCTIONAL: dict[type, tuple[str, Any]] = {
    slang.State: ("slang", CompiledSettings),
    mean_field.State: ("mean_field", HessianSettings),
    full.State: ("full", HessianSettings),
    bbb.State: ("bbb", bbb.BBBSettings),
}
# A draw of the weights (P,) → rows of the batch there, of the same examples at every draw.
Gather = Callable[[Tensor], RowGroup]


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
            `SLANGClassifier` or `SLANGRegressor`, which takes rows and targets, as for `fit`, as its batch.
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
    _check(draws, seed, history)
    if not isinstance(opt, VariationalOptimizer):
        if loss is not None or closure is not None:
            raise TypeError(
                f"loss and closure need an optimizer, got {type(opt).__name__}. An estimator knows its loss: pass rows "
                "and targets alone, diagnose(estimator, (X, y))."
            )
        return _of_estimator(opt, batch, history, start, draws, seed)
    if (batch is None) != (loss is None) or (batch is not None and closure is not None):
        raise TypeError(
            "give a batch together with its loss, e.g. diagnose(opt, (x, y), F.cross_entropy), or a closure."
        )
    with opt.inspect() as run:
        own, state, settings, curvature = run.optimizer, run.state, run.optimizer.settings, None
        if not hasattr(state, "precision"):
            raise TypeError(f"{run.name} has no Gaussian posterior to diagnose. Its predictions tell of it.")
        if batch is not None and loss is not None:
            (x, y), reduced = _pair(batch), loss
            closure = lambda: reduced(call(own.model, {}, x), y)  # noqa: E731
        if closure is not None:
            with _listening(run, closure, _most_rows(state) // min(draws, 2), seed) as gather:
                curvature = _curvature(state, run.prior, settings, gather, draws, seed)
        known = {"skipped": own.num_skipped, "exceeds_num_data": run.exceeds_num_data}
        known |= _told(run.name, settings, own.info, history)
        if isinstance(settings, CurvatureSettings):
            known["start_share"] = _left_by_groups(run, history)
        return _report(state, run.prior, run.init_precision, start, known, curvature)


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
    _check(draws, seed, history)
    if type(state) not in _FUNCTIONAL:
        raise TypeError(f"state must be that of a Gaussian method, got {type(state).__name__}.")
    if state.loc.ndim != 1:
        raise ValueError(f"state must be of one run, got leading dimensions {tuple(state.loc.shape[:-1])}.")
    if (log_likelihood is None) != (batch is None):
        raise TypeError("give log_likelihood and batch together, or neither.")
    method, kind = _FUNCTIONAL[type(state)]
    settings = bind_settings("diagnose_state", kind, **options)
    log_likelihood, begun = at_learnt_noise(log_likelihood, state), _values(state, settings, "init_precision")
    prior, curvature, known = _prior_of(settings, state), None, _told(method, settings, info, history)
    if log_likelihood is not None:
        gather = _gather(state, log_likelihood, batch, getattr(settings, "model", None), draws, seed)
        curvature = _curvature(state, prior, settings, gather, draws, seed)
    if isinstance(settings, FunctionalSettings):
        schedule = settings.lr if settings.precision_lr is None else settings.precision_lr
        known["start_share"] = _left(schedule, state.step, settings.precision_warmup)
    return _report(state, prior, begun, start, known, curvature)


def _prior_of(settings: Any, state: Any) -> Prior:
    """Return the prior that settings describe, with what a state has learnt of it."""
    if getattr(settings, "prior", None) is not None:
        return described_prior(settings, state.spec, state.loc)
    return Prior(prior_precision_of(settings.prior_precision, state), _values(state, settings, "prior_mean"))


def _of_estimator(
    fitted: Any, batch: Any, history: History | None, start: Mapping[str, Tensor] | None, draws: int, seed: int
) -> Diagnosis:
    state: Any = getattr(fitted, "state_", None)
    if type(state) not in _FUNCTIONAL or not hasattr(fitted, "prior_precision"):
        raise TypeError(
            "opt must be one of slangvi's optimizers or a fitted estimator, got "
            f"{type(fitted).__name__}. For a state of the functional interface call slangvi.diagnosis.diagnose_state."
        )
    lam, curvature = prior_precision_of(fitted.prior_precision, state), None
    begun = None if fitted.init_precision == "auto" else _values(state, fitted, "init_precision")
    settings = GaussianSettings(num_data=round(fitted.n_samples_seen_), lr=0.1, temperature=float(fitted.temperature))
    prior, known = Prior(lam, torch.zeros_like(lam)), _told(type(fitted).__name__, settings, None, history)
    if batch is not None:
        log_likelihood, scaled = fitted.scaled_batch(*_pair(batch))
        gather = _gather(state, log_likelihood, scaled, fitted.module_, draws, seed)
        curvature = _curvature(state, prior, settings, gather, draws, seed)
    return _report(state, prior, begun, start, known, curvature)


def _told(method: str, settings: Any, info: Any, history: History | None) -> dict[str, Any]:
    """Return fields of a diagnosis that settings, the last step and its history tell."""
    told = {"method": method, "num_data": settings.num_data, "temperature": settings.temperature}
    told["curves"] = {} if history is None else history.curves
    if info is not None:
        told["step_examples"] = max(1, info.num_rows // settings.mc_samples)
        told |= {name: getattr(info, name, None) for name in ("captured", "rank_used")}
    return told


def _values(state: Any, settings: Any, name: str) -> Tensor:
    """Return a setting as one number for each parameter, (P,)."""
    return per_parameter(name, getattr(settings, name), state.spec, state.loc, positive=name != "prior_mean")


def _pair(batch: Any) -> Any:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(f"batch must be a pair of inputs and targets, got {type(batch).__name__}.")
    return batch


def _check(draws: int, seed: int, history: Any) -> None:
    checks.count("draws", draws)
    checks.count("seed", seed, least=0)
    if history is not None and not isinstance(history, History):
        raise TypeError(f"history must be a slangvi.History, got {type(history).__name__}.")


# ---- memory of the start


def _left_by_groups(run: Inspection, history: History | None) -> float:
    """Estimate the share of the starting precision that is left: the largest of all groups.

    Where β follows a learning rate that has changed, it is taken as the mean of those recorded, or else of the first
    and the present one.
    """
    groups, shares = run.optimizer.param_groups, []
    for group in groups:
        beta = group.get("precision_lr")
        if beta is None:
            recorded = [rate for rate in history["lr"] if rate > 0] if history is not None else []
            ends = [float(group.get("initial_lr", group["lr"])), float(group["lr"])]
            rates = recorded if recorded and len(groups) == 1 else ends
            beta = sum(rates) / len(rates)
        steps, warms_up = run.state.step - group.get(JOINED, 0), run.optimizer.settings.precision_warmup
        shares.append(_left(float(beta), steps, warms_up))
    return max(shares)


def _left(schedule: Schedule, steps: int, warms_up: bool) -> float:
    """Return Π(1 − βₜ) over steps.

    Example:
        >>> _left(0.5, 3, warms_up=False), _left(0.5, 3, warms_up=True), _left(1.0, 1, warms_up=False)
        (0.125, 0.125, 0.0)
    """
    rates = ((step, schedule(step) if callable(schedule) else schedule) for step in range(1, steps + 1))
    return math.prod(1.0 - (warmed_up(beta, step) if warms_up else beta) for step, beta in rates)


# ---- rows of a batch


def _most_rows(state: Any) -> int:
    """Return the number of rows to take at all draws together."""
    return min(MOST_ROWS, max(LEAST_ROWS, ENTRIES // int(state.spec.num_params)))


def _gather(
    state: Any, log_likelihood: LogLikelihood, batch: Any, model: nn.Module | None, draws: int, seed: int
) -> Gather:
    """Return a function from draws to rows of a log-likelihood."""
    rows = _most_rows(state) // min(draws, 2)
    options: dict[str, Any] = {"model": model, "curvature": "ef", "curvature_rows": rows}
    gatherer = RowGatherer(log_likelihood, FunctionalSettings(num_data=1, lr=0.1, **options))

    def gather(theta: Tensor) -> RowGroup:
        generator = torch.Generator(theta.device).manual_seed(seed)
        return gatherer.groups_at(state.spec, theta.unsqueeze(0), batch, generator)[0][0]

    return gather


def _curvature(state: Any, prior: Prior, settings: Any, gather: Gather, draws: int, seed: int) -> BatchCurvature:
    """Return the curvature of a batch at some draws, of which there are fewer if rows would be too many."""
    device = state.loc.device
    exact = torch.autocast(device.type, enabled=False)
    with exact, torch.no_grad():
        generator = torch.Generator(device).manual_seed(seed)
        thetas = state.precision.sample((draws,), generator, state.loc)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        groups = [gather(thetas[0])]
        groups += [gather(theta) for theta in thetas[1 : max(2, _most_rows(state) // groups[0].height)]]
    with exact, torch.no_grad():
        return BatchCurvature(state.spec, groups, settings.num_data / settings.temperature, prior)


@contextmanager
def _listening(run: Inspection, closure: Callable[[], Tensor], rows: int, seed: int) -> Iterator[Gather]:
    """Yield a function from draws to rows of the loss that a closure returns."""
    model, loc = run.optimizer.model, run.state.loc
    generator = torch.Generator(loc.device)
    recorder = GradientRecorder(model, run.state.spec, loc.dtype, curvature_rows=rows, generator=generator)
    leaves = [param for group in run.optimizer.param_groups for param in group["params"]]

    def gather(theta: Tensor) -> RowGroup:
        run.write(theta)
        generator.manual_seed(seed)
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
        return group.scaled(group.num_rows) if run.optimizer.settings.loss_reduction == "mean" else group

    try:
        with evaluating(model):
            yield gather
    finally:
        recorder.close()


# ---- numbers


@torch.no_grad()
def _report(
    state: Any,
    prior: Prior,
    init_precision: Tensor | None,
    start: Mapping[str, Tensor] | None,
    known: dict[str, Any],
    curvature: BatchCurvature | None = None,
) -> Diagnosis:
    """Return the diagnosis of a state, given fields that it does not tell, and of a batch if its curvature is given."""
    with torch.autocast(state.loc.device.type, enabled=False):
        variances, begun = state.precision.inv_diag().double(), None if start is None else _flat_start(start, state)
        layers = tuple(_layers(state, prior.diagonal.double(), variances, init_precision, begun))
        known["rank"] = None if hasattr(state, "prec_matrix") else len(getattr(state, "prec_factor", ()))
        if begun is not None:
            known["moved"] = _length((state.loc.double() - begun) / variances.sqrt())
        if curvature is not None:
            _add_batch(known, curvature, variances)
        found = Diagnosis(
            step=state.step,
            num_params=state.spec.num_params,
            layers=layers,
            kl=float(slang.kl_to_prior(state, prior)),
            effective_parameters=sum(layer.effective for layer in layers),
            **known,
        )
    return replace(found, findings=judge(found))


def _add_batch(known: dict[str, Any], curvature: BatchCurvature, variances: Tensor) -> None:
    """Add what a batch tells to fields of a diagnosis."""
    count, noise, rank = curvature.num_examples, curvature.noise(), known["rank"]
    is_whole = count >= known["num_data"] and curvature.height == count * curvature.num_draws
    coverage = 1.0 if is_whole else curvature.coverage()
    if coverage <= COVERED:
        reference = curvature.variances()
        known["shrinkage"] = curvature.shrinkage(variances, reference)
        known["faithful_rank"] = curvature.faithful_rank(reference)
    known["exceeds_num_data"] = known.get("exceeds_num_data", False) or count > known["num_data"]
    known["draw_share"] = noise.draw_share(known.get("step_examples") or count)
    known |= {"gradient_noise": noise.scale, "batch_examples": count, "coverage": coverage}
    known |= {"captured": 1.0 if rank is None else curvature.captured(rank), "enough_rank": curvature.enough_rank()}
    known["spectrum"] = tuple(curvature.spectrum.tolist())


def _layers(
    state: Any, lam: Tensor, variances: Tensor, init_precision: Tensor | None, begun: Tensor | None
) -> Iterator[Layer]:
    for name, part in state.spec.slices.items():
        sd, prior, loc = variances[part].sqrt(), lam[part], state.loc[part].double()
        if not len(sd):
            continue
        yield Layer(
            name=name,
            size=len(sd),
            stddev=float(sd.median()),
            smallest=float(sd.min()),
            largest=float(sd.max()),
            prior_stddev=float(prior.rsqrt().median()),
            ratio=float((sd * prior.sqrt()).median()),
            signal_to_noise=float((loc.abs() / sd).median()),
            effective=float((1 - prior * variances[part]).sum()),
            start_ratio=None if init_precision is None else float((sd * init_precision[part].double().sqrt()).median()),
            moved=None if begun is None else _length((loc - begun[part]) / sd),
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


def _length(values: Tensor) -> float:
    """Return the root mean square."""
    return float(values.square().mean().sqrt())
