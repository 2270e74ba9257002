"""The tests of flash-linear-attention's delta rules and GLA: signatures, results and gradients, and the patch of it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from torch import Tensor

from tfla.integrations import fla as ours

B, T, H, HV, K, V = 2, 70, 2, 4, 8, 6
WHERE = {
    "chunk_gla": "gla",
    "fused_recurrent_gla": "gla",
    "chunk_delta_rule": "delta_rule",
    "fused_recurrent_delta_rule": "delta_rule",
    "chunk_gated_delta_rule": "gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "gated_delta_rule",
    "chunk_kda": "kda",
    "fused_recurrent_kda": "kda",
    "chunk_comba": "comba",
    "chunk_gated_delta_product": "gated_delta_product",
    "chunk_dplr_delta_rule": "generalized_delta_rule",
    "chunk_rwkv7": "rwkv7",
}


def theirs(path: str) -> Any:
    """Return the object module.name within fla.ops of the package."""
    pytest.importorskip("fla", reason='pip install "tfla[baselines]"')
    module, _, name = f"fla.ops.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", WHERE)
def test_signatures(name: str) -> None:
    original = inspect.unwrap(theirs(f"{WHERE[name]}.{name}"))
    own = getattr(importlib.import_module(f"tfla.integrations.fla.{WHERE[name]}"), name)
    assert own is getattr(ours, name)
    parameters = [
        [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()] for fn in (own, original)
    ]
    assert parameters[0] == parameters[1]


def inputs(heads: int = H, gates: tuple[int, ...] = (), mean: float = 3.0) -> dict[str, Tensor]:
    """Float32 inputs with gradients; `gates`: dimensions of log-decays after (B, T, HV)."""
    torch.manual_seed(0)
    x = {
        "q": torch.randn(B, T, heads, K),
        "k": F.normalize(torch.randn(B, T, heads, K), dim=-1),
        "v": torch.randn(B, T, HV, V),
        "g": F.logsigmoid(torch.randn(B, T, HV, *gates) + mean),
        "beta": torch.rand(B, T, HV) * 2,
        "state": torch.randn(B, HV, K, V),
    }
    return {name: t.requires_grad_() for name, t in x.items()}


def agree(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """Compare outputs, final states, and gradients of leaves from random cotangents."""
    cotangents = [torch.randn_like(t) for t in expected]
    grads = [torch.autograd.grad(outs, leaves, cotangents, retain_graph=True) for outs in (found, expected)]
    for a, b in zip([*found, *grads[0]], [*expected, *grads[1]], strict=True):
        assert a.shape == b.shape
        assert error(a, b) <= TOLERANCE[torch.float32]


LAST = {"output_final_state": True}


@pytest.mark.parametrize("mean", [3.0, -4.0])
@pytest.mark.parametrize("run", [ours.chunk_gated_delta_rule, ours.fused_recurrent_gated_delta_rule])
def test_gated_delta_rule(run: Callable[..., Any], mean: float) -> None:
    x = inputs(mean=mean)
    args = x["q"], x["k"], x["v"]
    naive = theirs("gated_delta_rule.naive.naive_recurrent_gated_delta_rule")
    wide = [t.repeat_interleave(HV // H, 2) for t in args[:2]]
    expected = naive(*wide, x["v"], x["beta"], x["g"], initial_state=x["state"], **LAST)
    agree(run(*args, g=x["g"], beta=x["beta"], initial_state=x["state"], **LAST), expected, list(x.values()))


@pytest.mark.parametrize("mean", [3.0, -4.0])
@pytest.mark.parametrize("run", [ours.chunk_kda, ours.fused_recurrent_kda])
def test_kda(run: Callable[..., Any], mean: float) -> None:
    x = inputs(gates=(K,), mean=mean)
    args = x["q"], x["k"], x["v"], x["g"], x["beta"]
    expected = theirs("kda.naive.naive_recurrent_kda")(*args, initial_state=x["state"], **LAST)
    agree(run(*args, initial_state=x["state"], **LAST), expected, list(x.values()))


@pytest.mark.parametrize("run", [ours.chunk_gla, ours.fused_recurrent_gla])
def test_gla(run: Callable[..., Any]) -> None:
    x = inputs(heads=HV, gates=(K,))
    args = x["q"], x["k"], x["v"], x["g"]
    expected = theirs("gla.naive.naive_recurrent_gla")(*args, initial_state=x["state"], **LAST)
    leaves = [t for name, t in x.items() if name != "beta"]
    agree(run(*args, initial_state=x["state"], **LAST), expected, leaves)


@pytest.mark.parametrize("run", [ours.chunk_delta_rule, ours.fused_recurrent_delta_rule])
def test_delta_rule(run: Callable[..., Any]) -> None:
    x = inputs(heads=HV)
    args = x["q"], x["k"], x["v"], x["beta"]
    o, last = theirs("delta_rule.naive.delta_rule_recurrence")(
        *(t.transpose(1, 2) for t in args), initial_state=x["state"], **LAST
    )
    leaves = [t for name, t in x.items() if name != "g"]
    agree(run(*args, initial_state=x["state"], **LAST), (o.transpose(1, 2), last), leaves)


def test_comba_reads_before_the_decay() -> None:
    """The package's kernels and `naive_chunk_comba` do so; its `naive_recurrent_comba` reads after the decay."""
    x = inputs(heads=HV)
    p = (x["k"] * torch.rand(B, T, HV, 1)).detach().requires_grad_()
    args = x["q"], x["k"], x["v"], p, x["g"], x["beta"]
    expected = theirs("comba.naive.naive_chunk_comba")(*args, initial_state=x["state"], **LAST)
    found = ours.chunk_comba(*args, initial_state=x["state"], **LAST)
    agree(found, expected, [*x.values(), p])
    after = theirs("comba.naive.naive_recurrent_comba")(
        x["q"], x["k"], x["v"], p, x["beta"], x["g"], initial_state=x["state"], **LAST
    )
    assert error(found[0], after[0]) > 1e-3


def test_gated_delta_product() -> None:
    x = inputs(heads=HV)
    q, g = x["q"][:, :35], x["g"][:, :35]
    naive = theirs("gated_delta_product.naive.naive_recurrent_gated_delta_product")
    expected = naive(q, x["k"], x["v"], g, x["beta"], K**-0.5, num_householder=2, initial_state=x["state"], **LAST)
    found = ours.chunk_gated_delta_product(
        q, x["k"], x["v"], g, x["beta"], num_householder=2, initial_state=x["state"], **LAST
    )
    agree(found, expected, list(x.values()))


def test_dplr_and_rwkv7() -> None:
    x = inputs(heads=HV, gates=(K,))
    a, b = -x["k"].detach(), (x["k"] * torch.rand(B, T, HV, K)).detach()
    leaves = [*(x[name] for name in ("q", "k", "v", "g", "state")), a.requires_grad_(), b.requires_grad_()]
    o, last = theirs("generalized_delta_rule.dplr.naive.dplr_recurrence")(
        *(t.transpose(1, 2) for t in (x["q"], x["k"], x["v"], a, b, x["g"])), initial_state=x["state"], **LAST
    )
    expected = o.transpose(1, 2), last
    found = ours.chunk_dplr_delta_rule(x["q"], x["k"], x["v"], a, b, x["g"], initial_state=x["state"], **LAST)
    agree(found, expected, leaves)
    found = ours.chunk_rwkv7(x["q"], x["g"], x["k"], x["v"], a, b, scale=K**-0.5, initial_state=x["state"], **LAST)
    agree(found, expected, leaves)


def test_activations_of_kda() -> None:
    x = inputs(gates=(K,))
    A_log, dt_bias = torch.randn(HV, requires_grad=True), torch.randn(HV * K, requires_grad=True)
    leaves = [*x.values(), A_log, dt_bias]
    gate = {"A_log": A_log, "dt_bias": dt_bias, "use_gate_in_kernel": True}
    flags = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    normal = [t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x["q"], x["k"])]
    for bound, reference in ((None, "naive_kda_gate"), (-5.0, "naive_kda_lowerbound_gate")):
        g = theirs(f"kda.gate.{reference}")(x["g"], A_log, dt_bias, *([] if bound is None else [bound]))
        args = *normal, x["v"], g, 2 * x["beta"].sigmoid()
        expected = theirs("kda.naive.naive_recurrent_kda")(*args, initial_state=x["state"], **LAST)
        for run in (ours.chunk_kda, ours.fused_recurrent_kda):
            found = run(
                x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"], lower_bound=bound, **gate, **flags,
                **LAST,
            )  # fmt: skip
            agree(found, expected, leaves)


def test_activations_of_the_gated_delta_rule() -> None:
    x = inputs()
    A_log, dt_bias = torch.randn(HV, requires_grad=True), torch.randn(HV, requires_grad=True)
    g = -A_log.exp() * F.softplus(x["g"] + dt_bias)
    leaves = [*x.values(), A_log, dt_bias]
    expected = ours.chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], g, x["beta"].sigmoid(), initial_state=x["state"], **LAST
    )
    for run in (ours.chunk_gated_delta_rule, ours.fused_recurrent_gated_delta_rule):
        found = run(
            x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=x["state"], use_gate_in_kernel=True,
            A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, **LAST,
        )  # fmt: skip
        agree(found, expected, leaves)


@pytest.mark.parametrize("run", [ours.chunk_gated_delta_rule, ours.chunk_kda])
def test_layouts_and_packed_sequences(run: Callable[..., Any]) -> None:
    x = inputs(gates=(K,) if run is ours.chunk_kda else ())
    args = [x[name] for name in ("q", "k", "v", "g", "beta")]
    o, last = run(*args, initial_state=x["state"], **LAST)
    found = run(*args, initial_state=x["state"].mT, state_v_first=True, **LAST)
    agree((found[0], found[1].mT), (o, last), list(x.values()))
    flat = [t.flatten(0, 1)[None] for t in args]
    found = run(*flat, initial_state=x["state"], cu_seqlens=torch.tensor([0, T, 2 * T]), chunk_size=64, **LAST)
    agree((found[0].view_as(o), found[1]), (o, last), list(x.values()))
    with torch.no_grad():  # decoding
        o1, state = run(*(t[:, :-1] for t in args), initial_state=x["state"], **LAST)
        o2, state = run(*(t[:, -1:] for t in args), initial_state=state, **LAST)
    assert error(torch.cat([o1, o2], 1), o) < 1e-6
    assert error(state, last) < 1e-6
    o2, none = run(*args)
    assert none is None


def test_gla_in_reverse() -> None:
    x = inputs(heads=HV, gates=(K,))
    args = x["q"], x["k"], x["v"], x["g"]
    o, last = ours.fused_recurrent_gla(*args, initial_state=x["state"], reverse=True, **LAST)
    flipped = ours.fused_recurrent_gla(*(t.flip(1) for t in args), initial_state=x["state"], **LAST)
    assert error(o, flipped[0].flip(1)) < 1e-6
    assert error(last, flipped[1]) < 1e-6


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("chunk_kda", {"cp_context": object()}, ValueError, "cp_context: got .*expected None or False"),
    ("chunk_kda", {"return_intermediate_states": True}, ValueError, "return_intermediate_states: got True"),
    ("chunk_kda", {"allow_neg_eigval": True}, ValueError, "allow_neg_eigval: got True, expected it with"),
    ("chunk_kda", {"use_gate_in_kernel": True}, ValueError, "A_log: got None with use_gate_in_kernel=True"),
    (
        "chunk_kda",
        {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(HV)},
        ValueError,
        "lower_bound: got None with safe_gate=True and use_gate_in_kernel=True",
    ),
    ("chunk_kda", {"colour": 1}, TypeError, "colour: got an argument that chunk_kda does not take"),
    ("chunk_kda", {"chunk_size": 3}, ValueError, "chunk_size: got 3, expected a power of 2"),
    ("fused_recurrent_gla", {"gv": torch.zeros(1)}, ValueError, "gv: got a tensor, which tfla does not support"),
    ("chunk_gated_delta_rule", {"head_first": True}, ValueError, "head_first: got True"),
    ("chunk_gla", {"g": torch.zeros(B, T, HV)}, ValueError, r"g: got shape \(2, 70, 4\), expected \(2, 70, 4, 8\)"),
    ("chunk_kda", {"g": torch.zeros(B, T, HV)}, ValueError, r"g: got shape \(2, 70, 4\), expected \(B, T, H, K\)"),
    ("fused_recurrent_gated_delta_rule", {"g": None, "gk": torch.zeros(B, T, HV)}, ValueError, "gk: got shape"),
    ("chunk_gated_delta_rule", {"g": torch.zeros(B, T, HV, K)}, ValueError, r"g: got shape .*expected \(B, T, H\)"),
    ("chunk_kda", {"dt_bias": torch.zeros(7)}, ValueError, r"dt_bias: got shape \(7,\), expected \(32,\)"),
    ("chunk_kda", {"use_gate_in_kernel": True, "A_log": [1.0]}, TypeError, "A_log: got list, expected a tensor"),
    ("chunk_kda", {"v": None, "dt_bias": torch.zeros(HV * K)}, TypeError, "v: got NoneType, expected a tensor"),
]


@pytest.mark.parametrize(("name", "changed", "kind", "message"), REFUSED)
def test_refuses_what_is_not_supported(name: str, changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    x = inputs(heads=HV, gates=(K,) if "gated" not in name else ())
    run = getattr(ours, name)
    given = {n: x[n] for n in ("q", "k", "v", "g", "beta") if n in inspect.signature(run).parameters}
    with pytest.raises(kind, match=message):
        run(**(given | changed))


@torch.no_grad()
@pytest.mark.parametrize("T", [1, 5])
def test_errors_have_the_names_of_the_package(T: int) -> None:
    """They named the arguments of tfla's operators; a step with a tensor of too few dimensions was an IndexError."""
    q, v, g = torch.zeros(2, T, 2, 4), torch.zeros(2, T, 2, 3), torch.zeros(2, T, 2)
    for call in (
        lambda **given: ours.chunk_gated_delta_rule(q, q, v, g, g, **given),
        lambda **given: ours.fused_recurrent_delta_rule(q, q, v, g, **given),
        lambda **given: ours.chunk_kda(q, q, v, q, g, **given),
        lambda **given: ours.chunk_gated_delta_product(q, q, v, g, g, num_householder=1, **given),
    ):
        with pytest.raises(TypeError, match=r"^use_qk_l2norm_in_kernel: got 'no', expected True or False"):
            call(use_qk_l2norm_in_kernel="no")
    for writes, kind in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(kind, match=r"^num_householder: got "):
            ours.chunk_gated_delta_product(q, q, v, g, g, num_householder=writes)
    with pytest.raises(ValueError, match=r"^v: got shape \(2, \d, 2\), expected"):
        ours.chunk_delta_rule(q, q, g, g)
    with pytest.raises(TypeError, match=r"^q: got list, expected a tensor"):
        ours.chunk_delta_rule([1], q, v, g)
    state = torch.zeros(2, 2, 4, 3)
    with pytest.raises(TypeError, match=r"^v: got NoneType, expected a tensor"):
        ours.chunk_delta_rule(q, q, None, g, initial_state=state)
    with pytest.raises(ValueError, match=r"^initial_state: got device meta, expected that of q, cpu"):
        ours.chunk_delta_rule(q, q, v, g, initial_state=state.to("meta"))
    for run in (ours.chunk_gated_delta_rule, ours.fused_recurrent_gated_delta_rule):
        for name, given in {"g": {"beta": g, "A_log": g[0, 0]}, "A_log": {"g": g, "beta": g}}.items():
            with pytest.raises(ValueError, match=rf"^{name}: got None with use_gate_in_kernel=True, expected a tensor"):
                run(q, q, v, **({"g": None} | given), use_gate_in_kernel=True)
        with pytest.raises(ValueError, match=r"^beta: got None with use_beta_sigmoid_in_kernel=True"):
            run(q, q, v, g=g, beta=None, use_beta_sigmoid_in_kernel=True)
        o, _ = run(q, q, v, g=g, beta=g, use_qk_l2norm_in_kernel=None)
        assert torch.equal(o, torch.zeros_like(v))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("chunk_delta_rule", "beta"),
        ("chunk_gated_delta_product", "beta"),
        *((name, missing) for name in ("chunk_gated_delta_rule", "chunk_comba", "chunk_kda", "fused_recurrent_kda")
          for missing in ("g", "beta")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("steps", [1, 5])
def test_what_the_package_computes_nothing_without_is_required(name: str, missing: str, steps: int) -> None:
    """The kernels of the package read the gate and the write strength; these were no decay and 1."""
    q, v, beta = torch.ones(2, steps, 2, 4), torch.ones(2, steps, 2, 3), torch.ones(2, steps, 2)
    given = {"q": q, "k": q, "v": v, "p": q, "g": q if "kda" in name else beta, "beta": beta, "num_householder": 1}
    run = getattr(ours, name)
    given = {n: t for n, t in given.items() if n in inspect.signature(run).parameters}
    with torch.no_grad():
        run(**given)
        with pytest.raises(TypeError, match=f"^{missing}: got NoneType, expected a tensor"):
            run(**(given | {missing: None}))


@pytest.mark.parametrize("steps", [1, 5])
def test_defaults_of_the_package(steps: int) -> None:
    """Recurrent functions without a write strength write with 1, and none of these decays without a gate."""
    torch.manual_seed(0)
    q, v, beta = torch.randn(2, steps, 2, 4), torch.randn(2, steps, 4, 3), torch.rand(2, steps, 4)
    ones, wide = torch.ones_like(beta), q.repeat_interleave(2, 2)
    with torch.no_grad():
        for run in (ours.fused_recurrent_delta_rule, ours.fused_recurrent_gated_delta_rule):
            assert torch.equal(run(wide, wide, v)[0], run(wide, wide, v, beta=ones)[0])
        decayless = ours.fused_recurrent_delta_rule(wide, wide, v, beta)[0]
        gated = ours.fused_recurrent_gated_delta_rule(q, q, v, beta=beta)[0]
        product = ours.chunk_gated_delta_product(wide, wide, v, None, beta, num_householder=1)[0]
    assert error(gated, decayless) < 1e-6
    assert error(product, decayless) < 1e-6


GATES: dict[str, tuple[str, bool]] = {
    "chunk_gated_delta_rule": ("g", False),
    "fused_recurrent_gated_delta_rule": ("g", False),
    "chunk_gated_delta_product": ("g", False),
    "chunk_comba": ("g", False),
    "chunk_kda": ("g", True),
    "fused_recurrent_kda": ("g", True),
    "chunk_dplr_delta_rule": ("gk", True),
    "chunk_rwkv7": ("w", True),
}


@pytest.mark.parametrize("run_name", GATES)
def test_errors_name_the_log_decays_of_the_caller(run_name: str) -> None:
    run, (name, by_channel) = getattr(ours, run_name), GATES[run_name]
    q, v, beta = torch.zeros(2, 5, 2, 4), torch.zeros(2, 5, 2, 3), torch.zeros(2, 5, 2)
    given: dict[str, Any] = {"q": q, "r": q, "k": q, "v": v, "beta": beta, "a": q, "b": q, "p": q, "num_householder": 1}
    given = {n: t for n, t in given.items() if n in inspect.signature(run).parameters}
    good = q if by_channel else beta
    run(**given, **{name: good})
    for bad, kind, message in (
        ([1.0], TypeError, "got list, expected a tensor"),
        (good.int(), TypeError, "got dtype torch.int32, expected a float dtype"),
        (good[:, :-1], ValueError, "got shape .*expected "),
        (good[:, :, :1], ValueError, "got shape .*expected "),
        (good.to("meta"), ValueError, "got device meta, expected that of q, cpu"),
    ):
        with pytest.raises(kind, match=f"^{name}: {message}"):
            run(**given, **{name: bad})


def test_errors_name_the_read_keys_of_comba_and_the_queries_of_rwkv7() -> None:
    q, v, g = torch.zeros(2, 5, 2, 4), torch.zeros(2, 5, 2, 3), torch.zeros(2, 5, 2)
    with pytest.raises(ValueError, match=r"^p: got shape \(2, 4, 2, 4\), expected \(2, 5, 2, 4\)"):
        ours.chunk_comba(q, q, v, q[:, :-1], g, g)
    with pytest.raises(TypeError, match=r"^r: got list, expected a tensor"):
        ours.chunk_rwkv7([1.0], q, q, v, q, q)


@torch.no_grad()
def test_errors_name_arguments_of_simple_gla_and_of_constant_decays() -> None:
    q, v = torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 3)
    with pytest.raises(TypeError, match=r"^q: got NoneType, expected a tensor"):
        ours.parallel_simple_gla(None, q, v)
    for run, layer in ((ours.chunk_retention, {}), (ours.chunk_lightning_attn, {"layer_idx": 0, "num_layers": 1})):
        with pytest.raises(ValueError, match=r"^v: got shape \(2, 1, 3, 3\), expected \(B, T, 4, V\)"):
            run(q, q, v[:, :, :3], **layer)
