"""The operators of tfla on JAX: `jax.jit`, gradients, `jax.vmap`, meshes, on CPUs, GPUs and TPUs.

Names, arguments, layouts and defaults are those of :mod:`tfla`, but for what docs/jax.md lists as missing. The forms in
pure JAX do not call PyTorch. Kernels for GPUs come from launches that the backends of PyTorch record on the host.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError('tfla.jax needs JAX: pip install "tfla[jax]"') from error

from tfla.jax.api import linear_attention, mlstm
from tfla.jax.delta.api import delta_rule
from tfla.jax.delta.explain import explain_delta_rule
from tfla.jax.delta.several_writes import delta_product, dplr
from tfla.jax.delta.steps import delta_rule_step, delta_rule_steps
from tfla.jax.explain import explain
from tfla.jax.state import State
from tfla.jax.steps import linear_attention_step, linear_attention_steps, mlstm_step, mlstm_steps

__all__ = [
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
]
