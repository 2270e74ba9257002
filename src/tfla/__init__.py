"""Kernels for gated linear RNNs: the mLSTM of xLSTM and every scalar-gated linear attention."""

import importlib.metadata

from tfla.ops.api import linear_attention, mlstm
from tfla.ops.explain import Explanation, explain
from tfla.ops.state import State
from tfla.ops.steps import linear_attention_step, linear_attention_steps, mlstm_step, mlstm_steps

try:
    __version__ = importlib.metadata.version("tfla")
except importlib.metadata.PackageNotFoundError:  # sources that are not installed
    __version__ = "0+source"
__all__ = [
    "Explanation",
    "State",
    "explain",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_steps",
    "mlstm",
    "mlstm_step",
    "mlstm_steps",
]
