"""Parameters: where they lie in the flat vector, values that differ by parameter, and states over them."""

from slangvi.params.spec import Params as Params
from slangvi.params.spec import ParamSpec as ParamSpec

__all__ = ["ParamSpec", "Params"]
