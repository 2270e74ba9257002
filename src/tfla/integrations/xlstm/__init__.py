"""The support of NX-AI's xlstm package, and of models written for mlstm_kernels' backend module.

`accelerate` makes such a model compute with tfla's operator, and `restore` undoes it. docs/xlstm.md says what changes.
"""

from __future__ import annotations

from tfla.integrations.xlstm.functions import parallel_stabilized_simple, recurrent_step_stabilized_simple
from tfla.integrations.xlstm.patch import accelerate, restore

__all__ = ["accelerate", "parallel_stabilized_simple", "recurrent_step_stabilized_simple", "restore"]
