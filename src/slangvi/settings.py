"""Settings of the methods, written once: a frozen dataclass for each family, with checks and documentation.

`build` functions and optimizers take the fields as keywords, see `slangvi.keywords`. A new setting is two edits: its
field here, with its check and a line under "Args:", and the place that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from slangvi import checks
from slangvi.divergence import REACTIONS
from slangvi.likelihoods import Likelihood, likelihood_named
from slangvi.params import Params
from slangvi.priors import Prior, check_normal, check_plain, low_rank
from slangvi.schedules import Schedule
from slangvi.types import Routes

__all__ = [
    "BETAS",
    "EPS",
    "LIKELIHOOD_CURVATURES",
    "OWN_PASS",
    "AdamOptimizerSettings",
    "AdamSettings",
    "CheckedFields",
    "CompiledOptimizerSettings",
    "CompiledSettings",
    "CurvatureOptimizerSettings",
    "CurvatureSettings",
    "Engine",
    "FunctionalSettings",
    "GaussianSettings",
    "HessianSettings",
    "LogLikelihood",
    "LowRankOptimizerSettings",
    "LowRankSettings",
    "MethodSettings",
    "OptimizerSettings",
    "checked",
    "choice",
    "per_group",
]

LogLikelihood = Callable[[Params, Any], Tensor]
# (name, value) → the plain value; raises if there is none.
Check = Callable[[str, Any], Any]
Engine = Literal["factored", "dense"]
T = TypeVar("T")
# Curvatures whose rows come from a pass of our own, and not from the loss; "auto" has become "ef" where it does not.
LIKELIHOOD_CURVATURES = ("ggn", "fisher")
OWN_PASS = (*LIKELIHOOD_CURVATURES, "auto")
# Examples that "auto" gives rows at least, and entries of rows that it does not save on.
LEAST_ROWS, FEW_ENTRIES = 16, 1 << 20
# Defaults of Adam.
BETAS = (0.9, 0.999)
EPS = 1e-8


def checked(default: T, check: Check | None, per_group: bool = False) -> T:
    """Return a field whose value is checked and converted; None is taken as it is where that is the default."""
    made: T = field(default=default, metadata={"check": check, "per_group": per_group})
    return made


def per_group(default: T) -> T:
    """Return a field that param groups of an optimizer may set, each to its own value, and check."""
    return checked(default, None, per_group=True)


def choice(*allowed: str) -> Check:
    """Return a check for one of a few words."""
    return partial(checks.choice, allowed=allowed)


def _curvature_rows(name: str, value: Any) -> Any:
    """Refuse what is no number of examples."""
    hint = 'None takes all examples of a batch, "auto" chooses.'
    return value if value is None or value == "auto" else checks.count(name, value, hint=hint)


def _check_engine(curvature: str, engine: str | None) -> None:
    """Refuse a pass of our own where rows are found by definition."""
    if engine == "dense" and curvature in LIKELIHOOD_CURVATURES:
        raise ValueError(f'curvature={curvature!r} needs engine="factored", got "dense". Drop one of them.')


def schedule(high: float = math.inf) -> Check:
    """Return a check for a rate that is a number; one that is a function of the step is checked at every step."""

    def check(name: str, value: Any) -> Any:
        if value is not None and not callable(value):
            checks.rate(name, value, high)
        return value  # as it is: schedulers may write to a tensor

    return check


class CheckedFields:
    """Base of frozen settings: a new object has its fields checked and converted, see `checked`."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value, check = getattr(self, item.name), item.metadata.get("check")
            if check is not None and not (value is None and item.default is None):
                self._check(item.name, check)

    def _check(self, name: str, check: Check) -> None:
        """Replace a field by the plain value that a check returns for it."""
        object.__setattr__(self, name, check(name, getattr(self, name)))


@dataclass(frozen=True, eq=False, kw_only=True)
class MethodSettings(CheckedFields):
    """Settings of every method.

    Args:
        num_data: N, examples in the training set.
        lr: α, a number or a function of the step counted from 1.
        prior_precision: λ; a number, a dict of names or globs, or a (P,) tensor.
        mc_samples: S, draws of the weights per step.
        temperature: the likelihood is weighed by 1/temperature.
    """

    num_data: int = field(
        metadata={"check": partial(checks.count, hint="Pass the number of training examples, len(train_set).")}
    )
    lr: Schedule
    prior_precision: Any = per_group(1.0)
    mc_samples: int = checked(1, checks.count)
    temperature: float = checked(1.0, partial(checks.number, low=0.0))


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimizerSettings(MethodSettings):
    """Settings of every optimizer.

    Args:
        params: parameters to infer (tensors, or groups as in torch.optim); None takes all that require grad.
        lr: α.
        mc_samples: S, draws of the weights in `step(closure)`.
        loss_reduction: "mean" or "sum" over the examples of a batch, as your loss does it.
        accumulation_steps: what your loop divides each micro-batch's loss by (Lightning's `accumulate_grad_batches`,
            Accelerate's `gradient_accumulation_steps`); 1 when it does not divide.
        max_bad_batches: batches with NaN or Inf in loss, gradient or new state that are skipped in a row, counted in
            `info.skipped`, before `NumericalError` is raised; 0 raises at the first.
        generator: source of randomness, on the parameters' device; None uses torch's global one.
    """

    params: Any = field(default=None, kw_only=False)
    lr: float
    loss_reduction: str = checked("mean", choice("mean", "sum"))
    accumulation_steps: int = checked(1, checks.count)
    max_bad_batches: int = checked(0, partial(checks.count, least=0, hint="0 raises at the first one."))
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {type(self.generator).__name__}.")

    def group_defaults(self) -> dict[str, Any]:
        """Return the values that param groups start with."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.metadata.get("per_group")}


@dataclass(frozen=True, eq=False, kw_only=True)
class GaussianSettings(MethodSettings):
    """Settings of methods whose posterior is a Gaussian.

    Args:
        prior_mean: μ₀; a number, a dict of names or globs, or a (P,) tensor.
        init_precision: diagonal of the precision at the start; number, dict or tensor. Where it is left at 1 beside a
            `prior`, that prior's.
        prior: a posterior of the same parameters, such as `opt.posterior` of an earlier run, as the prior of this one;
            it takes the place of `prior_precision` and `prior_mean`.
    """

    prior_mean: Any = per_group(0.0)
    init_precision: Any = per_group(1.0)
    prior: Any = checked(None, check_normal)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is None:
            return
        check_plain(vars(self))
        if isinstance(self.init_precision, int | float) and self.init_precision == 1.0:
            factor, diag = low_rank(self.prior)
            object.__setattr__(self, "init_precision", Prior(diag, self.prior.loc, factor).diagonal.detach())


# ---- methods that estimate the curvature from the gradient of every example


@dataclass(frozen=True, eq=False, kw_only=True)
class CurvatureSettings(GaussianSettings):
    """Settings of methods that average the curvature of every example.

    Args:
        precision_lr: β, at most 1; None follows `lr`, schedule included, as in the paper.
        momentum: γ, on the likelihood gradient.
        precision_warmup: let the first steps average the curvature they see, βₜ = max(β, 1/(t+1)), so that the
            precision is there before the mean relies on it. False is the paper as printed.
        verify: check examples against the definition of their gradient, ever more rarely.
        curvature_rows: examples of each batch, drawn at random, whose rows estimate the curvature; all examples give
            the gradient of the mean. None takes all, as in the paper. "auto" takes all where rows come with the loss;
            where they take a pass of their own, 16, or twice the rank, or a million entries, whichever is most.
        memory_limit: bytes that formed gradients and temporaries may take; None leaves it to fixed defaults.
        routes: which gradients are formed, and how SLANG finds the spectrum; None leaves it to counting.
        prior_precision: λ; a number, a dict of names or globs, or a (P,) tensor. "learn" for one number that the run
            learns by the ELBO, "learn-each" for one of each parameter tensor, or "learn" in a dict for one of that name
            or glob. Param groups have theirs.
        noise_precision: "learn" to learn the noise of Gaussian targets in the run, beginning at that of the likelihood;
            None leaves it there. The loss of an optimizer is `-opt.likelihood.log_prob(outputs, targets).mean()` then.
        on_divergence: what to do when the mean keeps going to and fro by more than a posterior standard deviation in a
            step, which is what too large a rate comes to: "warn" once, "raise" `DivergenceError`, or "ignore".
    """

    precision_lr: Schedule | None = per_group(None)
    momentum: float = per_group(0.0)
    precision_warmup: bool = checked(True, checks.flag)
    verify: bool = checked(True, checks.flag)
    curvature_rows: int | Literal["auto"] | None = checked("auto", _curvature_rows)
    memory_limit: int | None = checked(None, partial(checks.count, hint="It is a number of bytes."))
    routes: Routes | None = None
    noise_precision: str | None = checked(None, choice("learn"))
    on_divergence: str = checked("warn", choice(*REACTIONS))

    def rows_of_pass(self, num_params: int) -> int | None:
        """Return how many examples of a batch have rows that estimate the curvature of P parameters; None for all."""
        if self.curvature_rows != "auto":
            return self.curvature_rows
        if getattr(self, "curvature", "ef") not in OWN_PASS:
            return None
        return max(LEAST_ROWS, 2 * getattr(self, "rank", 0), FEW_ENTRIES // max(1, num_params))

    def for_likelihood(self, given: str | Likelihood | None) -> Self:
        """Return the settings with what "auto" stands for, given the likelihood that is known, if one is.

        A curvature that is left at "auto" is one of the likelihood, which decides by the number of outputs.
        """
        chosen: dict[str, Any] = {}
        is_known = given is not None and likelihood_named(given).gives_curvature and not getattr(self, "compile", False)
        curvature = getattr(self, "curvature", "ef")
        if curvature == "auto" and not (is_known and getattr(self, "engine", None) != "dense"):
            chosen["curvature"] = curvature = "ef"
        if getattr(self, "projection", None) == "auto":
            chosen["projection"] = "em" if curvature in OWN_PASS else "eig"
        return replace(self, **chosen) if chosen else self

    @property
    def routes_within_limit(self) -> Routes:
        """The routes, with nothing larger than `memory_limit`."""
        return (self.routes or Routes()).within(self.memory_limit)


@dataclass(frozen=True, eq=False, kw_only=True)
class FunctionalSettings(CurvatureSettings):
    """Settings of `build` for methods that average the curvature of every example.

    Args:
        precision_lr: β, a number or a function of the step, at most 1; None follows `lr`, as in the paper.
        model: the module behind `log_likelihood`, which is called with parameters of the module's dtypes.
        engine: "factored" reads gradients off autograd's graph, one backward pass for each draw, and keeps them as
            factors where that is less; "dense" forms all of them by `torch.func`, all draws in one pass if they are
            small. None takes "factored" where there is a `model`, a number of `curvature_rows`, or a curvature of the
            likelihood.
        curvature: "ef", the empirical Fisher of the paper, from the gradients of the log-likelihood; "ggn", the
            generalised Gauss-Newton matrix, which is the Hessian of models that are linear in their parameters; or
            "fisher", an estimate of that from targets that are drawn, for any number of outputs. The latter two need a
            log-likelihood that knows its outputs, such as `slangvi.Categorical().of(model)`. "auto" takes "ggn" for
            one of up to four outputs, "fisher" for more, and "ef" for other functions, `compile=True` and
            `engine="dense"`.
    """

    model: nn.Module | None = None
    engine: Engine | None = checked(None, choice("factored", "dense"))
    curvature: str = checked("auto", choice("auto", "ef", *LIKELIHOOD_CURVATURES))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_engine(self.curvature, self.engine)
        self._check("lr", schedule(self.highest_lr))
        self._check("precision_lr", schedule(1.0))
        self._check("momentum", partial(checks.number, low=0.0, high=1.0, closed="low"))
        if self.engine == "dense" and isinstance(self.curvature_rows, int):
            raise ValueError('curvature_rows needs engine="factored", got "dense". Drop one of them.')

    @property
    def reads_graph(self) -> bool:
        """Tell whether gradients are read off autograd's graph."""
        has_reason = self.model is not None or isinstance(self.curvature_rows, int) or self.curvature in OWN_PASS
        return self.engine == "factored" or (self.engine is None and has_reason)

    @property
    def highest_lr(self) -> float:
        """Largest α that is allowed: 1 where β follows it, since β is the weight of an average."""
        return 1.0 if self.precision_lr is None else math.inf


@dataclass(frozen=True, eq=False, kw_only=True)
class HessianSettings(FunctionalSettings):
    """Settings of `build` where the exact Hessian may stand in for the empirical Fisher.

    Args:
        curvature: "auto", "ef", "ggn" or "fisher" as for other methods; or "hessian", the exact Hessian at every draw
            (of a mean-field precision, its diagonal). That takes a backward pass for each of the P parameters, and
            needs a log-likelihood that is concave, or nearly so.
    """

    curvature: str = checked("auto", choice("auto", "ef", *LIKELIHOOD_CURVATURES, "hessian"))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Rank:
    """The rank, which signatures show before the other settings.

    Args:
        rank: L ≥ 0, columns of the low-rank precision factor U.
    """

    rank: int = field(metadata={"check": checks.rank})


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRankSettings(FunctionalSettings, _Rank):
    """Settings of `build` for precisions that are low-rank plus diagonal."""

    momentum: float = per_group(0.9)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Compiled(CheckedFields):
    """Settings of SLANG alone.

    Args:
        projection: way back from the new precision to low rank plus diagonal: "eig" keeps the leading eigenvectors, as
            in the paper; "em" takes a step of factor analysis, which does not depend on the scale of the inputs. "auto"
            takes "em" where the curvature comes from a likelihood, and "eig" where it comes from the loss.
    """

    projection: str = checked("auto", choice("auto", "eig", "em"))
    compile: bool = checked(False, checks.flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile and self.projection == "em":
            raise ValueError('compile=True needs projection="eig", got "em". Drop one of them.')
        curvature = getattr(self, "curvature", "ef")
        if self.compile and curvature in OWN_PASS and curvature != "auto":
            raise ValueError(f'compile=True needs curvature="ef", got {curvature!r}. Drop one of them.')
        if self.compile and getattr(self, "noise_precision", None) is not None:
            raise ValueError("compile=True needs noise that is known. Drop noise_precision, or compile=True.")


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledSettings(_Compiled, LowRankSettings):
    """Settings of `slangvi.slang.build`.

    Args:
        compile: capture draws, forward, backward and update in CUDA graphs and replay them: faster for networks whose
            kernels are small. Needs `engine="factored"` and a CUDA device; otherwise a warning says why steps run
            eagerly. Python code in `log_likelihood` then runs only when a graph is captured and when a check is due.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class CurvatureOptimizerSettings(OptimizerSettings, CurvatureSettings):
    """Settings of optimizers that average the curvature of every example.

    Args:
        curvature: "ef", the empirical Fisher of the paper, from gradients of your own loss, which has to be the
            log-likelihood; "ggn", the generalised Gauss-Newton matrix of a `likelihood`, or "fisher", an estimate of
            that from targets that are drawn, for any number of outputs. The latter two take a small pass of their own
            over the `curvature_rows` examples, so that the loss may be anything, and clipping of p.grad acts. "auto"
            takes "ggn" with a `likelihood` of up to four outputs, "fisher" with one of more, and "ef" without, and with
            `compile=True` or `engine="dense"`.
        likelihood: "categorical", "bernoulli", "gaussian" or a `Likelihood`, of the targets given the outputs.
        engine: "factored" reads gradients off autograd's graph; "dense" goes back through it once for each example
            (slow; for comparison).
    """

    lr: float = per_group(0.05)
    precision_lr: float | None = per_group(None)
    curvature: str = "auto"
    likelihood: str | Likelihood | None = checked(None, lambda name, value: likelihood_named(value))
    engine: Engine = checked("factored", choice("factored", "dense"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curvature == "hessian":
            raise ValueError(
                'curvature must be "ef" for an optimizer, got "hessian": a backward pass holds no second derivatives. '
                'Use the functional interface, build(..., curvature="hessian").'
            )
        self._check("curvature", choice("ef", *OWN_PASS))
        _check_engine(self.curvature, self.engine)
        if self.curvature in LIKELIHOOD_CURVATURES and self.likelihood is None:
            raise ValueError(
                f'curvature={self.curvature!r} needs a likelihood, got None. Pass likelihood="categorical", '
                '"bernoulli", "gaussian", or a slangvi.likelihoods.Likelihood of your own.'
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRankOptimizerSettings(CurvatureOptimizerSettings, _Rank):
    """Settings of optimizers whose precision is low-rank plus diagonal."""

    rank: int = checked(1, checks.rank)
    momentum: float = per_group(0.9)


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledOptimizerSettings(_Compiled, LowRankOptimizerSettings):
    """Settings of `slangvi.SLANG`.

    Args:
        compile: replay the update from CUDA graphs, once rows of the same shapes were seen twice; forward and backward
            are the user's own. Without a CUDA device a warning says so and steps run eagerly.
    """


# ---- methods that move by Adam


@dataclass(frozen=True, eq=False, kw_only=True)
class AdamSettings(MethodSettings):
    """Settings of methods that move by Adam.

    Args:
        lr: α of Adam, a number or a function of the step counted from 1.
        betas: β₁ and β₂ of Adam.
        eps: ε of Adam, against gradients of the whole objective, which grow with N.
    """

    lr: Schedule = checked(1e-3, schedule(), per_group=True)
    betas: tuple[float, float] = checked(BETAS, lambda name, value: checks.betas(value), per_group=True)
    eps: float = checked(EPS, partial(checks.number, low=0.0), per_group=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class AdamOptimizerSettings(OptimizerSettings, AdamSettings):
    """Settings of optimizers that move by Adam."""

    lr: float = checked(1e-3, schedule(), per_group=True)
