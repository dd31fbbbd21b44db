"""Steps as CUDA graphs: a component around the streamed step, of which nothing below knows."""

from slangvi.methods.compiled.capture import warn_eager as warn_eager
from slangvi.methods.compiled.captured import Numbers as Numbers
from slangvi.methods.compiled.loop import LoopSteps as LoopSteps
from slangvi.methods.compiled.pure import PureSteps as PureSteps

__all__ = ["LoopSteps", "Numbers", "PureSteps", "warn_eager"]
