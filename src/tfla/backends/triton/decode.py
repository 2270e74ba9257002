"""The launches of :mod:`.decode_kernels`: strides, and the part of the state that a program computes."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tfla.backends.base import StepInputs, StepOutputs, StepSpec, static
from tfla.backends.gpu.normalizer_rows import store_normalizers
from tfla.backends.gpu.replay import LaunchRecorder, recorded_launches, recording
from tfla.backends.triton import decode_kernels

PRECISION = "tf32x3"  # about as exact as float32


@dataclass(frozen=True)
class BlockSizes:
    """The part of a state that a program computes: BV columns, in blocks of BK rows; as measured on an H200."""

    BK: int
    BV: int
    num_warps: int


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def dense_tail(recorder: LaunchRecorder, t: Tensor, dims: int) -> Tensor:
    """Return t with its last `dims` dims contiguous."""
    tail = t[(0,) * (t.dim() - dims)] if t.numel() else t
    found: Tensor = t if tail.is_contiguous() else recorder.do(Tensor.contiguous, t)
    return found


@functools.cache
def block_sizes(dqk: int, dhv: int, several: bool) -> BlockSizes:
    """Return the block sizes of one program; `several` says whether there are several steps."""
    if several:  # operands of MMAs need shared memory
        BK, BV = min(power_of_two(dqk), 32), min(power_of_two(dhv), 64)
        return BlockSizes(BK=max(16, BK), BV=max(16, BV), num_warps=4)
    rows = min(power_of_two(dqk), 256)
    columns = min(power_of_two(dhv), max(16, min(128, 8192 // rows)))
    return BlockSizes(BK=rows, BV=columns, num_warps=4 if rows * columns > 2048 else 2)


def call_signature(x: StepInputs, spec: StepSpec, into: Tensor | None) -> Hashable:
    """Return the signature of a call: all that its launch depends on."""
    return "steps", spec, static((*x, into))


def run(x: StepInputs, spec: StepSpec, into: Tensor | None) -> StepOutputs:
    """Compute the steps in one launch; the new C is written to `into`, which may be x.C, or to a new tensor."""
    signature = call_signature(x, spec, into)
    recorded = recorded_launches(signature)
    if recorded is not None:
        return StepOutputs(*recorded((*x, into)))
    with recording(signature, (*x, into)) as recorder:
        *given, into = recorder.given
        out = recorder.results = launch(recorder, StepInputs(*given), spec, into)  # type: ignore[arg-type]
    return out


def launch(recorder: LaunchRecorder, x: StepInputs, spec: StepSpec, into: Tensor | None) -> StepOutputs:
    """Allocate the results and launch the kernel."""
    B, T, H, V = x.v.shape
    K = x.q.shape[3]
    q, k, v = (dense_tail(recorder, t, 1) for t in (x.q, x.k, x.v))
    C = x.C
    n, m = (None if t is None else dense_tail(recorder, t, t.dim() - 1) for t in (x.n, x.m))
    indices, lengths = (None if t is None else dense_tail(recorder, t, 1) for t in (x.indices, x.lengths))
    h = recorder.new(B, T, H, V, dtype=v.dtype)
    new_C = new_n = new_m = h
    if spec.final_state:
        new_C = into if into is not None else recorder.new(B, H, K, V, dtype=x.kept_dtype(C))
    if spec.final_state and n is not None and m is not None:
        new_n, new_m = recorder.new(B, H, K, dtype=x.kept_dtype(n)), recorder.new(B, H)
    none = h if spec.final_state and n is not None else recorder.placeholder(0, dtype=v.dtype)
    out = StepOutputs(h, *(none if t is h else t for t in (new_C, new_n, new_m)))
    if spec.final_state and indices is not None and n is not None and m is not None:
        out = out._replace(n=n, m=m)
    if B == 0:
        return out
    i = x.f if x.i is None else x.i
    target = new_C if spec.final_state else C
    # The kernels take None for "in place".
    written = None if recorder.one_pointer_each and target is C and spec.final_state else target
    several = T > 1 or lengths is not None or not spec.final_state
    sizes = block_sizes(K, V, several)
    grid = ((V + sizes.BV - 1) // sizes.BV * B * H,)
    # A tensor that the call does not have is not read; another one stands for it.
    some_n, some_m, some_indices = C if n is None else n, C if m is None else m, C if indices is None else indices
    tensors = q, k, v, i, x.f, C, some_n, some_m, h, written, new_n, new_m, some_indices
    numbers = H, H // q.shape[2], spec.scale, C.shape[0]
    constants: dict[str, Any] = {
        "DK": K, "DV": V, "BK": sizes.BK, "BV": sizes.BV, "NORMALIZE": n is not None, "INPUT_GATE": x.i is not None,
        "SIGMOID_I": spec.gates == "sigmoid", "SIGMOID_F": spec.gates != "log", "EPS": spec.eps,
        "INDEXED": indices is not None, "num_warps": sizes.num_warps,
    }  # fmt: skip
    of_state = some_n.stride(0), some_m.stride(0), *C.stride(), *target.stride()
    if several:
        strides = (s for t in (q, k, v, i, x.f) for s in t.stride()[:3])
        recorder.launch(
            decode_kernels.several_steps, grid, *tensors, C if lengths is None else lengths, *numbers, *strides,
            *of_state, T=T, BT=max(16, power_of_two(T)), LENGTHS=lengths is not None,
            STORE_FINAL_STATE=spec.final_state, PRECISION=PRECISION, **constants,
        )  # fmt: skip
    else:
        strides = (t.stride(d) for t in (q, k, v, i, x.f) for d in (0, 2))
        recorder.launch(decode_kernels.one_step, grid, *tensors, *numbers, *strides, *of_state, **constants)
    if indices is not None and new_n is not h:
        recorder.launch(
            store_normalizers, (B * H,), new_n, new_m, indices, n, m, H, C.shape[0], some_n.stride(0),
            some_m.stride(0), DK=K, NEW_DK=K, BK=power_of_two(K), num_warps=1,
        )  # fmt: skip
    return out
