"""Many small runs in lockstep, of SLANG or SLANG-OnlineEig: splits × folds × settings advanced as one batched run.

Every replica has its own data, data size, hyper-parameters and random stream, and is what it would be alone. Tensors
have the replica in front: K replicas, then whatever a single run has.
"""

from slangvi.replicas.run import Runs as Runs
from slangvi.replicas.run import build as build
from slangvi.replicas.state import Failure as Failure
from slangvi.replicas.state import Info as Info
from slangvi.replicas.state import State as State
from slangvi.replicas.state import init as init
from slangvi.replicas.state import pad as pad
from slangvi.replicas.state import posterior as posterior
from slangvi.replicas.state import replica as replica
from slangvi.replicas.state import sample as sample
from slangvi.replicas.state import stack as stack
from slangvi.replicas.state import streams as streams

__all__ = [
    "Failure",
    "Info",
    "Runs",
    "State",
    "build",
    "init",
    "pad",
    "posterior",
    "replica",
    "sample",
    "stack",
    "streams",
]
