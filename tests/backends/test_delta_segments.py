"""The kernel "segmented" of the delta rule: segments of each sequence side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import INTERPRETED, error
from delta_cases import DeltaProblem, check_beside_terms, delta_problem
from torch import Tensor

import tfla
from tfla.backends import DELTA_BACKENDS
from tfla.backends.delta import DeltaInputs
from tfla.backends.gpu.runtime import PlannedGPU, planned_for
from tfla.ops.delta_operator import delta

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_gpu
pytest.importorskip("triton")

BACKEND = DELTA_BACKENDS["triton"]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


def solve(p: DeltaProblem, chunk_size: int) -> dict[str, Tensor]:
    """The quantities of `truth`, from calls that replay recorded launches."""
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    assert BACKEND.kernel_unsupported(x, "segmented") is None
    spec = p.spec("segmented", chunk_size)
    for _ in range(2):
        out = BACKEND.forward(x, spec)
        grads = BACKEND.backward(x, out, p.dh.to(DEVICE), p.dC.to(out.C), spec)
    for name, (shape, dtype) in BACKEND.saved(x, p.correct, chunk_size, "segmented")._asdict().items():
        assert (tuple(getattr(out, name).shape), getattr(out, name).dtype) == (shape, dtype)
    found = {"h": out.h, "C": out.C} | {f"d{name}": getattr(grads, name) for name in p.leaves}
    return {name: t.cpu() for name, t in found.items()}


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "a last step alone": (64, {"T": 193, "B": 1, "H": 1, "Hq": 1}),
    "two sequences, heads that share keys": (70, {"T": 260, "B": 2, "H": 2, "Hq": 1}),
    "one segment": (300, {"T": 90, "B": 2, "H": 1, "Hq": 1}),
    "unaligned head dims": (64, {"T": 150, "B": 1, "H": 1, "Hq": 1, "K": 20, "V": 35}),
    "no initial state": (128, {"T": 300, "B": 1, "H": 1, "Hq": 1, "carried": False}),
}
if not INTERPRETED:
    SHAPES |= {
        "128 x 128": (256, {"T": 1500, "K": 128, "V": 128}),
        "128 x 256": (192, {"T": 900, "K": 128, "V": 256}),
        "256 x 256": (128, {"T": 500, "K": 256, "V": 256, "B": 1}),
        "64 x 64": (64, {"T": 900, "K": 64, "V": 64, "H": 6, "Hq": 2}),
    }


@pytest.mark.parametrize("model", ["deltanet", "gdn", "read"])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_the_truth(shape: str, model: str) -> None:
    chunk_size, sizes = SHAPES[shape]
    p = delta_problem(model, **{"K": 16, "V": 16, **sizes}, dtype=DTYPE)
    check_beside_terms(p, solve(p, chunk_size))


@pytest.mark.parametrize("gates", ["long", "half", "resets", "closed"])
def test_gates(gates: str) -> None:
    """Transitions that underflow, and such that hardly decay."""
    p = delta_problem("gdn", gates=gates, T=200, B=1, H=1, Hq=1, K=16, V=16, dtype=DTYPE)
    check_beside_terms(p, solve(p, 64))


def test_by_name() -> None:
    p = delta_problem("gdn", T=150, B=1, K=16, V=16, H=2, Hq=2, dtype=DTYPE)
    leaves = {n: t.to(DEVICE, copy=True).requires_grad_() for n, t in p.leaves.items()}
    C = leaves.pop("C")
    h, state = tfla.delta_rule(
        **leaves,
        scale=p.scale,
        initial_state=tfla.State(C),
        return_state=True,
        backend="triton",
        kernel="segmented",
        chunk_size=64,
    )  # type: ignore[call-overload]
    grads = torch.autograd.grad([h, state.C], [*leaves.values(), C], [p.dh.to(DEVICE), p.dC.to(DEVICE)])
    found = {"h": h.detach(), "C": state.C.detach()} | dict(zip([*(f"d{n}" for n in leaves), "dC"], grads, strict=True))
    check_beside_terms(p, {name: t.cpu() for name, t in found.items()})


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_they_are_chosen_for_few_long_sequences(backend: str) -> None:
    """A call that leaves kernel and chunk size open takes segments where whole sequences fill few multiprocessors."""

    def chosen(B: int, T: int, H: int, chunk_size: int | None = None, model: str = "gdn", packed: bool = False) -> str:
        q, v = (torch.empty(B, T, H, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
        beta = q.new_empty(B, T, H)
        log_f = beta if model == "gdn" else q
        ends = torch.empty(3, dtype=torch.int32, device="meta") if packed else None
        x = DeltaInputs(q, q, v, beta, log_f, None, None, None, None, ends)
        with planned_for(PlannedGPU(architecture=90, processors=132, float32_products="tf32")):
            return DELTA_BACKENDS[backend].default_kernel(x, chunk_size)

    assert [chosen(1, T, 16) for T in (65536, 16384, 8192)] == ["segmented"] * 3
    assert chosen(2, 65536, 16) == chosen(1, 65536, 32) == "segmented"
    assert chosen(8, 8192, 16) == chosen(1, 65536, 64) == chosen(1, 2048, 16) == chosen(0, 65536, 16) == "fused"
    assert chosen(1, 65536, 16, chunk_size=4096) == chosen(1, 65536, 16, model="kda") == "fused"
    assert chosen(1, 65536, 16, packed=True) == "fused"


def test_an_empty_batch() -> None:
    x = {n: t[:0].to(DEVICE).requires_grad_() for n, t in delta_problem("gdn", dtype=DTYPE).leaves.items() if n != "C"}
    h, state = tfla.delta_rule(**x, backend="triton", kernel="segmented", return_state=True)  # type: ignore[call-overload]
    assert (h.shape, state.C.shape) == ((0, 37, 2, 6), (0, 2, 8, 6))
    assert all(g.shape == t.shape for g, t in zip(torch.autograd.grad(h.sum(), [*x.values()]), x.values(), strict=True))


def test_without_gradients() -> None:
    p = delta_problem("gdn", T=200, B=1, K=16, V=16, dtype=DTYPE)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    spec = p.spec("segmented", 64)
    whole = BACKEND.forward(x, spec)
    alone = BACKEND.forward(x, spec._replace(save=False, final_state=False))
    assert torch.equal(alone.h, whole.h)
    assert [t.numel() for t in alone[1:]] == [0] * 4
    assert whole.C.untyped_storage().nbytes() == whole.C.nbytes  # and not that of the states of all segments


def test_maps_over_cotangents_and_inputs() -> None:
    """What a forward stores of all rows of a batch is not divided among the calls that torch.vmap merges."""
    p = delta_problem("gdn", T=70, B=1, K=16, V=16, H=1, Hq=1, dtype=DTYPE)
    leaves = {name: t.to(DEVICE) for name, t in p.leaves.items() if name != "C"}
    weights = torch.stack([p.dh, p.dh.flip(1), 2 * p.dh]).to(DEVICE)

    def total(leaves: dict[str, Tensor], weights: Tensor) -> Tensor:
        h = tfla.delta_rule(**leaves, backend="triton", kernel="segmented", chunk_size=64)  # type: ignore[call-overload]
        return (h * weights).flatten(-4).sum(-1)  # type: ignore[no-any-return]

    gradients = torch.func.grad(total)
    of_cotangents = torch.func.jacrev(total)(leaves, weights)
    both = {name: torch.stack([t, t.flip(1)]) for name, t in leaves.items()}
    of_inputs = torch.vmap(torch.func.jacrev(total), in_dims=(0, None))(both, weights)
    for j, each in enumerate(weights):
        for name, exact in gradients(leaves, each).items():
            assert error(of_cotangents[name][j], exact) <= 1e-6
            assert error(of_inputs[name][0, j], exact) <= 1e-6
        for name, exact in gradients({name: t[1] for name, t in both.items()}, each).items():
            assert error(of_inputs[name][1, j], exact) <= 1e-6


def test_tracing_predicts_dense_final_states() -> None:
    """They are rows of the states of all segments, but compiled code reads them as dense."""
    p = delta_problem("gdn", T=70, B=2, K=16, V=16, H=1, Hq=1, dtype=DTYPE)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    args = delta.forward_schema.pack(x, (), "triton", p.spec("segmented", 64))
    torch.library.opcheck(torch.ops.tfla.delta.default, args, test_utils="test_faketensor")


def test_cotangents_of_initial_states_alone() -> None:
    p = delta_problem("gdn", T=200, B=2, K=16, V=16, dtype=DTYPE)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    spec = p.spec("segmented", 64)
    out = BACKEND.forward(x, spec)
    found = BACKEND.initial_cotangent(x, out, p.dh.to(DEVICE), spec)
    exact = BACKEND.initial_cotangent(x, BACKEND.forward(x, p.spec("fused")), p.dh.to(DEVICE), p.spec("fused"))
    assert error(found, exact) < (1e-6 if INTERPRETED else 1e-2)


@pytest.mark.parametrize("V", [16, 35])
@pytest.mark.parametrize("model", ["deltanet", "gdn", "read"])
def test_action_of_a_sequence(model: str, V: int) -> None:
    """The final state is A C + S, for any state C before the sequence."""
    p = delta_problem(model, T=130, B=2, K=16, V=V, Hq=1, H=2, dtype=DTYPE)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    spec = p.spec("fused")
    for _ in range(2):
        found = BACKEND.action(x, spec)
    assert found is not None
    A, S = found
    assert x.C is not None
    assert error(A @ x.C + S, BACKEND.forward(x, spec).C) < (1e-6 if INTERPRETED else 1e-2)


def test_segments_that_a_grid_does_not_hold_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfla.backends.triton.delta_segments.MOST_PROGRAMS", 3)
    x = {
        n: t.to(DEVICE) for n, t in delta_problem("gdn", T=130, B=2, H=1, Hq=1, dtype=DTYPE).leaves.items() if n != "C"
    }
    with pytest.raises(ValueError, match="chunk_size: got 64, which makes 6 segments of 1 heads, expected at most 3"):
        tfla.delta_rule(**x, backend="triton", kernel="segmented", chunk_size=64)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (
            "gdn",
            {"lengths": (30, 40)},
            "kernel: 'segmented' of backend 'triton' cannot run these inputs: it takes no pac",
        ),
        ("kda", {"T": 70}, "kernel: 'segmented' of backend 'triton' cannot run these inputs: it takes one gate a step"),
        ("comba", {"T": 70}, "kernel: 'segmented' cannot run these inputs: it computes reads after the decay only"),
    ],
)
def test_what_it_cannot_run_is_named(model: str, sizes: dict[str, Any], message: str) -> None:
    p = delta_problem(model, K=16, V=16, **sizes, dtype=DTYPE)
    x = {n: t.to(DEVICE) for n, t in p.leaves.items() if n != "C"}
    ends = None if p.x.cu_seqlens is None else p.x.cu_seqlens.to(DEVICE)
    with pytest.raises(ValueError, match=message):
        tfla.delta_rule(
            **x, read_before_decay=p.read_before_decay, cu_seqlens=ends, backend="triton", kernel="segmented"
        )  # type: ignore[call-overload]
