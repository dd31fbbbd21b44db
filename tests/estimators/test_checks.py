"""scikit-learn's own checks of its rules."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from slangvi import SLANGClassifier, SLANGRegressor

# Small and short: the checks are about rules, and fit some hundred times.
QUICK: dict[str, Any] = {"hidden_layer_sizes": (6,), "max_iter": 12, "mc_samples": 1, "rank": 1, "predict_samples": 8}
WEIGHTS = "rows are drawn in proportion to their weights: equal to repeated rows in distribution, not draw by draw"
EXPECTED = {"check_sample_weight_equivalence_on_dense_data": WEIGHTS}


@parametrize_with_checks(
    [SLANGClassifier(**QUICK, random_state=0), SLANGRegressor(**QUICK, random_state=0)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
@pytest.mark.filterwarnings("default")
def test_scikit_learns_rules(estimator, check):
    check(estimator)
