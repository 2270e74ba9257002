"""The tests of mamba_ssm's decoding step, in shapes of Mamba-2 and of Mamba, against the recurrence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from hypothesis import given
from hypothesis import strategies as st
from mamba_truth import INFINITE, draw, step_by_formula
from torch import Tensor

from tfla.integrations.mamba import mamba_chunk_scan_combined, selective_state_update

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BATCH, HEADS, HEADDIM, GROUPS, DSTATE = 3, 4, 6, 2, 8


def problem(
    per_head: bool, optional: tuple[str, ...] = ("D", "z", "dt_bias"), dstate: int = DSTATE
) -> dict[str, Tensor]:
    """Return inputs in float64; with `per_head`, dt, A, D and dt_bias are expanded from one number a head."""
    full = (BATCH, HEADS, HEADDIM)
    p = {"state": draw(*full, dstate), "x": draw(*full), "B": draw(BATCH, GROUPS, dstate),
         "C": draw(BATCH, GROUPS, dstate), "z": draw(*full)}  # fmt: skip
    lead, rest = ((1,), (1, 1)) if per_head else ((HEADDIM,), (HEADDIM, dstate))
    p["dt"] = (draw(BATCH, HEADS, *lead) / 2).expand(full)
    p["dt_bias"], p["D"] = ((draw(HEADS, *lead) / 2).expand(HEADS, HEADDIM) for _ in range(2))
    p["A"] = (-torch.rand(HEADS, *rest, dtype=torch.float64)).expand(HEADS, HEADDIM, dstate)
    return {name: t for name, t in p.items() if name in optional or name not in ("D", "z", "dt_bias")}


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert t to another dtype; expanded dimensions stay expanded."""
    if 0 not in t.stride():
        return t.to(dtype)
    stored = t[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]
    return stored.to(dtype).expand(t.shape)


def check(given: dict[str, Tensor], softplus: bool) -> None:
    """Compare the output and the updated state with those of the recurrence for the same rounded inputs."""
    y, state = step_by_formula({name: t.cpu().double() for name, t in given.items()}, softplus)
    before = given["state"].clone()
    out = selective_state_update(**{**given, "state": before}, dt_softplus=softplus)
    assert out.dtype == given["x"].dtype
    assert before.dtype == given["state"].dtype
    allowed = {name: max(TOLERANCE[given[name].dtype], TOLERANCE[torch.float32]) for name in ("x", "state")}
    if all(t.dtype == torch.float64 for t in given.values()):
        allowed = dict.fromkeys(allowed, TOLERANCE[torch.float64])
    assert error(out.cpu(), y) <= allowed["x"]
    assert error(before.cpu(), state) <= allowed["state"]


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_is_the_recurrence(device: str, dtype: torch.dtype, per_head: bool, softplus: bool) -> None:
    """Without softplus half of dt is negative."""
    torch.manual_seed(0)
    check({name: cast(t.to(device), dtype) for name, t in problem(per_head).items()}, softplus)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_of_the_package_s_own_tests(device: str, dtype: torch.dtype, per_head: bool) -> None:
    """In mamba_ssm's own tests state, x, dt and z have one dtype, and all else is in float32."""
    torch.manual_seed(0)
    given = {name: t.to(device) for name, t in problem(per_head).items()}
    check(
        {name: cast(t, dtype if name in ("state", "x", "dt", "z") else torch.float32) for name, t in given.items()},
        True,
    )


@given(st.data())
def test_any_call_is_the_recurrence(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    optional = tuple(data.draw(st.sets(st.sampled_from(["D", "z", "dt_bias"]))))
    given = problem(data.draw(st.booleans()), optional, data.draw(st.integers(1, 9)))
    if data.draw(st.booleans()):
        given["dt"] = torch.where(draw(BATCH, HEADS, 1) < 0, given["dt"], 0.0)
    dtypes = data.draw(st.lists(st.sampled_from(FLOATS), min_size=len(given), max_size=len(given)))
    check(
        {name: cast(t, dtype) for (name, t), dtype in zip(given.items(), dtypes, strict=True)}, data.draw(st.booleans())
    )


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shapes_of_mamba(device: str, dtype: torch.dtype, softplus: bool) -> None:
    torch.manual_seed(0)
    dim, dstate = 12, 5
    shapes = {
        "state": (BATCH, dim, dstate), "x": (BATCH, dim), "dt": (BATCH, dim), "A": (dim, dstate), "B": (BATCH, dstate),
        "C": (BATCH, dstate), "D": (dim,), "z": (BATCH, dim), "dt_bias": (dim,),
    }  # fmt: skip
    p = {name: (draw(*shape) / 2).to(device, dtype) for name, shape in shapes.items()}
    shared = ("A", "D", "dt_bias")  # without the dimension of the batch
    exact = {name: t.cpu().double()[None if name in shared else (slice(None), None)] for name, t in p.items()}
    y, state = step_by_formula(exact, softplus)
    out = selective_state_update(**p, dt_softplus=softplus)
    assert error(out.cpu(), y[:, 0]) <= TOLERANCE[dtype]
    assert error(p["state"].cpu(), state[:, 0]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("per_head", [False, True])
def test_gradients(device: str, per_head: bool) -> None:
    """dt is negative at some steps and 0 at others."""
    torch.manual_seed(0)
    p = problem(per_head)
    p["dt"] = torch.where(torch.arange(HEADS)[:, None] == 1, -p["dt_bias"], p["dt"])
    ends = {"dt": 1, "A": 2, "D": 1, "dt_bias": 1} if per_head else {}  # numbers of expanded dimensions
    leaves = {name: t[(..., *[0] * ends.get(name, 0))].clone().requires_grad_() for name, t in p.items()}
    full = {name: leaves[name][(..., *[None] * n)].expand(p[name].shape) for name, n in ends.items()}
    y, state = step_by_formula({**leaves, **full}, False)
    cotangents = torch.randn_like(y), torch.randn_like(state)
    true = torch.autograd.grad((y, state), list(leaves.values()), cotangents)
    given = {name: t.detach().to(device).requires_grad_() for name, t in leaves.items()}
    after = given["state"] * 1.0
    out = selective_state_update(**{**given, "state": after})
    ours = torch.autograd.grad((out, after), list(given.values()), [c.to(device) for c in cotangents])
    for name, a, b in zip(leaves, ours, true, strict=True):
        assert error(a.cpu(), b) <= TOLERANCE[torch.float64], name


def test_a_bias_alone_that_has_a_gradient() -> None:
    p = problem(True)
    p["dt_bias"] = p["dt_bias"][:, 0].clone().requires_grad_()
    p["dt"] = p["dt"].contiguous()[..., 0]
    selective_state_update(**p, dt_softplus=True).sum().backward()
    assert p["dt_bias"].grad is not None
    assert p["dt_bias"].grad.abs().min() > 0


@pytest.mark.parametrize("per_head", [False, True])
def test_a_step_of_some_rows_of_the_state(device: str, per_head: bool) -> None:
    torch.manual_seed(0)
    given = {name: cast(t.to(device), torch.float32) for name, t in problem(per_head).items()}
    pool = torch.randn(5, HEADS, HEADDIM, DSTATE, device=device)
    rows = torch.tensor([3, 1, 4], device=device, dtype=torch.int32)
    before, alone = pool.clone(), pool[rows].clone()
    out = selective_state_update(**{**given, "state": pool}, dt_softplus=True, state_batch_indices=rows)
    assert torch.equal(out, selective_state_update(**{**given, "state": alone}, dt_softplus=True))
    assert torch.equal(pool[rows], alone)
    untouched = torch.tensor([0, 2], device=device)
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("rows", [[-1, 0, 2], [2, -1, -1], [0, 1, -7], [-1, -1, -1]], ids=str)
def test_rows_below_zero_are_skipped(device: str, per_head: bool, rows: list[int]) -> None:
    """The inputs of a skipped step may be NaN."""
    torch.manual_seed(0)
    given = {name: cast(t.to(device), torch.float32) for name, t in problem(per_head, ("D", "dt_bias")).items()}
    indices = torch.tensor(rows, device=device)
    skipped = indices < 0
    pool = torch.randn(4, HEADS, HEADDIM, DSTATE, device=device)
    expected, alone = pool.clone(), pool[indices.clamp(min=0)].clone()
    ys = selective_state_update(**{**given, "state": alone})
    expected[indices[~skipped]] = alone[~skipped]
    given |= {name: given[name].masked_fill(skipped.view(-1, 1, 1), float("nan")) for name in ("x", "B", "C")}
    out = selective_state_update(**{**given, "state": pool}, state_batch_indices=indices)
    assert torch.equal(out, ys.masked_fill(skipped[:, None, None], 0.0))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("rows", [[-1, 0, 2], [2, -1, -1], [0, 1, -7], [-1, -1, -1]], ids=str)
def test_gradients_beside_skipped_rows(device: str, per_head: bool, rows: list[int]) -> None:
    """They are those of the call without the skipped rows, whose inputs may be NaN."""
    torch.manual_seed(0)
    p, indices = problem(per_head), torch.tensor(rows)
    taken = indices >= 0
    leaves = {name: t.clone().requires_grad_() for name, t in p.items() if name not in ("state", "dt")}
    pool = draw(4, HEADS, HEADDIM, DSTATE).requires_grad_()
    cotangents = draw(BATCH, HEADS, HEADDIM), draw(*pool.shape)
    of_batch = {name: leaves[name][taken] for name in ("x", "B", "C", "z")}
    dt = p["dt"].clone().requires_grad_()
    y, new = step_by_formula({**leaves, **of_batch, "dt": dt[taken], "state": pool[indices[taken]]}, False)
    wanted = (y * cotangents[0][taken]).sum() + (pool.index_copy(0, indices[taken], new) * cotangents[1]).sum()
    true = torch.autograd.grad(wanted, [*leaves.values(), dt, pool])

    broken = ("x", "B", "C", "z")
    given = {
        name: t.detach().masked_fill(~taken.view(-1, 1, 1), float("nan")) if name in broken else t.detach()
        for name, t in leaves.items()
    } | {"dt": p["dt"], "state": pool.detach()}
    if per_head:  # views that are expanded from one number a head
        given |= {name: p[name] for name in ("A", "D", "dt_bias")}
    given = {name: cast(t, t.dtype).to(device).requires_grad_() for name, t in given.items()}
    after = given["state"] * 1.0
    out = selective_state_update(**{**given, "state": after}, state_batch_indices=indices.to(device))
    ours = torch.autograd.grad(
        (out, after), [given[name] for name in (*leaves, "dt", "state")], [c.to(device) for c in cotangents]
    )
    sums = {"A": (1, 2), "D": (1,), "dt_bias": (1,), "dt": (2,)} if per_head else {}
    for name, a, b in zip((*leaves, "dt", "pool"), ours, true, strict=True):
        a = a.cpu()
        if name in sums:  # the operator reads one of the expanded numbers
            a, b = a.sum(sums[name]), b.sum(sums[name])
        if b.abs().max() == 0:
            assert a.abs().max() == 0, name
        else:
            assert error(a, b) <= TOLERANCE[torch.float64], name


@pytest.mark.parametrize("per_head", [False, True])
def test_a_state_of_float64_keeps_its_bits_where_all_rows_are_skipped(device: str, per_head: bool) -> None:
    """The step of float32 inputs is computed in float32."""
    given = {name: cast(t.to(device), torch.float32) for name, t in problem(per_head).items()}
    pool = torch.randn(4, HEADS, HEADDIM, DSTATE, device=device, dtype=torch.float64)
    before, rows = pool.clone(), torch.full((len(given["x"]),), -1, device=device)
    selective_state_update(**{**given, "state": pool}, state_batch_indices=rows)
    assert torch.equal(pool, before)


def test_the_slot_that_stands_for_padding() -> None:
    """vLLM's engine has a row of the pool for it; here it is skipped, and the row stays as it is."""
    p = {name: cast(t, torch.float32) for name, t in problem(True).items()}
    rows, kept = torch.tensor([3, 0, 2])[: len(p["x"])], {**p, "state": torch.randn(4, *p["state"].shape[1:])}
    pool, own = kept["state"].clone(), kept["state"].clone()
    out = selective_state_update(**{**p, "state": pool}, state_batch_indices=rows, pad_slot_id=0)
    expected = selective_state_update(**{**p, "state": own}, state_batch_indices=rows.masked_fill(rows == 0, -1))
    assert torch.equal(out, expected)
    assert torch.equal(pool, own)
    assert torch.equal(pool[0], kept["state"][0])
    assert not torch.equal(pool[3], kept["state"][3])


def test_a_slot_that_is_no_number_is_named() -> None:
    p = {name: cast(t, torch.float32) for name, t in problem(True).items()}
    rows = torch.arange(len(p["x"]))
    with pytest.raises(TypeError, match=r"^pad_slot_id: got NoneType, expected an int"):
        selective_state_update(**p, state_batch_indices=rows, pad_slot_id=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("softplus", [False, True])
def test_steps_follow_a_prompt(device: str, softplus: bool) -> None:
    torch.manual_seed(0)
    steps, prompt = 41, 30
    p = {"x": draw(2, steps, HEADS, HEADDIM), "dt": draw(2, steps, HEADS) / 4, "B": draw(2, steps, GROUPS, DSTATE),
         "C": draw(2, steps, GROUPS, DSTATE), "z": draw(2, steps, HEADS, HEADDIM)}  # fmt: skip
    shared = {"A": -torch.rand(HEADS, dtype=torch.float64), "D": draw(HEADS), "dt_bias": draw(HEADS) / 4}
    p, shared = ({name: t.to(device) for name, t in d.items()} for d in (p, shared))
    options = {"chunk_size": 16, "dt_softplus": softplus, "dt_limit": INFINITE, "return_final_states": True}
    whole, last = mamba_chunk_scan_combined(**p, **shared, **options)
    _, state = mamba_chunk_scan_combined(**{name: t[:, :prompt] for name, t in p.items()}, **shared, **options)
    state = state.contiguous()
    expanded = {name: t[:, None].expand(-1, HEADDIM) for name, t in shared.items()}
    expanded["A"] = expanded["A"][..., None].expand(-1, -1, DSTATE)
    found = []
    for t in range(prompt, steps):
        given = {name: part[:, t] for name, part in p.items()}
        given["dt"] = given["dt"][..., None].expand(-1, -1, HEADDIM)
        found.append(selective_state_update(state, **given, **expanded, dt_softplus=softplus))
    assert error(torch.stack(found, 1).cpu(), whole[:, prompt:].cpu()) <= 1e-12
    assert error(state.cpu(), last.cpu()) <= 1e-12


@pytest.mark.parametrize("per_head", [False, True])
def test_an_empty_batch(per_head: bool) -> None:
    p = {name: t if name in ("A", "D", "dt_bias") else t[:0] for name, t in problem(per_head).items()}
    assert selective_state_update(**p).shape == (0, HEADS, HEADDIM)
    pool = draw(2, HEADS, HEADDIM, DSTATE)
    rows = torch.zeros(0, dtype=torch.int64)
    assert selective_state_update(**{**p, "state": pool}, state_batch_indices=rows).shape == (0, HEADS, HEADDIM)


def test_runs_under_torch_compile() -> None:
    torch.manual_seed(0)
    for per_head in (False, True):
        given = {name: cast(t, torch.float32) for name, t in problem(per_head).items()}
        pool = torch.randn(5, HEADS, HEADDIM, DSTATE)
        options = {"dt_softplus": True, "state_batch_indices": torch.tensor([4, -1, 0])}
        states = pool.clone(), pool.clone()
        step = torch.compile(selective_state_update, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            outs = [step(**{**given, "state": states[0]}, **options)]
            outs.append(selective_state_update(**{**given, "state": states[1]}, **options))
        for pair in (outs, states):
            assert error(pair[0], pair[1].double()) <= TOLERANCE[torch.float32]


def test_refuses_what_does_not_fit() -> None:
    p = problem(False)
    slots = {"state_batch_indices": torch.tensor([0, 1, 2])}
    bad: dict[str, dict[str, Any]] = {
        "x": {"x": p["x"][0]}, "dt": {"dt": p["dt"][1:]}, "A": {"A": p["A"][1:]}, "B": {"B": p["B"][:, :, :, None]},
        "C": {"C": p["C"][..., 1:]}, "D": {"D": p["D"][1:]}, "z": {"z": p["z"][1:]},
        "dt_bias": {"dt_bias": p["dt_bias"][1:]}, "state": {"state": p["state"][1:]},
        "state_batch_indices": {"state_batch_indices": torch.tensor([0, 1])},
    }  # fmt: skip
    for name, change in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: got shape"):
            selective_state_update(**{**p, **change})
    with pytest.raises(ValueError, match=r"^state_batch_indices: got 2, expected at most 1"):
        selective_state_update(**{**p, "state": p["state"][1:]}, **slots)
    with pytest.raises(TypeError, match=r"^state_batch_indices: got dtype torch.bool"):
        selective_state_update(**p, state_batch_indices=torch.tensor([True, False, True]))
    with pytest.raises(TypeError, match=r"^dt: got float, expected a tensor"):
        selective_state_update(**{**p, "dt": 0.1})  # type: ignore[arg-type]
    for name in p.keys() - {"x"}:
        with pytest.raises(ValueError, match=f"^{name}: got device meta, expected that of x, cpu"):
            selective_state_update(**{**p, name: p[name].to("meta")})
    three = torch.zeros(BATCH, 3, DSTATE, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^B: got 3 groups"):
        selective_state_update(**{**p, "B": three, "C": three})


def test_refuses_what_does_not_fit_in_the_shapes_of_mamba() -> None:
    shapes = {"state": (2, 5, 3), "x": (2, 5), "dt": (2, 5), "A": (5, 3), "B": (2, 3), "C": (2, 3), "D": (5,),
              "z": (2, 5), "dt_bias": (5,)}  # fmt: skip
    p = {name: draw(*shape) for name, shape in shapes.items()}
    for name in shapes.keys() - {"state"}:
        with pytest.raises(ValueError, match=f"^{name}: got shape"):
            selective_state_update(**{**p, name: p[name][..., 1:]})
    with pytest.raises(TypeError, match=r"^A: got NoneType"):
        selective_state_update(**{**p, "A": None})  # type: ignore[arg-type]
