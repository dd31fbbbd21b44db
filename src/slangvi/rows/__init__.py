"""Per-example gradients: read off autograd's own graph for chosen examples, and held as factors where that is less."""

from slangvi.rows.blocks import Formed as Formed
from slangvi.rows.blocks import Outer as Outer
from slangvi.rows.blocks import TableRows as TableRows
from slangvi.rows.dense import DenseGradients as DenseGradients
from slangvi.rows.dense import per_example_gradients as per_example_gradients
from slangvi.rows.factored import FactoredGradients as FactoredGradients
from slangvi.rows.factored import RowGroup as RowGroup
from slangvi.rows.graph import Plan as Plan
from slangvi.rows.graph import Plans as Plans
from slangvi.rows.graph import Recording as Recording
from slangvi.rows.graph import make_plan as make_plan
from slangvi.rows.graph import record as record
from slangvi.rows.graph import watch_outputs as watch_outputs
from slangvi.rows.linear_predictor import LinearPredictorGradients as LinearPredictorGradients
from slangvi.rows.own_pass import OwnPass as OwnPass
from slangvi.rows.recorder import GradientRecorder as GradientRecorder
from slangvi.rows.rules import Meeting as Meeting
from slangvi.rows.rules import register_rule as register_rule

__all__ = [
    "DenseGradients",
    "FactoredGradients",
    "Formed",
    "GradientRecorder",
    "LinearPredictorGradients",
    "Meeting",
    "Outer",
    "OwnPass",
    "Plan",
    "Plans",
    "Recording",
    "RowGroup",
    "TableRows",
    "make_plan",
    "per_example_gradients",
    "record",
    "register_rule",
    "watch_outputs",
]
