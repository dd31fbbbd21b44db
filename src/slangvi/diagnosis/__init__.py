"""Diagnosis of a trained posterior in plain sentences: rank, sds, memory of the start, curves and gradient noise."""

from slangvi.diagnosis.api import diagnose as diagnose
from slangvi.diagnosis.api import diagnose_state as diagnose_state
from slangvi.diagnosis.history import History as History
from slangvi.diagnosis.history import Trend as Trend
from slangvi.diagnosis.history import trend_of as trend_of
from slangvi.diagnosis.report import Diagnosis as Diagnosis
from slangvi.diagnosis.report import Finding as Finding
from slangvi.diagnosis.report import Layer as Layer

__all__ = ["Diagnosis", "Finding", "History", "Layer", "Trend", "diagnose", "diagnose_state", "trend_of"]
