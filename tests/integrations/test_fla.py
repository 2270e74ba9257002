"""flash-linear-attention's interface: signatures, and results and gradients beside the package's naive references."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from torch import Tensor

from tfla.integrations import fla as ours

B, T, H, K, V = 2, 70, 3, 8, 6
WHERE = {
    "chunk_simple_gla": "simple_gla", "fused_recurrent_simple_gla": "simple_gla", "chunk_retention": "retention",
    "chunk_lightning_attn": "lightning_attn", "chunk_linear_attn": "linear_attn",
}  # fmt: skip


def theirs(path: str) -> Any:
    """Something of the package, module.name within fla.ops."""
    pytest.importorskip("fla", reason='pip install "tfla[peers]"')
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"fla.ops.{module}"), name)


def inputs(*names: str, B: int = B, N: int = B) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = {
        "q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V), "g": (B, T, H), "g_gamma": (H,),
        "state": (N, H, K, V), "keys": (N, 1, H, K),
    }  # fmt: skip
    made = {name: torch.randn(shape) for name, shape in shapes.items()}
    made["g"], made["g_gamma"], made["keys"] = (
        F.logsigmoid(made["g"] + 2),
        -made["g_gamma"].abs() / 8,
        made["keys"].abs(),
    )
    return [made[name].requires_grad_() for name in names]


def agree(found: list[Tensor], expected: list[Tensor], leaves: list[Tensor]) -> None:
    """Results, and gradients from random cotangents."""
    cotangents = [torch.randn_like(t) for t in expected]
    grads = [torch.autograd.grad(outs, leaves, cotangents, retain_graph=True) for outs in (found, expected)]
    for a, b in zip([*found, *grads[0]], [*expected, *grads[1]], strict=True):
        assert error(a, b) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", WHERE)
def test_signatures(name: str) -> None:
    peer = inspect.unwrap(theirs(f"{WHERE[name]}.{name}"))
    parameters = [
        [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()]
        for fn in (getattr(ours, name), peer)
    ]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("run", [ours.chunk_simple_gla, ours.fused_recurrent_simple_gla])
def test_simple_gla(run: Callable[..., Any]) -> None:
    *leaves, state = inputs("q", "k", "v", "g", "state")
    naive = theirs("simple_gla.naive.naive_recurrent_simple_gla")
    options = {"scale": 0.7, "output_final_state": True}
    agree([*run(*leaves, initial_state=state, **options)], [*naive(*leaves, initial_state=state + 0, **options)],
          [*leaves, state])  # fmt: skip
    assert run(*leaves)[1] is None
    transposed = state.transpose(-1, -2)
    o, last = run(*leaves, initial_state=transposed, state_v_first=True, **options)
    agree([o, last.transpose(-1, -2)], [*run(*leaves, initial_state=state, **options)], [*leaves, state])


def test_constant_decays_and_none() -> None:
    q, k, v, gamma = leaves = inputs("q", "k", "v", "g_gamma")
    naive = theirs("simple_gla.naive.naive_chunk_simple_gla")
    agree([ours.chunk_simple_gla(q, k, v, g_gamma=gamma)[0]], [naive(q, k, v, gamma.expand(B, T, H))[0]], leaves)
    agree([ours.chunk_simple_gla(q, k, v)[0]], [naive(q, k, v, q.new_zeros(B, T, H))[0]], [q, k, v])


def test_retention() -> None:
    leaves = inputs("q", "k", "v")
    naive = theirs("retention.naive.naive_retention")
    expected = naive(*(t.transpose(1, 2) for t in leaves)).transpose(1, 2)
    agree([ours.chunk_retention(*leaves)[0]], [expected], leaves)


def test_lightning_attention() -> None:
    """Its paper's decay rates: exp(-8 h / H (1 - l / L))."""
    leaves = inputs("q", "k", "v")
    decay = torch.exp(torch.tensor([-8 * h / H * (1 - 3 / 12) for h in range(H)]))
    weights = decay[:, None, None] ** (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    q, k, v = leaves
    expected = torch.einsum("bihk,bjhk,hij,bjhv->bihv", q * K**-0.5, k, weights.tril(), v)
    agree([ours.chunk_lightning_attn(*leaves, layer_idx=3, num_layers=12)[0]], [expected], leaves)


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attention(normalize: bool) -> None:
    leaves = inputs("q", "k", "v", "state", "keys")[: 5 if normalize else 4]
    q, k, v, *state = leaves
    positive = F.elu(q) + 1, F.elu(k) + 1, v  # what the normaliser is for
    naive = theirs("linear_attn.naive.naive_recurrent_linear_attn")
    options = {
        "normalize": normalize,
        "output_final_state": True,
        "initial_state": tuple(state) if normalize else state[0],
    }
    pairs = []
    for run in (ours.chunk_linear_attn, naive):
        o, last = run(*positive, **options)
        pairs.append([o, *last] if normalize else [o, last])
    agree(*pairs, leaves)
    assert ours.chunk_linear_attn(q, k, v)[1] is None


def flat(out: Any) -> list[Tensor]:
    """Outputs and final states."""
    return [out[0], *(out[1] if isinstance(out[1], tuple) else out[1:])]


@pytest.mark.parametrize("name", WHERE)
def test_packed_sequences_are_sequences(name: str) -> None:
    lengths, run, normalized = [11, 0, 30, 29], getattr(ours, name), name == "chunk_linear_attn"
    q, k, v, g, state, keys = leaves = inputs("q", "k", "v", "g", "state", "keys", B=1, N=len(lengths))
    options: dict[str, Any] = {"output_final_state": True}
    options |= {"layer_idx": 1, "num_layers": 4} if name == "chunk_lightning_attn" else {}
    gated = "simple_gla" in name
    q, k = q.exp(), k.exp()
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    initial = (state, keys) if normalized else state
    gates = {"g": g} if gated else {}
    packed = flat(run(q, k, v, initial_state=initial, cu_seqlens=cu_seqlens, **gates, **options))
    parts = []
    for row, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        first = (state[[row]], keys[[row]]) if normalized else state[[row]]
        if a == b:
            parts.append(flat((v[:, :0], first)))
            continue
        gates = {"g": g[:, a:b]} if gated else {}
        parts.append(flat(run(q[:, a:b], k[:, a:b], v[:, a:b], initial_state=first, **gates, **options)))
    apart = [torch.cat(pieces, int(at == 0)) for at, pieces in enumerate(zip(*parts, strict=True))]
    agree(packed, apart, [*leaves[: 4 if gated else 3], state, *([keys] if normalized else [])])


@pytest.mark.parametrize("packed", [False, True])
def test_backwards_is_the_sequence_turned_round(packed: bool) -> None:
    options: dict[str, Any] = {"output_final_state": True}
    rows, pieces = B, [slice(0, T)]
    if packed:
        rows, pieces = 1, [slice(0, 11), slice(11, T)]
        options["cu_seqlens"] = torch.tensor([0, 11, T])
    *leaves, state = inputs("q", "k", "v", "g", "state", B=rows, N=2)
    found = ours.fused_recurrent_simple_gla(*leaves, initial_state=state, reverse=True, **options)
    turned = [torch.cat([t[:, piece].flip(1) for piece in pieces], 1) for t in leaves]
    o, last = ours.fused_recurrent_simple_gla(*turned, initial_state=state, **options)
    agree([*found], [torch.cat([o[:, piece].flip(1) for piece in pieces], 1), last], [*leaves, state])


def test_a_step() -> None:
    """Decoding goes another way; it is the sequence's last step."""
    *sequence, state = (t.detach() for t in inputs("q", "k", "v", "g", "state"))
    whole, last = ours.fused_recurrent_simple_gla(*sequence, initial_state=state, output_final_state=True)
    now = [t[:, :-1] for t in sequence], [t[:, -1:] for t in sequence]
    with torch.no_grad():
        _, state = ours.fused_recurrent_simple_gla(*now[0], initial_state=state, output_final_state=True)
        o, end = ours.fused_recurrent_simple_gla(*now[1], initial_state=state, output_final_state=True)
        alone, _ = ours.fused_recurrent_simple_gla(*now[1])
        assert error(alone, ours.chunk_simple_gla(*(torch.cat([t, t], 1) for t in now[1]))[0][:, :1]) <= 1e-6
    assert error(o, whole[:, -1:]) <= TOLERANCE[torch.float32]
    assert error(end, last) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    q, k, v, g = (t.detach().to(device, dtype) for t in inputs("q", "k", "v", "g"))
    q, k = q.abs(), k.abs()
    for run, given in ((ours.chunk_simple_gla, (q, k, v, g)), (ours.chunk_linear_attn, (q, k, v))):
        o, _ = run(*given)
        exact, _ = run(*(t.double() for t in given))
        assert o.dtype == dtype
        assert error(o, exact) <= TOLERANCE[dtype]


def test_refuses_what_does_not_fit() -> None:
    q, k, v, g, gamma, state, keys = (t.detach() for t in inputs("q", "k", "v", "g", "g_gamma", "state", "keys"))
    run = ours.chunk_simple_gla
    for name, call in {
        "g_gamma": lambda: run(q, k, v, g, gamma), "g": lambda: run(q, k, v, g[1:]),
        "initial_state": lambda: run(q, k, v, g, initial_state=state[1:]),
        "head_first": lambda: run(q, k, v, g, head_first=True),
        "v": lambda: run(q, k, v[0], g),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            call()
    with pytest.raises(ValueError, match=r"^g_gamma: got shape"):
        run(q, k, v, g_gamma=gamma[1:])
    with pytest.raises(ValueError, match=r"^initial_state: got shape"):
        ours.chunk_linear_attn(q, k, v, initial_state=(state, keys[:, 0]))
    with pytest.raises(TypeError, match=r"^initial_state: got a tuple"):
        ours.chunk_linear_attn(q, k, v, initial_state=(state, keys), normalize=False)
