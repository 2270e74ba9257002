"""Calls that compute shapes alone: the meta device, FakeTensorMode, and PyTorch's FLOP counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Implementation, Problem, call, leaves_on, problem
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import tfla
from tfla.nn import LanguageModel, ModelConfig

CALLS: dict[str, dict[str, Any]] = {
    "exp": {},
    "sigmoid": {"form": "sigmoid", "carried": False},
    "packed": {"lengths": (20, 0, 17)},
    "grouped heads": {"form": "plain", "Hq": 1},
}


def whole(p: Problem, leaves: dict[str, Tensor]) -> list[Tensor]:
    """Outputs, final state and gradients."""
    h, state = call(p, leaves)
    outputs = [h, *(x for x in state if x is not None)]
    return [*outputs, *torch.autograd.grad(h.sum() + state.C.sum(), list(leaves.values()))]


def decoding(p: Problem, leaves: dict[str, Tensor]) -> list[Tensor]:
    """One step and several, with gradients and without."""
    x = [leaves[name] for name in "qkvif"]
    state = tfla.State(leaves["C0"], leaves["n0"], leaves["m0"])
    found = [tfla.mlstm_step(*(t[:, 0] for t in x), state), tfla.mlstm_steps(*x, state)]
    with torch.no_grad():
        lengths = torch.ones(2, dtype=torch.int32, device=state.C.device)
        found.append(tfla.mlstm_steps(*x, state, lengths=lengths, in_place=True))
    return [t for h, s in found for t in (h, *s)]


def properties(tensors: list[Tensor]) -> list[Any]:
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


def on_meta(p: Problem, of: Callable[..., list[Tensor]]) -> list[Tensor]:
    leaves = {name: x.detach().to("meta").requires_grad_() for name, x in p.leaves.items()}
    return of(p.but(cu_seqlens=None if p.cu_seqlens is None else p.cu_seqlens.to("meta")), leaves)


def in_fake_mode(p: Problem, of: Callable[..., list[Tensor]]) -> list[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = {name: mode.from_tensor(x.detach()).requires_grad_() for name, x in p.leaves.items()}
        at = None if p.cu_seqlens is None else mode.from_tensor(p.cu_seqlens)
        return of(p.but(cu_seqlens=at), leaves)


def in_reality(p: Problem, of: Callable[..., list[Tensor]]) -> list[Tensor]:
    return of(p, {name: x.clone().requires_grad_() for name, x in p.leaves.items()})


@pytest.mark.parametrize("place", [on_meta, in_fake_mode])
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_sequences(place: Any, case: dict[str, Any]) -> None:
    p = problem(dtype=torch.float32, **case)
    assert properties(place(p, whole)) == properties(in_reality(p, whole))


@pytest.mark.parametrize("place", [on_meta, in_fake_mode])
def test_steps(place: Any) -> None:
    p = problem(dtype=torch.float32, T=3)
    assert properties(place(p, decoding)) == properties(in_reality(p, decoding))


@pytest.mark.parametrize("place", [on_meta, in_fake_mode])
@pytest.mark.parametrize("autocast", [False, True])
def test_explain(place: Any, autocast: bool) -> None:
    p = problem(dtype=torch.float32, lengths=(20, 0, 17))
    said = []

    def explained(p: Problem, leaves: dict[str, Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            said.append(tfla.explain(*(leaves[name] for name in "qkvif"), cu_seqlens=p.cu_seqlens))
        return []

    place(p, explained)
    in_reality(p, explained)
    assert said[0].backend == said[1].backend == "chunkwise"
    assert said[0].stored_states == said[1].stored_states


def loss_and_gradients(mixer: str) -> list[Tensor]:
    model = LanguageModel(ModelConfig(d_model=32, num_blocks=2, num_heads=2, vocab_size=17, mixer=mixer))
    logits = model(torch.zeros(2, 9, dtype=torch.int64))
    logits.float().square().mean().backward()
    return [logits, *(x.grad for x in model.parameters() if x.grad is not None)]


@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig"])
@pytest.mark.parametrize("place", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
def test_language_model(place: Any, mixer: str) -> None:
    expected = loss_and_gradients(mixer)
    with place():
        found = loss_and_gradients(mixer)
    assert properties(found) == properties(expected)


def count(of: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        of()
    return counter.get_total_flops()


def by_equations(p: Problem, L: int, backward: bool) -> int:
    """Multiplications and additions that the matrix products of the chunkwise form are made of, step by step."""
    B, T, H, V = p.v.shape
    K, total = p.q.shape[3], 0
    for start in range(0, T, L):
        steps = min(L, T - start)
        inside = steps * L  # twice the causal half, a last tile counting as a part of a whole one
        of_state = 2 * steps * K * V
        total += (5 * of_state + inside * (3 * K + 2 * V)) if backward else 2 * of_state + inside * (K + V)
    return B * H * total


@pytest.mark.parametrize("T", [64, 200])
def test_flop_counter(implementation: Implementation, T: int) -> None:
    if implementation.small_only:
        pytest.skip("another tile, counted below")
    p = problem(dtype=torch.float32, T=T)
    L = min(T, 256) if implementation.kernel == "tfla" else 64  # the paper's kernels are quadratic in their chunks
    leaves = leaves_on(implementation, p)
    forward = count(lambda: call(p, {name: x.detach() for name, x in leaves.items()}, **implementation.options))
    assert forward == by_equations(p, L, False)
    h, _ = call(p, leaves, **implementation.options)
    assert count(lambda: torch.autograd.grad(h.sum(), leaves["q"])) == by_equations(p, L, True)
    both = count(lambda: call(p, leaves, **implementation.options)[0].sum().backward())
    assert both == by_equations(p, L, False) + by_equations(p, L, True)


def test_flop_counter_of_the_paper_s_equations() -> None:
    p = problem(dtype=torch.float32, T=96)
    kernels = {
        "recurrent": 4 * 96 * 35,
        "parallel": 4 * 96 * 35 + 96 * 96 * 12,
        "chunkwise": 4 * 96 * 35 + 96 * 32 * 12,
    }
    for kernel, each in kernels.items():
        options = {"backend": "reference", "kernel": kernel, "chunk_size": 32}
        assert count(lambda options=options: call(p, p.leaves, **options)) == 4 * each


def test_flop_counter_on_the_meta_device_and_of_a_model() -> None:
    """A model of any size is counted without its memory; the operator's part is beside those of linear layers."""
    with torch.device("meta"):
        config = ModelConfig(d_model=256, num_blocks=2, num_heads=2, vocab_size=64)
        model = LanguageModel(config)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 128, dtype=torch.int64))
    counts = counter.get_flop_counts()["Global"]
    K, V = 64, 128
    assert counts[torch.ops.tfla.attend] == 2 * 2 * (4 * 128 * K * V + 128 * 64 * (K + V))
    assert counts[torch.ops.aten.mm] > 0
