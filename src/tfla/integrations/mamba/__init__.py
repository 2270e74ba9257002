"""The interface of mamba_ssm's functions for Mamba-2, on tfla's operator.

Mamba-2 (Dao, Gu; arXiv 2405.21060) computes, for each head, with a scalar A,

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T        y_t = C_t^T h_t + D x_t

A group of heads shares B and C. This is linear attention with q = C, k = B, v = x, log_f = dt A, log_i = log dt and
scale 1. Where dt may be negative, v = dt x and log_i = 0 instead.

The names, the argument order, the layouts and the defaults are those of mamba_ssm 2. docs/mamba.md says what differs.
"""

from __future__ import annotations

from tfla.integrations.mamba.layer import mamba_split_conv1d_scan_combined
from tfla.integrations.mamba.scan import chunk_state_varlen, mamba_chunk_scan, mamba_chunk_scan_combined
from tfla.integrations.mamba.step import selective_state_update

__all__ = [
    "chunk_state_varlen",
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "selective_state_update",
]
