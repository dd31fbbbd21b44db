"""Memory that a step will take, told before any of it is spent."""

from slangvi.memory.plan import MemoryPlan as MemoryPlan
from slangvi.memory.plan import estimate_memory as estimate_memory

__all__ = ["MemoryPlan", "estimate_memory"]
