"""scikit-learn's own checks of its rules."""

from __future__ import annotations

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

from slangvi import SLANGClassifier, SLANGRegressor

# Small and short: the checks are about rules, and fit some hundred times.
QUICK: dict[str, Any] = {
    **{"hidden_layer_sizes": (), "batch_size": 64, "mc_samples": 1, "rank": 1},
    **{"predict_samples": 8, "learning_rate_init": 0.3, "random_state": 0},
}
WEIGHTS = "rows are drawn in proportion to their weights: equal to repeated rows in distribution, not draw by draw"
EXPECTED = {"check_sample_weight_equivalence_on_dense_data": WEIGHTS}


@parametrize_with_checks(
    [SLANGClassifier(**QUICK, max_iter=10), SLANGRegressor(**QUICK, max_iter=25)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learns_rules(estimator, check):
    check(estimator)
