"""The chunkwise backend sums log-gates as pairs of float32 numbers, as exactly as float64 does."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from tfla.backends.chunkwise.gates import cumulative_sum, max_state, stabilized, two_sum
from tfla.ops.gates import LOG_GATE_MAX, LOG_GATE_MIN

GATES = st.floats(LOG_GATE_MIN, LOG_GATE_MAX, width=32) | st.floats(-30.0, 0.0, width=32) | st.just(LOG_GATE_MIN)


@given(st.lists(GATES, min_size=1, max_size=64))
def test_differences_of_sums(gates: list[float]) -> None:
    """The difference of any two sums, the decay in between, is as exact as float32 can be, however large they are."""
    x = torch.tensor(gates)
    high, low = cumulative_sum(x)
    exact = x.double().cumsum(-1)
    found = (high[:, None] - high) + (low[:, None] - low)
    decays = exact[:, None] - exact
    assert ((found - decays).abs() <= 2e-7 * decays.abs() + 2e-8).all()


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(-(2.0**100), 2.0**100, width=32))
def test_two_sum_loses_nothing(a: float, b: float) -> None:
    total, lost = two_sum(torch.tensor(a), torch.tensor(b))
    assert total == torch.tensor(a) + torch.tensor(b)
    assert Fraction(total.item()) + Fraction(lost.item()) == Fraction(a) + Fraction(b)


@given(st.lists(st.tuples(GATES, GATES), min_size=1, max_size=200), st.floats(-100.0, 100.0, width=32))
def test_max_state(gates: list[tuple[float, float]], start: float) -> None:
    """The max state is that of the recurrence except for the rounding of sums."""
    log_i, log_f = torch.tensor(gates).T.contiguous()[:, None]
    m = max_state(log_i, log_f, torch.tensor([start]))
    exact, at = [], torch.tensor(start, dtype=torch.float64)
    for i, f in zip(log_i[0].double(), log_f[0].double(), strict=True):
        at = torch.maximum(f + at, i)
        exact.append(at)
    largest = max(abs(gate) for pair in gates for gate in pair)
    assert (m[0] - torch.stack(exact)).abs().max() <= 2e-7 * (64 * largest + abs(start))

    rise, fall = stabilized(log_i, log_f, m, torch.tensor([start]))
    before = torch.cat([torch.tensor([[start]]), m[:, :-1]], -1).double()
    for found, expected in ((rise, log_i.double() - m), (fall, log_f.double() + before - m)):
        assert ((found - expected).abs() <= 2e-7 * expected.abs() + 1e-9).all()
