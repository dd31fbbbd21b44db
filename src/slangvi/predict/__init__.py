"""Predictions under the posterior: at draws of the weights, or in closed form around their mean."""

from slangvi.predict.linearised import LinearisedPredictive as LinearisedPredictive
from slangvi.predict.linearised import linearised_predictive as linearised_predictive
from slangvi.predict.memory import PredictionPlan as PredictionPlan
from slangvi.predict.memory import estimate_prediction_memory as estimate_prediction_memory
from slangvi.predict.samples import functional_samples as functional_samples
from slangvi.predict.samples import predictive_samples as predictive_samples
from slangvi.predict.uncertainty import Uncertainty as Uncertainty
from slangvi.predict.uncertainty import decompose_uncertainty as decompose_uncertainty

__all__ = [
    "LinearisedPredictive",
    "PredictionPlan",
    "Uncertainty",
    "decompose_uncertainty",
    "estimate_prediction_memory",
    "functional_samples",
    "linearised_predictive",
    "predictive_samples",
]
