"""NaN and infinity in a sequence of the delta rule change no bit of other sequences and heads (mLSTM: test_packed)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import DEVICES, INTERPRETED, params
from delta_cases import MODELS, DeltaProblem, call, delta_problem, gradients
from torch import Tensor

STATES = ("C", "dC")
BACKENDS = ("triton",) if INTERPRETED else ("reference", "chunkwise")
VALUES = pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "infinite"])


@pytest.fixture(params=[(backend, device) for backend in BACKENDS for device in DEVICES], ids="-".join)
def options(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the backend and the device of a call."""
    return dict(zip(("backend", "device"), request.param, strict=True))


def solve(p: DeltaProblem, backend: str, device: str) -> dict[str, Tensor]:
    """Return the outputs, the final states and all gradients of a problem on the CPU."""
    leaves = {name: t.detach().to(device).requires_grad_() for name, t in p.leaves.items()}
    offsets = p.x.cu_seqlens if p.x.cu_seqlens is None else p.x.cu_seqlens.to(device)
    moved = replace(p, x=p.x._replace(cu_seqlens=offsets))
    h, state = call(moved, leaves, backend=backend)
    return {name: t.cpu() for name, t in gradients(moved, leaves, h, state.C).items()}


def changed(p: DeltaProblem, names: tuple[str, ...], at: tuple[object, ...], value: float) -> DeltaProblem:
    """Return the problem with a value at one place of some of its leaves."""
    leaves = {name: t.detach().clone() for name, t in p.leaves.items()}
    for name in names:
        leaves[name][at] = value
    return replace(p, x=p.with_leaves(leaves))


@VALUES
@pytest.mark.parametrize("model", params({model: model for model in MODELS}, {"gdn", "kda"}))
def test_packed_sequences_of_a_tile(model: str, value: float, options: dict[str, str]) -> None:
    """Sequences before and after it have the bits of a call without it, gradients too."""
    p = delta_problem(model, lengths=(20, 9, 11), Hq=1, dtype=torch.float32)
    names = tuple(name for name in p.leaves if name != "C")
    before, after = (solve(q, **options) for q in (p, changed(p, names, (0, 24), value)))
    steps = [*range(20), *range(29, 40)]
    assert not after["h"][:, 24:29].isfinite().all()
    for name, x in after.items():
        kept = (x[[0, 2]], before[name][[0, 2]]) if name in STATES else (x[:, steps], before[name][:, steps])
        assert torch.equal(*kept), name


@VALUES
@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_batch_rows_and_heads(name: str, value: float, options: dict[str, str]) -> None:
    for model in ("gdn", "kda", "gla"):
        p = delta_problem(model, B=3, T=23, dtype=torch.float32)
        before, after = (solve(q, **options) for q in (p, changed(p, (name,), (1, 9, 0), value)))
        assert not after["h"][1, 9:, 0].isfinite().all()
        for part, x in after.items():
            head = (slice(None), 1) if part in STATES else (slice(None), slice(None), 1)
            assert torch.equal(x[[0, 2]], before[part][[0, 2]]), part
            assert torch.equal(x[head], before[part][head]), part


def test_earlier_steps_of_its_own_sequence_on_the_reference() -> None:
    """Step by step nothing goes back in time; tiles promise that for other sequences alone."""
    p = delta_problem("gdn", T=23, dtype=torch.float32)
    before, after = (call(q, q.leaves, backend="reference")[0] for q in (p, changed(p, ("k", "v"), (0, 9), torch.nan)))
    assert torch.equal(before[0, :9], after[0, :9])
    assert after[0, 9:].isnan().all()
