"""Launches of :mod:`.step`: strides, and how the state is cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tfla.backends.base import StepInputs, StepOutputs, StepSpec
from tfla.backends.triton import step
from tfla.backends.triton.compiled import Arguments, launch, static
from tfla.backends.triton.launch import on

PRECISION = "tf32x3"  # what is exact to about float32


@dataclass(frozen=True)
class Cut:
    """What a program has of a state: BV columns, BK rows at a time. Measured on an H200."""

    BK: int
    BV: int
    warps: int


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.cache
def cut(dqk: int, dhv: int, several: bool) -> Cut:
    if several:  # what MMAs read goes through shared memory
        return Cut(max(16, min(power_of_two(dqk), 32)), max(16, min(power_of_two(dhv), 64)), 4)
    rows = min(power_of_two(dqk), 256)
    columns = min(power_of_two(dhv), max(16, min(128, 8192 // rows)))
    return Cut(rows, columns, 4 if rows * columns > 2048 else 2)


def _strides(t: Tensor) -> tuple[int, int, int]:
    return t.stride(0), t.stride(1), t.stride(2)


def _step_strides(t: Tensor) -> tuple[int, int]:
    return t.stride(0), t.stride(2)


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def run(x: StepInputs, spec: StepSpec, into: Tensor | None) -> StepOutputs:
    """One launch. The new C goes to ``into``, which may be that of x, or with None to a new tensor."""
    B, T, H, V = x.v.shape
    K = x.q.shape[3]
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (x.q, x.k, x.v))
    C = x.C
    n, m, lengths = _dense(x.n), _dense(x.m), _dense(x.lengths)
    h = torch.empty((B, T, H, V), dtype=v.dtype, device=v.device)
    if spec.final_state:
        new_C = into if into is not None else torch.empty((B, H, K, V), dtype=x.kept_dtype(C), device=C.device)
    else:
        new_C = h.new_empty(0)
    if spec.final_state and n is not None and m is not None:
        new_n = torch.empty((B, H, K), dtype=x.kept_dtype(n), device=C.device)
        new_m = torch.empty((B, H), dtype=torch.float32, device=C.device)
    else:
        new_n, new_m = h.new_empty(0), h.new_empty(0)
    if B == 0:
        return StepOutputs(h, new_C, new_n, new_m)
    i = x.f if x.i is None else x.i
    target = new_C if spec.final_state else C
    tensors: tuple[Tensor, ...] = (
        q, k, v, i, x.f, C, C if n is None else n, C if m is None else m, h, target, new_n, new_m
    )  # fmt: skip
    several = T > 1 or lengths is not None or not spec.final_state
    if several:
        tensors += (C if lengths is None else lengths,)

    def arguments() -> Arguments:
        how = cut(K, V, several)
        grid = ((V + how.BV - 1) // how.BV * B * H,)
        constants = {
            "DK": K, "DV": V, "BK": how.BK, "BV": how.BV, "NORMALIZE": n is not None, "INPUT_GATE": x.i is not None,
            "SIGMOID_I": spec.gates == "sigmoid", "SIGMOID_F": spec.gates != "log", "num_warps": how.warps,
        }  # fmt: skip
        sizes = H, H // q.shape[2], spec.scale
        if not several:
            strides = (s for t in (q, k, v, i, x.f) for s in _step_strides(t))
            return step.one_step, grid, (*sizes, *strides, *C.stride(), *target.stride()), constants
        strides = (s for t in (q, k, v, i, x.f) for s in _strides(t))
        of_steps = {
            "T": T, "BT": max(16, power_of_two(T)), "LENGTHS": lengths is not None, "FINAL": spec.final_state,
            "PRECISION": PRECISION,
        }  # fmt: skip
        return step.several_steps, grid, (*sizes, *strides, *C.stride(), *target.stride()), of_steps | constants

    given = q, k, v, x.i, x.f, C, n, m, lengths, into
    call = (q.device, spec, *map(static, given)) if q.is_cuda else None
    with on(q.device, descriptors=False):
        launch(call, tensors, arguments)
    return StepOutputs(h, new_C, new_n, new_m)
