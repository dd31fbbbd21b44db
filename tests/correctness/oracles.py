"""The table of oracles: what is compared with what, how far apart they may be, and who measures it.

The tests walk it, and `python -m correctness.page` writes docs/correctness.md from it. A new oracle is a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import slangvi
from correctness import calibration, glm, measures

# A test at level 1e-4 of the largest of three chi-squares with nine degrees of freedom.
CHI_SQUARE = 36.0
SE = "standard errors"


@dataclass(frozen=True)
class Oracle:
    """One comparison.

    Args:
        name: unique, used in test ids.
        what: of slangvi.
        reference: what it must equal.
        unit: of the error.
        tolerance: the largest error allowed.
        measure: returns the error.
    """

    name: str
    what: str
    reference: str
    unit: str
    tolerance: float
    measure: Callable[[], float]


FISHER = "fixed point of the empirical Fisher, by quadrature"
BEST = "best Gaussian, by quadrature"


def _functional(name: str, build: Callable[..., object], data: str, kind: str, **options: object) -> Oracle:
    """A row of the functional interface."""
    model = {"linear": glm.linear, "logistic": glm.logistic}[data]
    curvature = {} if build is slangvi.slang.build else {"curvature": kind}
    detail = kind if build is not slangvi.slang.build else "rank P"
    what = f"`{build.__module__.rpartition('.')[2]}.build`, {data}, {detail}"
    reference = FISHER if kind == "ef" else BEST
    if build is slangvi.mean_field.build:
        reference += ", diagonal"
    return Oracle(
        name, what, reference, SE, 4.0, partial(measures.functional, build, model, kind, **curvature, **options)
    )


ORACLES = (
    Oracle(
        "conjugate-newton",
        "`full.update` with Hessians, one step of rate 1",
        "conjugate linear regression, closed form",
        "relative",
        1e-12,
        measures.closed_form_update,
    ),
    Oracle(
        "nist-longley",
        "`full.update` with Hessians, nearly flat prior",
        "NIST StRD Longley, certified estimates and deviations",
        "relative",
        1e-7,
        measures.certified,
    ),
    Oracle(
        "posteriordb-means",
        "`full.build` with Hessians, three linear models of kidiq, unknown noise",
        "posteriordb, means of Stan's draws, known to 0.02 sd",
        "sd",
        0.05,
        lambda: measures.kid_scores()[0],
    ),
    Oracle(
        "posteriordb-deviations",
        "the same",
        "posteriordb, deviations of Stan's draws, known to 1.2 %; the best Gaussian's are 0.2 to 0.6 % smaller",
        "relative",
        0.03,
        lambda: measures.kid_scores()[1],
    ),
    _functional("full-linear-hessian", slangvi.full.build, "linear", "hessian"),
    _functional("full-linear-ef", slangvi.full.build, "linear", "ef"),
    _functional("full-logistic-hessian", slangvi.full.build, "logistic", "hessian"),
    _functional("full-logistic-ef", slangvi.full.build, "logistic", "ef"),
    _functional("slang-linear-rank-P", slangvi.slang.build, "linear", "ef", rank=4),
    _functional("slang-logistic-rank-P", slangvi.slang.build, "logistic", "ef", rank=4),
    _functional("mean_field-linear-hessian", slangvi.mean_field.build, "linear", "hessian"),
    _functional("mean_field-linear-ef", slangvi.mean_field.build, "linear", "ef"),
    _functional("mean_field-logistic-hessian", slangvi.mean_field.build, "logistic", "hessian"),
    _functional("mean_field-logistic-ef", slangvi.mean_field.build, "logistic", "ef"),
    Oracle(
        "SLANG-logistic-rank-P",
        "`SLANG` in a loop, `nn.Linear`, logistic, rank P",
        FISHER,
        SE,
        4.0,
        partial(measures.optimizer_class, slangvi.SLANG, glm.logistic, rank=4),
    ),
    Oracle(
        "VOGN-logistic",
        "`VOGN` in a loop, `nn.Linear`, logistic",
        FISHER + ", diagonal",
        SE,
        4.0,
        partial(measures.optimizer_class, slangvi.VOGN, glm.logistic),
    ),
    Oracle(
        "exact-full",
        "`exact.fit`, full, logistic",
        BEST,
        "sd",
        1e-8,
        partial(measures.exact_fit, glm.logistic, "full"),
    ),
    Oracle(
        "exact-mean-field",
        "`exact.fit`, mean-field, logistic",
        BEST + ", diagonal",
        "sd",
        1e-8,
        partial(measures.exact_fit, glm.logistic, "mean_field"),
    ),
    Oracle(
        "exact-breast-cancer",
        "`exact.fit`, full, scikit-learn's breast-cancer data",
        BEST,
        "sd",
        1e-7,
        partial(measures.exact_fit, measures.breast_cancer, "full"),
    ),
    Oracle(
        "exact-true-posterior",
        "`exact.fit`, full, logistic, two weights",
        "the posterior itself, by integration; a Gaussian is not quite it",
        "sd",
        0.02,
        measures.true_posterior,
    ),
    Oracle(
        "log-prob-scipy",
        "`LowRankPrecisionNormal.log_prob`, `entropy`",
        "`scipy.stats.multivariate_normal`",
        "absolute",
        1e-12,
        measures.log_prob_of_scipy,
    ),
    Oracle(
        "draws-torch",
        "covariance of 200 000 draws of `LowRankPrecisionNormal`",
        "`torch.distributions.MultivariateNormal`",
        SE,
        4.0,
        measures.draws_of_torch,
    ),
    Oracle(
        "calibration",
        "`full.update` with Hessians, 1000 simulated linear regressions",
        "uniform ranks (simulation-based calibration)",
        "chi-square, 9 degrees of freedom, worst of 3",
        CHI_SQUARE,
        calibration.worst,
    ),
)
