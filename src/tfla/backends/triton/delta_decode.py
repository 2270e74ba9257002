"""The launches of :mod:`.delta_decode_kernels`: strides, and the columns of the state that a program computes."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import get_args

from torch import Tensor

from tfla.backends.base import static
from tfla.backends.delta import BetaActivation, DeltaStepInputs, DeltaStepSpec, GateActivation
from tfla.backends.gpu.replay import LaunchRecorder, recorded_launches, recording
from tfla.backends.triton import delta_decode_kernels
from tfla.backends.triton.decode import BlockSizes, dense_tail, power_of_two


@functools.cache
def block_sizes(dqk: int, dhv: int, several: bool, by_channel: bool) -> BlockSizes:
    """Return the block sizes of one program: all rows, and as many columns as its registers hold.

    They do not depend on the batch, so that a sequence has the same bits in every one. Programs of 4,096 elements were
    faster than those of 8,192 with one gate a step, slower with gates by channel.

    Args:
        dqk, dhv: the head dims.
        several: whether there are several steps, over which masks of other head dims than powers of two stay in
            registers.
        by_channel: whether each key channel has a gate.
    """
    rows, masked = power_of_two(dqk), dqk != power_of_two(dqk) or dhv != power_of_two(dhv)
    crowded = several and masked
    # Of more than 128 rows 4,096 elements would have less than 128 bytes a row.
    held = 4096 if crowded or (rows <= 128 and not by_channel) else 8192
    columns = min(power_of_two(dhv), max(8, min(128, held // rows)))
    elements = rows * columns
    few = 2048 if crowded else 4096
    return BlockSizes(BK=rows, BV=columns, num_warps=1 if elements <= 512 else 2 if elements <= few else 4)


def call_signature(x: DeltaStepInputs, spec: DeltaStepSpec, into: Tensor | None) -> Hashable:
    """Return the signature of a call: all that its launch depends on."""
    return "delta_steps", spec, static((*x, into))


def run(x: DeltaStepInputs, spec: DeltaStepSpec, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the steps in one launch; the new C is written to `into`, which may be x.C, or to a new tensor."""
    signature = call_signature(x, spec, into)
    recorded = recorded_launches(signature)
    if recorded is not None:
        h, C = recorded((*x, into))
        return h, C
    with recording(signature, (*x, into)) as recorder:
        *given, into = recorder.given
        out = recorder.results = launch(recorder, DeltaStepInputs(*given), spec, into)  # type: ignore[arg-type]
    return out


def launch(
    recorder: LaunchRecorder, x: DeltaStepInputs, spec: DeltaStepSpec, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Allocate the results and launch the kernel."""
    dense = functools.partial(dense_tail, recorder, dims=1)
    B, T, H, V = x.v.shape
    K = x.q.shape[3]
    q, k, v, C = dense(x.q), dense(x.k), dense(x.v), x.C
    r = k if x.read_key is None else dense(x.read_key)
    # A tensor that the call does not have is not read; another one stands for it.
    beta = v if x.beta is None else x.beta
    by_channel = x.log_f is not None and x.log_f.dim() == 4
    log_f = v if x.log_f is None else dense(x.log_f) if by_channel else x.log_f
    A_log = v if x.A_log is None else dense(x.A_log)
    dt_bias = v if x.dt_bias is None else dense_tail(recorder, x.dt_bias, x.dt_bias.dim())
    lengths = v if x.lengths is None else dense(x.lengths)
    indices = v if x.indices is None else dense(x.indices)
    h = recorder.new(B, T, H, V, dtype=v.dtype)
    if not spec.final_state:
        new_C = recorder.placeholder(0, dtype=v.dtype)
    else:
        new_C = into if into is not None else recorder.new(B, H, K, V, dtype=x.kept_dtype)
    if B == 0:
        return h, new_C
    target = new_C if spec.final_state else C
    # The kernel takes None for "in place".
    written = None if recorder.one_pointer_each and target is C and spec.final_state else target
    sizes = block_sizes(K, V, T > 1 or x.lengths is not None, by_channel)
    strides = [s for t in (q, k, r, v, beta, log_f) for s in t.stride()[:3]]
    recorder.launch(
        delta_decode_kernels.delta_steps, ((V + sizes.BV - 1) // sizes.BV * B * H,),
        q, k, r, v, beta, log_f, A_log, dt_bias, C, indices, lengths, h, written,
        H, H // q.shape[2], spec.scale, spec.lower_bound, C.shape[0], *strides, *C.stride(), *target.stride(),
        DK=K, DV=V, T=T, BK=sizes.BK, BV=sizes.BV, CORRECT=spec.correct, READ_KEY=x.read_key is not None,
        READ_BEFORE_DECAY=spec.read_before_decay, NORMALIZE_QK=spec.normalize_qk, HAS_BETA=x.beta is not None,
        BETA_ACTIVATION=get_args(BetaActivation).index(spec.beta_activation),
        GATES=0 if x.log_f is None else 2 if by_channel else 1,
        GATE_ACTIVATION=get_args(GateActivation).index(spec.gate_activation), HAS_A_LOG=x.A_log is not None,
        BIAS_DIMS=0 if x.dt_bias is None else x.dt_bias.dim(), INDEXED=x.indices is not None,
        LENGTHS=x.lengths is not None, STORE_FINAL_STATE=spec.final_state, num_warps=sizes.num_warps,
    )  # fmt: skip
    return h, new_C
