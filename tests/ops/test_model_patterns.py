"""Two uses of the operator in models: resets by a closed forget gate, and a sequence beside its reverse."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from cases import Implementation, Problem, call, check, error, gradients, leaves_on, problem, solve, truth, truth_m
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tfla
from tfla.integrations.mlstm_kernels import mLSTMBackend, mLSTMBackendConfig
from tfla.nn import reverse_sequences

RESET = -100_000.0  # the forget gate's pre-activation at the first byte of each patch, in Bolmo


def with_resets(form: str, lengths: tuple[int, ...]) -> tuple[Problem, Problem]:
    """Return documents in one row, separated by closed forget gates, and the same documents as packed sequences."""
    packed = problem(form, lengths=lengths, carried=False, dtype=torch.float32)
    f = packed.f.clone()
    f[0, packed.cu_seqlens[1:-1]] = RESET
    last = tfla.State(*(None if t is None else t[-1:] for t in packed.dstate))
    row = packed.but(f=f, cu_seqlens=None, dstate=last)
    zeros = tfla.State(*(None if t is None else torch.cat([torch.zeros_like(t[1:]), t[-1:]]) for t in packed.dstate))
    return row, packed.but(f=f, dstate=zeros)


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", [(1, 40, 3, 1, 55), (64, 64), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_resets_equal_new_sequences(implementation: Implementation, form: str, lengths: tuple[int, ...]) -> None:
    """A step with this gate starts from nothing, as the recurrence that begins there does, with all gradients."""
    row, packed = with_resets(form, lengths)
    exact = truth(packed)
    expected = {name: x[-1:] if name in ("C", "n") else x for name, x in exact.items()}
    found = solve(row, implementation)
    assert all(x.isfinite().all() for x in found.values())
    m = truth_m(packed)
    if m is not None:  # the truth's states have the scale of its own max state, of the last document
        leaves = leaves_on(implementation, row)
        h, state = call(row, leaves, **implementation.options)
        found = gradients(row, leaves, h, state, m[-1:])
    check(found, expected, torch.float32)
    assert found["df"][0, packed.cu_seqlens[:-1]].norm() <= 1e-5 * expected["df"].norm()  # 0 but for rounding


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_resets_hide_what_lies_before(form: str, device: str) -> None:
    """On a CPU not one bit after a reset depends on the steps before it, or on the initial state.

    On a GPU rounding does: the steps of a tile share the max state that their gates are scaled by.
    """
    row, packed = with_resets(form, (30, 41))
    state = tfla.State.zeros(1, 2, 5, 7, normalize=form == "exp", device=device)
    large = tfla.State(*(None if t is None else t + 7.0 for t in state))
    results = []
    for initial, size in ((state, 1.0), (large, 3.0)):
        scale = torch.ones(71, 1)
        scale[:30] = size
        q, k, v, i, f = ((getattr(row, name)).to(device) for name in "qkvif")
        h, last = tfla.mlstm(
            *(t * scale[..., None].to(device) for t in (q, k, v)), i * scale.to(device), f, input_gate=form,
            initial_state=initial, return_state=True,
        )  # fmt: skip
        results.append([h[:, 30:], *(t for t in last if t is not None)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) if device == "cpu" else error(a, b) <= 1e-5
    assert error(results[0][0], truth(packed)["h"][:, 30:].to(device)) <= 1e-5


@pytest.mark.parametrize("kernel", ["chunkwise--native_autograd", "chunkwise--triton_xl_chunk_siging"])
def test_resets_in_the_backend_module(kernel: Any) -> None:
    """The module that Bolmo's layer calls gives each patch what it has alone, outputs and gradients."""
    lengths = (1, 40, 3, 1, 55)
    packed = problem("exp", lengths=lengths, carried=False, dtype=torch.float32)
    x = {name: getattr(packed, name).transpose(1, 2).contiguous() for name in "qkvif"}
    ends = packed.cu_seqlens.tolist()
    x["f"][..., ends[1:-1]] = RESET
    backend = mLSTMBackend(mLSTMBackendConfig(chunkwise_kernel=kernel, eps=1e-6, autocast_kernel_dtype="float32"))

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        h, _ = backend(**leaves)
        loss = (h * torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype)).sum()
        return [h.detach(), *torch.autograd.grad(loss, list(leaves.values()))]

    found = run(x)
    alone = [run({name: t[:, :, a:b].double() for name, t in x.items()}) for a, b in itertools.pairwise(ends)]
    for a, b in zip(found, map(functools.partial(torch.cat, dim=2), zip(*alone, strict=True)), strict=True):
        assert a.isfinite().all()
        assert error(a, b) <= 1e-5


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    layout=st.sampled_from(["padded", "packed"]),
    form=st.sampled_from(["exp", "sigmoid"]),
    seed=st.integers(0, 1000),
)
def test_bidirectional_block(lengths: list[int], layout: str, form: str, seed: int) -> None:
    """TiRex-2's block adds the operator of each sequence and the reverse of the operator of its reverse."""
    p = problem(form, lengths=tuple(lengths), carried=False, seed=seed)
    own = {name: x.detach().requires_grad_() for name, x in p.leaves.items()}
    ends = p.cu_seqlens.tolist()
    if layout == "packed":
        options: dict[str, Any] = {"cu_seqlens": p.cu_seqlens}
        inputs = list(own.values())
    else:
        options = {"lengths": torch.tensor(lengths)}
        inputs = [
            torch.nn.utils.rnn.pad_sequence([x[0, a:b] for a, b in itertools.pairwise(ends)], batch_first=True)
            for x in own.values()
        ]
    mlstm = functools.partial(tfla.mlstm, input_gate=form, cu_seqlens=options.get("cu_seqlens"))
    backwards = mlstm(*(reverse_sequences(x, **options) for x in inputs))
    h = mlstm(*inputs) + reverse_sequences(backwards, **options)
    if layout == "padded":
        h = torch.cat([row[:n] for row, n in zip(h, lengths, strict=True)])[None]
    found = [h, *torch.autograd.grad(h, list(own.values()), p.dh)]

    def direction(flip: bool) -> list[Tensor]:
        """Return h, dq, dk, dv, di and df of one direction, sequence by sequence, from the recurrence in float64."""
        results = []
        for a, b in itertools.pairwise(ends):
            part = {name: x.detach()[:, a:b] for name, x in own.items()} | {"dh": p.dh[:, a:b]}
            part = {name: x.flip(1) if flip else x for name, x in part.items()}
            state = tfla.State(*(None if t is None else torch.zeros_like(t[:1]) for t in p.dstate))
            exact = truth(p.but(**part, cu_seqlens=None, dstate=state))
            results.append(
                [exact[name].flip(1) if flip else exact[name] for name in ("h", "dq", "dk", "dv", "di", "df")]
            )
        return [torch.cat(parts, 1) for parts in zip(*results, strict=True)]

    for a, forward, backward in zip(found, direction(False), direction(True), strict=True):
        assert error(a, forward + backward) <= 1e-9
