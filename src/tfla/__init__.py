"""Kernels for gated linear RNNs: the mLSTM of xLSTM and every scalar-gated linear attention."""

from tfla.ops.api import linear_attention, linear_attention_step, mlstm, mlstm_step
from tfla.ops.explain import Explanation, explain
from tfla.ops.state import State

__version__ = "0.1.0"
__all__ = ["Explanation", "State", "explain", "linear_attention", "linear_attention_step", "mlstm", "mlstm_step"]
