"""Per-example gradients of chosen examples, read off autograd's own graph."""

from slangvi.rows.graph import Plan as Plan
from slangvi.rows.graph import Recording as Recording
from slangvi.rows.graph import make_plan as make_plan
from slangvi.rows.graph import record as record
from slangvi.rows.rules import register_node_rule as register_node_rule

__all__ = ["Plan", "Recording", "make_plan", "record", "register_node_rule"]
