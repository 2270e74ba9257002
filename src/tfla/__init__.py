"""Kernels for gated linear RNNs: the mLSTM of xLSTM, gated linear attention and the delta rule."""

import importlib.metadata

from tfla.ops.api import linear_attention, mlstm
from tfla.ops.delta import delta_rule
from tfla.ops.delta_explain import explain_delta_rule
from tfla.ops.delta_steps import delta_rule_step, delta_rule_steps
from tfla.ops.explain import Explanation, explain
from tfla.ops.several_writes import delta_product, dplr
from tfla.ops.state import State
from tfla.ops.steps import linear_attention_step, linear_attention_steps, mlstm_step, mlstm_steps
from tfla.ops.warmup import warmup

try:
    __version__ = importlib.metadata.version("tfla")
except importlib.metadata.PackageNotFoundError:  # sources that are not installed
    __version__ = "0+source"
__all__ = [
    "Explanation",
    "State",
    "delta_product",
    "delta_rule",
    "delta_rule_step",
    "delta_rule_steps",
    "dplr",
    "explain",
    "explain_delta_rule",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_steps",
    "mlstm",
    "mlstm_step",
    "mlstm_steps",
    "warmup",
]
