"""The public functions of the delta rule and of gates by channel, against the recurrence in float64 and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from delta_cases import GATES, MODELS, DeltaProblem, call, check_beside_terms, delta_problem, gradients, options, truth
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tfla
from tfla._util import caching
from tfla.backends import DELTA_BACKENDS
from tfla.backends.chunkwise.delta import ChunkwiseDelta
from tfla.backends.delta import DeltaInputs, DeltaOutputs, DeltaSpec, DeltaStepInputs
from tfla.ops.delta_activations import activated


def fresh(p: DeltaProblem) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in p.leaves.items()}


def solve(p: DeltaProblem, **given: Any) -> dict[str, Tensor]:
    leaves = fresh(p)
    h, state = call(p, leaves, **given)
    return gradients(p, leaves, h, state.C)


def check(p: DeltaProblem, found: dict[str, Tensor]) -> None:
    exact = truth(p)
    assert found.keys() == exact.keys()
    errors = {name: error(x, exact[name]) for name, x in found.items()}
    limit = TOLERANCE[p.x.q.dtype]
    assert all(e <= limit for e in errors.values()), {n: f"{e:.1e}" for n, e in errors.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("model", [m for m in MODELS if m != "simple"])
def test_every_model(model: str, dtype: torch.dtype) -> None:
    p = delta_problem(model, T=70, H=4, B=1, dtype=dtype)
    check(p, solve(p))
    if dtype == torch.float64:
        check(p, solve(p, backend="reference", chunk_size=3))


@pytest.mark.parametrize("model", ["gdn", "kda", "gla", "comba"])
def test_devices(device: str, model: str) -> None:
    """Plain PyTorch computes the same on every device, and repeats it bit for bit."""
    p = delta_problem(model, T=150, B=1, H=4, dtype=torch.float32)
    runs = []
    for _ in range(2):
        leaves = {name: t.detach().to(device).requires_grad_() for name, t in p.leaves.items()}
        h, state = call(p, leaves, backend="chunkwise")
        found = gradients(p, leaves, h, state.C)
        runs.append({name: t.cpu() for name, t in found.items()})
    check(p, runs[0])
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@given(
    model=st.sampled_from([m for m in MODELS if m != "simple"]),
    gates=st.sampled_from(GATES),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3).filter(any),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    carried=st.booleans(),
    chunk_size=st.none() | st.integers(1, 200),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 100),
)
def test_any_call(
    model: str, gates: str, lengths: list[int], heads: tuple[int, int], dims: tuple[int, int], carried: bool,
    chunk_size: int | None, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    p = delta_problem(
        model, gates=gates, lengths=tuple(lengths), Hq=heads[0], H=heads[1], K=dims[0], V=dims[1], carried=carried,
        dtype=dtype, seed=seed,
    )  # fmt: skip
    check_beside_terms(p, solve(p, chunk_size=chunk_size))


@pytest.mark.parametrize("model", ["gdn", "gla"])
def test_packed_and_without_a_state(model: str) -> None:
    check(p := delta_problem(model, lengths=(5, 0, 70, 1), Hq=1), solve(p, chunk_size=16))
    check(p := delta_problem(model, T=20, carried=False), solve(p))


@pytest.mark.parametrize("model", ["kda", "comba"])
def test_strides(model: str) -> None:
    """Tensors with the heads first, or with every other element, give the same as dense ones."""
    p = delta_problem(model, T=40)
    leaves = {
        name: (t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() > 3 and name != "C" else t)
        for name, t in p.leaves.items()
    }
    expected = call(p, dict(p.leaves))
    wide = {name: torch.stack([t, t], -1)[..., 0] for name, t in p.leaves.items()}
    for strided in (leaves, wide):
        h, state = call(p, strided)
        assert error(h, expected[0]) < 1e-12
        assert error(state.C, expected[1].C) < 1e-12


def activations(p: DeltaProblem, leaves: dict[str, Tensor], activation: str) -> dict[str, Tensor]:
    """The leaves with activations by hand."""
    x = dict(leaves)
    for name in ("q", "k", "read_key"):
        if name in x:
            x[name] = x[name] / (x[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    x["beta"] = 2 * x["beta"].sigmoid()
    A, bias = x.pop("A_log").exp(), x.pop("dt_bias")
    by_channel = x["log_f"].dim() == 4
    A = A[:, None] if by_channel else A
    bias = bias[:, None] if by_channel and bias.dim() == 1 else bias
    f = x["log_f"] + bias
    x["log_f"] = -A * F.softplus(f) if activation == "softplus" else -5 * (A * f).sigmoid()
    return x


@pytest.mark.parametrize("bias_by_channel", [False, True])
@pytest.mark.parametrize("activation", ["softplus", "sigmoid"])
@pytest.mark.parametrize("model", ["gdn", "kda", "comba"])
def test_activations(model: str, activation: str, bias_by_channel: bool) -> None:
    """The options give what the same activations by hand give, with the gradients of their parameters."""
    if bias_by_channel and model != "kda":
        return
    p = delta_problem(model, T=30, H=4)
    leaves = fresh(p)
    extra = {"A_log": torch.randn(4).double(), "dt_bias": torch.randn(4, *[8] * bias_by_channel).double()}
    every = leaves | {name: t.requires_grad_() for name, t in extra.items()}
    parameters = {name: every[name] for name in extra}
    h, state = call(
        p, leaves, normalize_qk=True, beta_activation="2sigmoid", gate_activation=activation, **parameters,
        **({"lower_bound": -5.0} if activation == "sigmoid" else {}),
    )  # fmt: skip
    found = gradients(p, every, h, state.C)
    by_hand = call(p, activations(p, every, activation))
    expected = gradients(p, every, by_hand[0], by_hand[1].C)
    assert {name: e for name in found if (e := error(found[name], expected[name])) > 1e-10} == {}


class WithActivations(ChunkwiseDelta):
    """A backend that applies the activations itself and stores the arguments of its calls."""

    activations_by = "backend"

    def __init__(self) -> None:
        self.given: list[tuple[DeltaInputs, DeltaSpec]] = []

    def forward(self, x: DeltaInputs, spec: DeltaSpec) -> DeltaOutputs:
        self.given.append((x, spec))
        plain = activated(x, spec.normalize_qk, spec.beta_activation, spec.gate_activation, spec.lower_bound)
        return super().forward(plain, spec)


def test_a_backend_with_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend gets the inputs as the caller gives them; transforms map over all but parameters without a batch."""
    backend = WithActivations()
    q, k, v = torch.randn(2, 21, 2, 5), torch.randn(2, 21, 2, 5), torch.randn(2, 21, 4, 3)
    beta, f, A_log, dt_bias = torch.randn(2, 21, 4), torch.randn(2, 21, 4, 5), torch.randn(4), torch.randn(4, 5)

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, f: Tensor) -> Tensor:
        return tfla.delta_rule(
            q, k, v, beta, f, normalize_qk=True, beta_activation="sigmoid", gate_activation="sigmoid", A_log=A_log,
            dt_bias=dt_bias, lower_bound=-5.0,
        )  # fmt: skip

    expected = run(q, k, v, beta, f)
    caching.clear_caches()
    monkeypatch.setitem(DELTA_BACKENDS, "chunkwise", backend)  # type: ignore[misc]
    assert error(run(q, k, v, beta, f), expected) < 1e-6
    (x, spec), *_ = backend.given
    assert x.q is q
    assert x.A_log is A_log
    assert (spec.normalize_qk, spec.beta_activation, spec.gate_activation, spec.lower_bound) == (
        True, "sigmoid", "sigmoid", -5.0,
    )  # fmt: skip
    mapped = torch.vmap(run)(*(t.unsqueeze(1) for t in (q, k, v, beta, f))).squeeze(1)
    caching.clear_caches()
    assert error(mapped, expected) < 1e-6


def test_delta_product() -> None:
    torch.manual_seed(0)
    p = delta_problem("gdn", T=60, B=2, H=4)
    x, writes = p.x, 3
    q, log_f = x.q[:, :20], x.log_f[:, :20]
    assert log_f is not None
    assert x.beta is not None
    assert x.C is not None
    C, hs = x.C, []
    k = x.k.repeat_interleave(2, 2)
    for t in range(20):
        C = log_f[:, t].exp()[..., None, None] * C
        for j in range(t * writes, (t + 1) * writes):
            E = x.v[:, j] - torch.einsum("bhkv,bhk->bhv", C, k[:, j])
            C = C + x.beta[:, j][..., None, None] * k[:, j][..., None] * E[..., None, :]
        hs.append(torch.einsum("bhkv,bhk->bhv", C, q[:, t].repeat_interleave(2, 1)) * p.scale)
    h, state = tfla.delta_product(
        q, x.k, x.v, x.beta, log_f, writes=writes, initial_state=tfla.State(x.C), return_state=True, scale=p.scale
    )
    assert error(h, torch.stack(hs, 1)) < 1e-12
    assert error(state.C, C) < 1e-12
    flat = [t[:1] for t in (q, x.k, x.v, x.beta, log_f)]
    packed = tfla.delta_product(*flat, writes=writes, cu_seqlens=torch.tensor([0, 7, 20]))
    alone = tfla.delta_product(*(t[:, -13 * (t.shape[1] // 20) :] for t in flat), writes=writes)
    assert error(packed[:, 7:], alone) < 1e-12


@pytest.mark.parametrize("by_channel", [False, True])
def test_dplr(by_channel: bool) -> None:
    torch.manual_seed(0)
    p = delta_problem("kda" if by_channel else "gdn", T=30, Hq=4, H=4)
    x = p.x
    assert x.log_f is not None
    assert x.C is not None
    a, b = -x.k, F.normalize(torch.randn_like(x.k), dim=-1) * torch.rand_like(x.k)
    C, hs = x.C, []
    log_f = x.log_f if by_channel else x.log_f.unsqueeze(-1)
    k = torch.randn_like(x.k)
    for t in range(30):
        read = torch.einsum("bhkv,bhk->bhv", C, a[:, t])
        C = log_f[:, t].exp()[..., None] * C + b[:, t][..., None] * read[..., None, :]
        C = C + k[:, t][..., None] * x.v[:, t][..., None, :]
        hs.append(torch.einsum("bhkv,bhk->bhv", C, x.q[:, t]))
    h, state = tfla.dplr(x.q, k, x.v, a, b, x.log_f, scale=1.0, initial_state=tfla.State(x.C), return_state=True)
    assert error(h, torch.stack(hs, 1)) < 1e-12
    assert error(state.C, C) < 1e-12
    flat = [t[:1] for t in (x.q, k, x.v, a, b, x.log_f)]
    packed = tfla.dplr(*flat, cu_seqlens=torch.tensor([0, 11, 30]))
    assert error(packed[:, 11:], tfla.dplr(*(t[:, 11:] for t in flat))) < 1e-12


@pytest.mark.parametrize("backend", ["chunkwise", "reference"])
def test_an_empty_batch(backend: str) -> None:
    q, v, log_f = torch.zeros(0, 9, 2, 4, requires_grad=True), torch.zeros(0, 9, 2, 3), torch.zeros(0, 9, 2, 4)
    h, state = tfla.delta_rule(q, q, v, None, log_f, return_state=True, backend=backend)
    assert h.shape == v.shape
    assert state.C.shape == (0, 2, 4, 3)
    h.sum().backward()
    assert q.grad is not None


# Decoding.


@pytest.mark.parametrize("model", ["gdn", "kda", "gla", "comba"])
def test_steps_continue_a_sequence(model: str) -> None:
    p = delta_problem(model, T=12, H=4)
    h, state = call(p, dict(p.leaves))
    now = tfla.State(p.leaves["C"])
    found = []
    for part in (slice(0, 1), slice(1, 8), slice(8, 12)):
        x = {name: t[:, part] for name, t in p.leaves.items() if name != "C"}
        if p.correct:
            given = options(log_f=x.get("log_f"), read_key=x.get("read_key"))
            h_part, now = tfla.delta_rule_steps(
                x["q"], x["k"], x["v"], x["beta"], now, read_before_decay=p.read_before_decay, **given
            )
        else:
            h_part, now = tfla.linear_attention_steps(x["q"], x["k"], x["v"], x["log_f"], now)
        found.append(h_part)
    assert error(torch.cat(found, 1), h) < 1e-12
    assert error(now.C, state.C) < 1e-12


def test_one_step_and_lengths() -> None:
    p = delta_problem("kda", T=5, B=3)
    x = {name: t for name, t in p.leaves.items() if name != "C"}
    start = tfla.State(p.leaves["C"])
    lengths = torch.tensor([0, 5, 2])
    given = x["q"], x["k"], x["v"], x["beta"]
    h, state = tfla.delta_rule_steps(*given, start, x["log_f"], lengths=lengths)
    now, states = start, [start.C]
    for t in range(5):
        h_t, now = tfla.delta_rule_step(*(g[:, t] for g in given), now, x["log_f"][:, t])
        states.append(now.C)
        assert error(h_t, h[:, t]) < 1e-12
    assert torch.equal(state.C, torch.stack([states[n][b] for b, n in enumerate(lengths.tolist())]))
    alone = tfla.delta_rule_steps(*given, start, x["log_f"], return_state=False)
    assert torch.equal(alone, h)
    own = start.clone()
    with torch.no_grad():
        _, new = tfla.delta_rule_steps(*given, own, x["log_f"], in_place=True)
    assert new.C is own.C
    assert torch.equal(own.C, states[-1])
    h_t, _ = tfla.linear_attention_step(*(g[:, 0] for g in given[:3]), x["log_f"][:, 0], start)
    assert h_t.shape == h[:, 0].shape
    with pytest.raises(ValueError, match="lengths: got values from 0 to 6, expected from 0 to T = 5"):
        tfla.delta_rule_steps(*given, start, x["log_f"], lengths=torch.tensor([0, 6, 2]))


def test_a_backend_with_a_kernel_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets plain calls without gradients; others are computed by the reference."""

    class WithSteps(ChunkwiseDelta):
        def steps_unsupported(self, x: DeltaStepInputs) -> str | None:
            return None

        def steps(self, x: DeltaStepInputs, spec: DeltaSpec, into: Tensor | None) -> tuple[Tensor, Tensor]:
            return x.v + 1, x.C + 1

    monkeypatch.setitem(DELTA_BACKENDS, "chunkwise", WithSteps())  # type: ignore[misc]
    p = delta_problem("gdn", T=3)
    given = [p.leaves[name] for name in ("q", "k", "v", "beta")]
    h, state = tfla.delta_rule_steps(*given, tfla.State(p.leaves["C"]), p.leaves["log_f"])
    assert torch.equal(h, p.x.v + 1)
    assert torch.equal(state.C, p.leaves["C"] + 1)
    given[0] = given[0].clone().requires_grad_()
    h, _ = tfla.delta_rule_steps(*given, tfla.State(p.leaves["C"]), p.leaves["log_f"])
    assert h.requires_grad


# PyTorch's transforms.


@pytest.mark.parametrize("model", ["gdn", "kda", "gla"])
def test_compile_fullgraph(model: str) -> None:
    torch.compiler.reset()
    p = delta_problem(model, T=20)
    compiled = torch.compile(lambda leaves: call(p, leaves)[0], fullgraph=True, backend="aot_eager")
    leaves = fresh(p)
    expected = torch.autograd.grad((call(p, leaves)[0] * p.dh).sum(), list(leaves.values()))
    found = torch.autograd.grad((compiled(leaves) * p.dh).sum(), list(leaves.values()))
    assert all(error(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))


def test_compile_steps() -> None:
    torch.compiler.reset()
    p = delta_problem("kda", T=5, dtype=torch.float32)
    x, state, lengths = p.leaves, tfla.State(p.leaves["C"]), torch.tensor([2, 5])

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_f: Tensor, C: Tensor, lengths: Tensor) -> Any:
        h, new = tfla.delta_rule_steps(q, k, v, beta, tfla.State(C), log_f, lengths=lengths, normalize_qk=True)
        return h, new.C

    given = *(x[name] for name in ("q", "k", "v", "beta", "log_f")), state.C, lengths
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(error(a, b) < 1e-6 for a, b in zip(compiled(*given), run(*given), strict=True))


class Layer(torch.nn.Module):
    """A model around the operator, as export needs one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_f: Tensor) -> Tensor:
        return tfla.delta_rule(q, k, v, beta, log_f, normalize_qk=True)


def test_export() -> None:
    p = delta_problem("gdn", T=20)
    T = torch.export.Dim("T", min=2, max=4096)
    given = tuple(p.leaves[name] for name in ("q", "k", "v", "beta", "log_f"))
    exported = torch.export.export(Layer(), given, dynamic_shapes=({1: T},) * 5)
    assert any("tfla.delta" in str(node.target) for node in exported.graph.nodes)
    given = tuple(torch.cat([t, t], 1) for t in given)
    assert torch.equal(exported.module()(*given), Layer()(*given))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    p = delta_problem("kda", T=20)
    leaves = [t for name, t in fresh(p).items() if name != "C"]
    results = []
    for h in (tfla.delta_rule(*leaves), checkpoint(tfla.delta_rule, *leaves, use_reentrant=use_reentrant)):
        for x in leaves:
            x.grad = None
        h.backward(p.dh)
        results.append([h, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("model", ["gdn", "kda", "gla"])
def test_opcheck(model: str) -> None:
    p = delta_problem(model, T=10, B=1, Hq=1, H=1)
    x = p.with_leaves(fresh(p))
    args = (*x, p.scale, p.correct, p.read_before_decay, 64, "chunkwise", "segmented", True, True)
    torch.library.opcheck(torch.ops.tfla.delta.default, args)


def test_second_derivatives_and_forward_mode() -> None:
    for model in ("gdn", "kda", "comba"):
        p = delta_problem(model, T=4, B=1, Hq=1, H=1, K=2, V=2)
        names = list(p.leaves)

        def f(*tensors: Tensor, p: DeltaProblem = p, names: list[str] = names) -> Tensor:
            return call(p, dict(zip(names, tensors, strict=True)))[0]

        assert torch.autograd.gradcheck(f, tuple(fresh(p).values()), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, tuple(fresh(p).values()))


def test_vmap() -> None:
    p = delta_problem("kda", T=9)
    given = [torch.stack([p.leaves[name], 2 * p.leaves[name].flip(0)]) for name in ("q", "k", "v", "beta", "log_f")]
    given[1] = F.normalize(given[1], dim=-1)
    found = torch.vmap(tfla.delta_rule)(*given)
    expected = torch.stack([tfla.delta_rule(*(t[j] for t in given)) for j in range(2)])
    assert error(found, expected) < 1e-12


def test_batched_cotangents() -> None:
    p = delta_problem("kda", T=9)
    leaves = fresh(p)
    h, _ = call(p, leaves)
    given, inputs = torch.stack([p.dh, p.dh.flip(1)]), [*leaves.values()]
    found = torch.autograd.grad(h, inputs, given, is_grads_batched=True, retain_graph=True)
    for j in range(2):
        expected = torch.autograd.grad(h, inputs, given[j], retain_graph=True)
        assert all(error(a[j], b) < 1e-12 for a, b in zip(found, expected, strict=True))


def test_autocast() -> None:
    p = delta_problem("kda", T=40, dtype=torch.float32)
    given = [p.leaves[name] for name in ("q", "k", "v", "beta", "log_f")]
    with torch.autocast("cpu", torch.bfloat16):
        h = tfla.delta_rule(*given)
    assert h.dtype == torch.bfloat16
    assert torch.equal(h, tfla.delta_rule(*(t.bfloat16() for t in given[:3]), *given[3:]))


def test_autocast_takes_mixed_dtypes() -> None:
    p = delta_problem("kda", T=40, dtype=torch.float32)
    q, k, v, beta, log_f = (p.leaves[name] for name in ("q", "k", "v", "beta", "log_f"))
    low = [t.bfloat16() for t in (q, k, v, -k, 0.5 * k)]
    with torch.autocast("cpu", torch.bfloat16):
        found = tfla.dplr(low[0].float(), *low[1:3], low[3].float(), low[4], log_f)
        with pytest.raises(TypeError, match=r"^a: got dtype torch.float64, expected that of q, torch.float32"):
            tfla.dplr(q, k, v, -k.double(), k, log_f)
        with pytest.raises(TypeError, match=r"^read_key: got dtype torch.float64, expected that of q, torch.float32"):
            tfla.delta_rule(q, k, v, beta, log_f, read_key=k.double())
    assert torch.equal(found, tfla.dplr(*low, log_f))
    with pytest.raises(TypeError, match=r"^k: got dtype torch.bfloat16, expected that of q, torch.float32"):
        tfla.dplr(q, *low[1:], log_f)


@pytest.mark.parametrize("model", ["gdn", "kda", "gla"])
def test_infinite_gates(model: str) -> None:
    """A gate of -inf forgets all before it, and no result or gradient is NaN."""
    p = delta_problem(model, T=80, carried=False)
    log_f = p.leaves["log_f"].clone()
    log_f[:, 40] = -torch.inf
    leaves = fresh(p) | {"log_f": log_f.requires_grad_()}
    h, state = call(p, leaves)
    after = {name: t[:, 40:] for name, t in p.leaves.items()}
    assert error(h[:, 40:], call(p, after)[0]) < 1e-12
    grads = torch.autograd.grad((h, state.C), list(leaves.values()), (p.dh, p.dC))
    assert all(torch.isfinite(g).all() for g in grads)


def test_flops() -> None:
    B, T, H, K, V, L = 2, 128, 3, 8, 16, 64
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V, requires_grad=True)
    beta = torch.rand(B, T, H)
    with FlopCounterMode(display=False) as counter:
        h = tfla.delta_rule(q, k, v, beta)
    forward = B * H * (6 * T * K * V + 2 * T * L * (K + V) + T * L * L // 3)
    assert counter.get_total_flops() == forward
    with counter:
        h.sum().backward()
    assert counter.get_total_flops() == B * H * (14 * T * K * V + T * L * (5 * K + 4 * V))


def test_explain() -> None:
    p = delta_problem("gdn", T=100)
    given = [p.leaves[name] for name in ("q", "k", "v", "beta", "log_f")]
    found = tfla.explain_delta_rule(*given, chunk_size=64)
    assert (found.backend, found.chunk_size, found.stored_states) == ("chunkwise", 64, 4)
    assert "reference" in found.not_taken


# What does not fit is refused.

B, T, H, K, V = 2, 9, 4, 5, 7
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, "q: got list, expected a tensor"),
    ({"beta": torch.zeros(B, T)}, ValueError, r"beta: got shape \(2, 9\), expected \(2, 9, 4\)"),
    (
        {"log_f": torch.zeros(B, T, H, V)},
        ValueError,
        r"log_f: .*\(2, 9, 4, 7\), expected \(2, 9, 4\) or \(2, 9, 4, 5\)",
    ),
    ({"log_f": torch.zeros(B, T, H, dtype=torch.int64)}, TypeError, "log_f: got dtype torch.int64"),
    ({"read_key": torch.zeros(B, T, H, V)}, ValueError, r"read_key: got shape .*expected \(2, 9, 4, 5\)"),
    (
        {"read_key": torch.zeros(B, T, H, K).double()},
        TypeError,
        "read_key: got dtype torch.float64, expected that of q",
    ),
    ({"beta_activation": "tanh"}, ValueError, "beta_activation: got 'tanh', allowed are 'none', 'sigmoid', '2sigmoid'"),
    ({"gate_activation": "softplus"}, ValueError, "A_log: got None with gate_activation='softplus', expected a tensor"),
    ({"A_log": torch.zeros(H)}, ValueError, "A_log: got a tensor with gate_activation='none', expected None"),
    ({"gate_activation": "sigmoid"}, ValueError, "lower_bound: got None .*expected a number"),
    (
        {"gate_activation": "sigmoid", "lower_bound": 1.0},
        ValueError,
        "lower_bound: got 1.0, expected a finite number below",
    ),
    ({"gate_activation": "softplus", "A_log": torch.zeros(3)}, ValueError, r"A_log: got shape \(3,\), expected \(4\)"),
    ({"lower_bound": -1.0}, ValueError, "lower_bound: got -1.0 with gate_activation='none', expected None"),
    (
        {"backend": "nothing"},
        ValueError,
        "backend: got 'nothing', allowed are None and 'hopper', 'triton', 'chunkwise'",
    ),
    ({"kernel": "nothing"}, ValueError, "kernel: got 'nothing', backend 'chunkwise' has 'segmented'"),
    ({"initial_state": tfla.State.zeros(B, H, K, V, normalize=True)}, ValueError, "initial_state.n: got a tensor"),
    ({"chunk_size": 0}, ValueError, "chunk_size: got 0, expected at least 1"),
    ({"read_before_decay": 2}, TypeError, "read_before_decay: got 2, expected True or False"),
    ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "q: got batch 2, expected 1 with cu_seqlens"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), BAD)
def test_bad_input(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"q": torch.zeros(B, T, H, K), "k": torch.zeros(B, T, H, K), "v": torch.zeros(B, T, H, V)}
    given |= {"beta": torch.zeros(B, T, H), "log_f": torch.zeros(B, T, H)}
    tfla.delta_rule(**given)
    for _ in range(2):  # the second call must not find the first one's plan
        with pytest.raises(kind, match=message):
            tfla.delta_rule(**(given | changed))


def test_gates_by_channel_refuse_a_normalizer() -> None:
    q, v, log_f = torch.zeros(B, T, H, K), torch.zeros(B, T, H, V), torch.zeros(B, T, H, K)
    with pytest.raises(ValueError, match=r"normalize: got True with log_f \(B, T, H, dqk\), expected False"):
        tfla.linear_attention(q, q, v, log_f, normalize=True)
    with pytest.raises(ValueError, match=r"store_dtype: got torch.bfloat16 with log_f"):
        tfla.linear_attention(q, q, v, log_f, store_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"context_parallel: got object, expected a process group"):
        tfla.linear_attention(q, q, v, log_f, context_parallel=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"writes: got 0, expected at least 1"):
        tfla.delta_product(q, q, v, None, writes=0)
