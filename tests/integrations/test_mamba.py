"""The tests of mamba_ssm's functions of whole sequences, against the published recurrence in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from hypothesis import given
from hypothesis import strategies as st
from mamba_truth import INFINITE, SHARED, Starts, by_formula, compare, convert, draw, leaves_of_the_truth
from torch import Tensor

from tfla.integrations import mamba
from tfla.integrations.mamba import (
    chunk_state_varlen,
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
)

BATCH, T, HEADS, HEADDIM, GROUPS, DSTATE = 2, 41, 4, 6, 2, 8


def problem(device: str, dtype: torch.dtype, batch: int = BATCH, states: int = BATCH) -> dict[str, Tensor]:
    """Return all inputs that have gradients."""
    torch.manual_seed(0)
    x = {
        "x": draw(batch, T, HEADS, HEADDIM), "B": draw(batch, T, GROUPS, DSTATE), "C": draw(batch, T, GROUPS, DSTATE),
        "z": draw(batch, T, HEADS, HEADDIM), "dt": draw(batch, T, HEADS) - 1,
        "A": -torch.rand(HEADS, dtype=torch.float64) - 0.5, "D": draw(HEADS), "dt_bias": draw(HEADS),
        "initial_states": draw(states, HEADS, HEADDIM, DSTATE),
    }  # fmt: skip
    return convert(x, device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_is_the_published_recurrence(device: str, dtype: torch.dtype) -> None:
    p = problem(device, dtype)
    y, states = mamba_chunk_scan_combined(**p, chunk_size=16, dt_softplus=True, return_final_states=True)
    assert y.dtype == dtype
    starts = [[(0, row)] for row in range(BATCH)]
    compare(p, [y, states], starts, (0.0, float("inf")), True, slice(None))


def test_dt_without_softplus_is_clamped(device: str) -> None:
    p = problem(device, torch.float32)
    limit = (0.1, 0.8)
    y = mamba_chunk_scan_combined(**p, chunk_size=16, dt_limit=limit)
    compare(p, [y], [[(0, row)] for row in range(BATCH)], limit, False, slice(None))


def test_steps_of_no_length_have_the_right_gradient(device: str) -> None:
    p = problem(device, torch.float32)
    p["dt"] = p["dt"].detach().clone()
    p["dt"][:, ::3] = 0.0
    p["dt_bias"] = torch.zeros_like(p["dt_bias"]).requires_grad_()
    p["dt"].requires_grad_()
    y = mamba_chunk_scan_combined(**{**p, "dt": p["dt"].abs()}, chunk_size=16)
    exact = leaves_of_the_truth(p)
    true, _, _ = by_formula({**exact, "dt": exact["dt"].abs()}, [[(0, row)] for row in range(BATCH)], INFINITE, False)
    cotangent = torch.randn_like(true)
    (ours,) = torch.autograd.grad(y, p["x"], cotangent.to(y), retain_graph=True)
    (theirs,) = torch.autograd.grad(true, exact["x"], cotangent, retain_graph=True)
    assert error(ours.cpu(), theirs) <= TOLERANCE[torch.float32]
    assert torch.isfinite(torch.autograd.grad(y, p["dt"], cotangent.to(y))[0]).all()


@pytest.mark.parametrize("ids", [(0, 0, 3), (1, 4, 4)], ids=str)
def test_seq_idx_keeps_sequences_apart(device: str, ids: tuple[int, int, int]) -> None:
    p = problem(device, torch.float32)
    lengths = torch.tensor([11, 13, 17])
    seq_idx = torch.tensor(ids, dtype=torch.int32).repeat_interleave(lengths).expand(BATCH, T).to(device)
    changes = [(0, None)] + [(int(at), None) for at in lengths.cumsum(0)[:-1] if seq_idx[0, at] != seq_idx[0, at - 1]]
    starts = [[(0, row if ids[0] == 0 else None), *changes[1:]] for row in range(BATCH)]
    y, states = mamba_chunk_scan_combined(
        **p, chunk_size=16, seq_idx=seq_idx, dt_softplus=True, return_final_states=True
    )  # fmt: skip
    compare(p, [y, states], starts, (0.0, float("inf")), True, slice(len(changes) - 1, None, len(changes)))


@pytest.mark.parametrize("has_seq_idx", [False, True])
@pytest.mark.parametrize("states", [1, 3])
def test_packed_sequences(device: str, states: int, has_seq_idx: bool) -> None:
    p = problem(device, torch.float32, batch=1, states=states)
    cu_seqlens = torch.tensor([0, 11, 24, T], device=device)
    firsts = [row if row < states else None for row in range(3)]
    starts = [list(zip(cu_seqlens.tolist()[:-1], firsts, strict=True))]
    options: dict[str, Any] = {"chunk_size": 16, "cu_seqlens": cu_seqlens, "dt_softplus": True}
    if has_seq_idx:  # resets no state at the first step of a sequence
        options["seq_idx"] = torch.arange(3, device=device).repeat_interleave(cu_seqlens.diff())[None]
    y, last, each = mamba_chunk_scan_combined(**p, **options, return_final_states=True, return_varlen_states=True)
    assert torch.equal(each[-1:], last)
    compare(p, [y, each], starts, (0.0, float("inf")), True, slice(None))


def test_the_final_state_is_that_after_the_last_step(device: str) -> None:
    p = problem(device, torch.float32, batch=1, states=1)
    options: dict[str, Any] = {"chunk_size": 16, "dt_softplus": True, "return_final_states": True}
    offsets = torch.tensor([0, 0, 13, T, T, T], device=device)  # two sequences without steps come last
    _, last = mamba_chunk_scan_combined(**p, **options, cu_seqlens=offsets)
    _, expected = mamba_chunk_scan_combined(**p, **options, cu_seqlens=offsets[:-2])
    torch.testing.assert_close(last, expected, rtol=0, atol=0)


def test_refuses_what_does_not_fit() -> None:
    p = {name: t.detach() for name, t in problem("cpu", torch.float32).items()}
    bad: dict[str, dict[str, Any]] = {
        "x": {"x": p["x"][0]}, "dt": {"dt": p["dt"][:, 1:]}, "A": {"A": p["A"][1:]}, "B": {"B": p["B"][:, :, :, 0]},
        "C": {"C": p["C"][..., 1:]}, "D": {"D": p["D"][1:]}, "z": {"z": p["z"][1:]},
        "dt_bias": {"dt_bias": p["dt_bias"][1:]}, "initial_states": {"initial_states": p["initial_states"][:, 1:]},
        "seq_idx": {"seq_idx": torch.zeros(BATCH, 3, dtype=torch.int32)}, "dt_limit": {"dt_limit": (1.0, -1.0)},
        "cu_seqlens": {"return_varlen_states": True},
    }  # fmt: skip
    for name, change in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: got"):
            mamba_chunk_scan_combined(**{**p, **change}, chunk_size=16)
    three = torch.zeros(BATCH, T, 3, DSTATE)
    with pytest.raises(ValueError, match=r"^B: got 3 groups"):
        mamba_chunk_scan_combined(**{**p, "B": three, "C": three}, chunk_size=16)
    for name, change in {"x": {"x": [1.0]}, "dt": {"dt": p["dt"].int()}, "A": {"A": -1.0}}.items():
        with pytest.raises(TypeError, match=f"^{name}: got"):
            mamba_chunk_scan_combined(**{**p, **change}, chunk_size=16)  # type: ignore[arg-type]
    for limit in [(0.0,), 3.0, (0.0, float("nan")), ("0", "1")]:
        with pytest.raises(ValueError, match=r"^dt_limit: got"):
            mamba_chunk_scan_combined(**p, chunk_size=16, dt_limit=limit)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^seq_idx: got dtype"):
        mamba_chunk_scan_combined(**p, chunk_size=16, seq_idx=torch.zeros(BATCH, T))
    for name in p.keys() - {"x"}:
        with pytest.raises(ValueError, match=f"^{name}: got device meta, expected that of x, cpu"):
            mamba_chunk_scan_combined(**{**p, name: p[name].to("meta")}, chunk_size=16)
    with pytest.raises(ValueError, match=r"^x: got batch 2, expected 1 with cu_seqlens"):
        mamba_chunk_scan_combined(**p, chunk_size=16, cu_seqlens=torch.tensor([0, T]))
    with pytest.raises(TypeError, match=r"^cu_seqlens: got list"):
        mamba_chunk_scan_combined(
            **{n: t[:1] if n not in SHARED else t for n, t in p.items()}, chunk_size=16, cu_seqlens=[0, T]
        )
    with pytest.raises(ValueError, match=r"^x: got shape .*, expected no empty dimension"):
        mamba_chunk_scan_combined(**{**p, "x": p["x"][..., :0]}, chunk_size=16)
    with pytest.raises(ValueError, match=r"^B: got shape .*, expected no empty dimension"):
        mamba_chunk_scan_combined(**{**p, "B": p["B"][..., :0], "C": p["C"][..., :0]}, chunk_size=16)
    with pytest.raises(ValueError, match=r"^chunk_size: got 0"):
        mamba_chunk_scan_combined(**p, chunk_size=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dt_may_be_negative(device: str, dtype: torch.dtype) -> None:
    p = problem(device, dtype)
    with torch.no_grad():
        p["dt"][:, ::5] = -p["dt_bias"]  # steps of length 0 among them
    limit = (-0.1, 0.4)
    y, states = mamba_chunk_scan_combined(**p, chunk_size=16, dt_limit=limit, return_final_states=True)
    compare(p, [y, states], [[(0, row)] for row in range(BATCH)], limit, False, slice(None))


def test_a_negative_limit_binds_after_softplus(device: str) -> None:
    p = problem(device, torch.float32)
    limit = (-0.5, -0.05)
    y = mamba_chunk_scan_combined(**p, chunk_size=16, dt_softplus=True, dt_limit=limit)
    compare(p, [y], [[(0, row)] for row in range(BATCH)], limit, True, slice(None))


@pytest.mark.parametrize("softplus", [False, True])
def test_chunk_scan_has_no_limits(device: str, softplus: bool) -> None:
    p = problem(device, torch.float32)
    del p["initial_states"]
    with torch.no_grad():
        p["dt"] *= 0.2
        p["dt_bias"] *= 0.1
    y = mamba_chunk_scan(**p, chunk_size=16, dt_softplus=softplus)
    compare(p, [y], [[(0, None)] for _ in range(BATCH)], INFINITE, softplus, slice(None))


@pytest.mark.parametrize("wide", ["x", "B", "C"])
@pytest.mark.parametrize(("dtype", "other"), [(torch.bfloat16, torch.float16), (torch.float16, torch.float32)], ids=str)
def test_dtypes_may_differ(device: str, dtype: torch.dtype, other: torch.dtype, wide: str) -> None:
    p = problem(device, dtype)
    p[wide] = p[wide].detach().to(other).requires_grad_()
    y = mamba_chunk_scan_combined(**p, chunk_size=16, dt_softplus=True)
    assert y.dtype == p["x"].dtype
    compare(p, [y], [[(0, row)] for row in range(BATCH)], (0.0, float("inf")), True, slice(None))


def random_problem(data: st.DataObject) -> tuple[dict[str, Tensor], dict[str, Any], Starts]:
    """Return inputs, options and the steps at which sequences start."""
    batch, steps, groups, group, headdim, dstate = (data.draw(st.integers(1, n)) for n in (2, 20, 3, 3, 5, 6))
    heads = groups * group
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    p = {
        "x": draw(batch, steps, heads, headdim), "B": draw(batch, steps, groups, dstate),
        "C": draw(batch, steps, groups, dstate), "dt": draw(batch, steps, heads) / 4, "A": -torch.rand(heads).double(),
    }  # fmt: skip
    optional = {
        "z": draw(batch, steps, heads, headdim), "dt_bias": draw(heads) / 4,
        "D": draw(heads, headdim) if data.draw(st.booleans()) else draw(heads),
        "initial_states": draw(batch, heads, headdim, dstate),
    }  # fmt: skip
    p |= {name: t for name, t in optional.items() if data.draw(st.booleans())}
    options: dict[str, Any] = {
        "chunk_size": data.draw(st.sampled_from([1, 16, 256])), "dt_softplus": data.draw(st.booleans()),
        "dt_limit": data.draw(st.sampled_from([(0.0, float("inf")), (0.1, 0.3), (-0.3, 0.2), INFINITE])),
    }  # fmt: skip
    starts: Starts = [[(0, row)] for row in range(batch)]
    if data.draw(st.booleans()):
        changes = torch.rand(batch, steps) < 0.2
        options["seq_idx"] = changes.cumsum(1).int()
        for row, at in changes.nonzero().tolist():
            starts[row] = [(0, None)] if at == 0 else [*starts[row], (at, None)]
    return convert(p, "cpu", data.draw(st.sampled_from([torch.float64, torch.float32]))), options, starts


@given(st.data())
def test_any_call_is_the_recurrence(data: st.DataObject) -> None:
    p, options, starts = random_problem(data)
    y, states = mamba_chunk_scan_combined(**p, **options, return_final_states=True)
    lasts = torch.tensor([len(begins) for begins in starts]).cumsum(0) - 1
    compare(p, [y, states], starts, options["dt_limit"], options["dt_softplus"], lasts)


def varlen_problem(chunk_size: int, lengths: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of chunk_state_varlen, and cu_seqlens."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = int(offsets[-1])
    nchunks = -(-total // chunk_size)
    torch.manual_seed(0)
    dt = F.pad(draw(total, HEADS) / 4, (0, 0, 0, nchunks * chunk_size - total)).view(nchunks, chunk_size, HEADS)
    dA = dt * (-torch.rand(HEADS, dtype=torch.float64))
    given = {
        "B": draw(total, GROUPS, DSTATE), "x": draw(total, HEADS, HEADDIM), "dt": dt.permute(2, 0, 1),
        "dA_cumsum": dA.cumsum(1).permute(2, 0, 1), "chunk_states": draw(nchunks, HEADS, HEADDIM, DSTATE),
    }  # fmt: skip
    return {name: t.contiguous().requires_grad_() for name, t in given.items()}, offsets


@given(st.integers(1, 9), st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any))
def test_states_after_packed_sequences_from_those_of_chunks(chunk_size: int, lengths: list[int]) -> None:
    """The true state is computed step by step over the chunk in which a sequence ends."""
    p, offsets = varlen_problem(chunk_size, lengths)
    found = chunk_state_varlen(**p, cu_seqlens=offsets)
    B = p["B"].repeat_interleave(HEADS // GROUPS, 1)
    truth = []
    for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        chunk = max(end - 1, 0) // chunk_size
        start = chunk * chunk_size
        state = p["chunk_states"][chunk] if begin < start else torch.zeros_like(p["chunk_states"][0])
        for t in range(max(begin, start), end):
            sums, at = p["dA_cumsum"][:, chunk], t - start
            decay = torch.exp(sums[:, at] - (sums[:, at - 1] if at else 0.0))
            update = torch.einsum("h,hp,hn->hpn", p["dt"][:, chunk, at], p["x"][t], B[t])
            state = decay[:, None, None] * state + update
        truth.append(state)
    exact = torch.stack(truth)
    assert (found - exact).norm() <= 1e-9 * max(1.0, exact.norm())
    cotangent = torch.randn_like(exact)
    ours, theirs = (torch.autograd.grad(t, list(p.values()), cotangent, allow_unused=True) for t in (found, exact))
    for name, a, b in zip(p, ours, theirs, strict=True):
        b = torch.zeros_like(p[name]) if b is None else b
        assert (a - b).norm() <= 1e-9 * max(1.0, b.norm()), name


def test_states_of_chunks_keep_their_dtype() -> None:
    p, offsets = varlen_problem(8, [5, 20])
    given = {name: t.detach().to(torch.bfloat16 if name in "xB" else torch.float32) for name, t in p.items()}
    found = chunk_state_varlen(**given, cu_seqlens=offsets.int())
    assert found.dtype == torch.float32
    exact = chunk_state_varlen(**{name: t.double() for name, t in given.items()}, cu_seqlens=offsets)
    assert error(found, exact) <= TOLERANCE[torch.bfloat16]
    for name, change in {
        "B": p["B"][1:], "dt": p["dt"][1:], "dA_cumsum": p["dA_cumsum"][..., 1:], "cu_seqlens": offsets[:-1],
        "chunk_states": p["chunk_states"][1:], "x": p["x"][0],
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: g"):
            chunk_state_varlen(**{**p, "cu_seqlens": offsets, name: change})


SCAN = "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None"
LAYER = "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None"
SIGNATURES = {  # mamba_ssm's
    "mamba_chunk_scan_combined": f"{SCAN}, initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False,"
    " dt_limit=(0.0, inf), return_final_states=False, return_varlen_states=False",
    "mamba_chunk_scan": f"{SCAN}, dt_softplus=False",
    "chunk_state_varlen": "B, x, dt, dA_cumsum, cu_seqlens, chunk_states",
    "mamba_split_conv1d_scan_combined": f"{LAYER}, dt_limit=(0.0, inf), return_final_states=False, activation='silu',"
    " rmsnorm_weight=None, rmsnorm_eps=1e-06, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1,"
    " norm_before_gate=True",
    "selective_state_update": "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,"
    " state_batch_indices=None, pad_slot_id=-1"  # from here on vLLM's and flashinfer's
    ", dst_state_batch_indices=None, null_block_id=-1, out=None, num_accepted_tokens=None, cu_seqlens=None,"
    " disable_state_update=False, intermediate_states_buffer=None, intermediate_state_indices=None",
}


def test_signatures_are_those_of_the_package() -> None:
    """No function accepts arguments that it does not name."""
    assert set(mamba.__all__) == set(SIGNATURES)
    for name, signature in SIGNATURES.items():
        arguments = inspect.signature(getattr(mamba, name)).parameters.values()
        assert ", ".join(str(a.replace(annotation=inspect.Parameter.empty)) for a in arguments) == signature, name
