"""Experiments: one file per table or figure, with its settings, a run and a plot.

`EXPERIMENTS` is the table of what `slangvi reproduce NAME` can do. An experiment is a row in it and a module of this
package, its name with underscores, in which `run(settings, progress)` computes and writes results, `section(results,
docs)` is its part of the page docs/results.md, and `DATASETS` and `METHODS` are the names one may choose from.
"""

from __future__ import annotations

__all__ = ["EXPERIMENTS", "module_name"]

# Name, and the line that --help shows; nothing heavy is imported for it.
EXPERIMENTS = {
    "logreg": "Logistic regression: ten methods on four data sets, the paper's main table.",
    "logreg-online-eig": "The same for SLANG-OnlineEig, with its convergence on USPS.",
    "logreg-covariance": "Means, variances and covariances of the posteriors, and the table of the bias.",
    "logreg-convergence": "How fast the methods converge, ten seeds on one split.",
    "toy": "Uncertainty of a small network about a noisy cubic, against a long run of HMC.",
    "bnn-convergence": "How fast networks converge, with SLANG and with Bayes by Backprop.",
    "mnist": "Digits with two hidden layers of 400: six ranks, tuned, against Bayes by Backprop, MAP, ensemble.",
    "images": "Networks with convolutions on images, with rivals: error, calibration, turned images, strangers.",
    "uci": "Regression with small networks on eight UCI sets, with a search for noise and prior.",
    "uci-defaults": "The same sets without any search: noise learnt in the run, one recipe for all.",
    "uci-stability": "What makes training of these networks fail, and what prevents it.",
    "uci-online-eig": "SLANG-OnlineEig on the UCI sets, and its convergence on Energy.",
}


def module_name(experiment: str) -> str:
    """The module behind a row of the table.

    Example:
        >>> module_name("logreg-covariance")
        'slangvi_reproduction.experiments.logreg_covariance'
    """
    return f"slangvi_reproduction.experiments.{experiment.replace('-', '_')}"
