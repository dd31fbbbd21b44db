"""A torch optimizer whose weights are a distribution: what every method's optimizer shares.

`VariationalOptimizer` is built in layers, each of which knows only those below it: which parameters are inferred
(`_inferred`), blocks in which the weights are a draw (`_drawing`), saving and copying (`_saving`), and steps
(`variational`).
"""

from slangvi.optimizer._inferred import StateT as StateT
from slangvi.optimizer._saving import _restore as _restore
from slangvi.optimizer.variational import InfoT as InfoT
from slangvi.optimizer.variational import VariationalOptimizer as VariationalOptimizer

__all__ = ["InfoT", "StateT", "VariationalOptimizer"]
