"""A torch optimizer whose weights are a distribution: what every method's optimizer shares."""

from slangvi.optimizer.variational import InfoT as InfoT
from slangvi.optimizer.variational import Inspection as Inspection
from slangvi.optimizer.variational import StateT as StateT
from slangvi.optimizer.variational import VariationalOptimizer as VariationalOptimizer
from slangvi.optimizer.variational import _restore as _restore

__all__ = ["InfoT", "Inspection", "StateT", "VariationalOptimizer"]
