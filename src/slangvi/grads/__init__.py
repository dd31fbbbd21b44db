"""Per-example gradients as an operator: dense, factored, captured from the user's own backward."""

from slangvi.grads.blocks import Formed as Formed
from slangvi.grads.blocks import Outer as Outer
from slangvi.grads.blocks import Rows as Rows
from slangvi.grads.capture import GradientCapture as GradientCapture
from slangvi.grads.dense import DenseGradients as DenseGradients
from slangvi.grads.dense import per_example_gradients as per_example_gradients
from slangvi.grads.factored import FactoredGradients as FactoredGradients
from slangvi.grads.factored import RowGroup as RowGroup
from slangvi.grads.graph_capture import GraphCapture as GraphCapture
from slangvi.grads.linear_predictor import LinearPredictorGradients as LinearPredictorGradients
from slangvi.grads.rules import register_rule as register_rule
from slangvi.grads.sums import SumCapture as SumCapture
from slangvi.grads.sums import SumGroup as SumGroup

__all__ = [
    "DenseGradients",
    "FactoredGradients",
    "Formed",
    "GradientCapture",
    "GraphCapture",
    "LinearPredictorGradients",
    "Outer",
    "RowGroup",
    "Rows",
    "SumCapture",
    "SumGroup",
    "per_example_gradients",
    "register_rule",
]
