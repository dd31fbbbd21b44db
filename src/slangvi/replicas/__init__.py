"""Many small runs in lockstep, of SLANG or SLANG-OnlineEig: splits × folds × settings advanced as one batched run.

Every replica has its own data, data size, hyper-parameters and random stream, and is what it would be alone. Tensors
have the replica in front: K replicas, then whatever a single run has.
"""

from slangvi.replicas.run import Runs, build
from slangvi.replicas.state import Failure, Info, State, init, pad, posterior, replica, sample, stack, streams

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
