"""The interface of mlstm_kernels (2.0) for JAX, on tfla's operator: its kernels by name.

The dimension of heads comes before that of time:

- q, k (B, NH, S, DHQK) and v (B, NH, S, DHHV);
- the pre-activations of the gates i, f (B, NH, S);
- the states c (B, NH, DHQK, DHHV), n (B, NH, DHQK) and m (B, NH), in steps (B, NH, 1).

docs/jax.md says what differs.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError('tfla.integrations.mlstm_kernels_jax needs JAX: pip install "tfla[jax]"') from error

from tfla.integrations.mlstm_kernels_jax.kernels import (
    get_available_mlstm_kernels,
    get_available_mlstm_step_kernels,
    get_mlstm_kernel,
    get_mlstm_step_kernel,
)

__all__ = [
    "get_available_mlstm_kernels",
    "get_available_mlstm_step_kernels",
    "get_mlstm_kernel",
    "get_mlstm_step_kernel",
]
