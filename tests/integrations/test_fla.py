"""The tests of flash-linear-attention's interface: signatures, results and gradients, against its naive references."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tfla.integrations import fla as ours

B, T, H, K, V = 2, 70, 3, 8, 6
MODULES = ("simple_gla", "retention", "lightning_attn", "linear_attn")
WHERE = {name: module for module in MODULES for name in importlib.import_module(f"{ours.__name__}.{module}").__all__}


def theirs(path: str) -> Any:
    """Return the object module.name within fla.ops of the package."""
    pytest.importorskip("fla", reason='pip install "tfla[baselines]"')
    module, _, name = f"fla.ops.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


def inputs(*names: str, B: int = B, N: int = B) -> list[Tensor]:
    """Return the inputs of these names, with gradients."""
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


def agree(found: list[Tensor], expected: list[Tensor], leaves: list[Tensor], exact: list[Tensor] | None = None) -> None:
    """Compare results, and gradients of `leaves` from random cotangents.

    Args:
        exact: the leaves of `expected`, if they are not `leaves`.
    """
    cotangents = [torch.randn_like(t) for t in expected]
    pairs = [(found, leaves), (expected, leaves if exact is None else exact)]
    grads = [
        torch.autograd.grad(outs, at, [c.to(o.dtype) for c, o in zip(cotangents, outs, strict=True)], retain_graph=True)
        for outs, at in pairs
    ]
    for a, b in zip([*found, *grads[0]], [*expected, *grads[1]], strict=True):
        assert a.shape == b.shape
        assert error(a, b) <= TOLERANCE[torch.float32]


def takes(name: str, argument: str) -> bool:
    """Return whether a function has an argument."""
    return argument in inspect.signature(getattr(ours, name)).parameters


TAKES_STATES = [name for name in WHERE if takes(name, "initial_state")]
REVERSIBLE = [name for name in WHERE if takes(name, "reverse")]
DIRECTIONS = [(name, reverse) for name in WHERE for reverse in ([False, True] if name in REVERSIBLE else [False])]
WITH_SCORES = [name for name in WHERE if takes(name, "output_attentions")]
WITH_OPTIONS = [name for name in WHERE if takes(name, "kwargs")]
RENAMED = [name for name in REVERSIBLE if takes(name, "state_v_first")]
LAYERS = {"layer_idx": 3, "num_layers": 12}


def required(name: str) -> dict[str, Any]:
    """Return the arguments without defaults that are not tensors."""
    return LAYERS if takes(name, "layer_idx") else {}


def log_decays(name: str, g: Tensor) -> Tensor:
    """Return the log-decays (B, T, H) of a function as its paper defines them, or `g` where they are an input."""
    heads = torch.arange(g.shape[2], dtype=torch.float64)
    if "simple_gla" in name:
        return g
    if "retention" in name:
        return torch.log(1 - 2 ** (-5 - heads)).expand(g.shape)
    if "lightning_attn" in name:
        return (-8 * heads / len(heads) * (1 - LAYERS["layer_idx"] / LAYERS["num_layers"])).expand(g.shape)
    return torch.zeros_like(g)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence step by step, in the dtype of its inputs."""
    out, steps = [torch.zeros_like(v[:, 0])] * v.shape[1], range(v.shape[1])
    for t in reversed(steps) if reverse else steps:
        state = torch.exp(g[:, t, :, None, None]) * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out[t] = scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return torch.stack(out, 1), state


def normalized(q: Tensor, k: Tensor, keys: Tensor, scale: float, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the denominator (B, T, H, 1) of linear attention and its last sum of keys (B, 1, H, K)."""
    sums = keys + (k.flip(1).cumsum(1).flip(1) if reverse else k.cumsum(1))
    return (scale * q * sums).sum(-1, keepdim=True) + 1e-10, sums[:, :1] if reverse else sums[:, -1:]


def test_covers_the_package() -> None:
    """Every function of these four modules of the package is here, in a module of the same name."""
    for module in MODULES:
        original = theirs(module)
        assert sorted(importlib.import_module(f"tfla.integrations.fla.{module}").__all__) == sorted(original.__all__)
    assert set(ours.__all__) >= {name for module in MODULES for name in theirs(module).__all__}


@pytest.mark.parametrize("name", WHERE)
def test_signatures(name: str) -> None:
    original = inspect.unwrap(theirs(f"{WHERE[name]}.{name}"))
    parameters = [
        [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()]
        for fn in (getattr(ours, name), original)
    ]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize(
    ("name", "reverse", "normalize"),
    [
        (name, reverse, normalize)
        for name, reverse in DIRECTIONS if name in TAKES_STATES
        for normalize in ([False, True] if takes(name, "normalize") else [False])
    ],
)  # fmt: skip
def test_every_function_is_the_recurrence(name: str, reverse: bool, normalize: bool) -> None:
    q, k, v, g, state, keys = leaves = inputs("q", "k", "v", "g", "state", "keys")
    exact = [t.detach().double().requires_grad_() for t in leaves]
    options: dict[str, Any] = {"output_final_state": True, "scale": 0.7, **required(name)}
    options |= {"reverse": True} if reverse else {}
    options |= {"normalize": normalize} if takes(name, "normalize") else {}
    options |= {"g": g} if takes(name, "g") else {}
    positive = (lambda t: F.elu(t) + 1) if normalize else (lambda t: t)
    o, last = getattr(ours, name)(
        positive(q), positive(k), v, initial_state=(state, keys) if normalize else state, **options
    )
    q_, k_, v_, g_, state_, keys_ = exact
    q_, k_ = positive(q_), positive(k_)
    expected = list(recurrence(q_, k_, v_, log_decays(name, g_), state_, 0.7, reverse))
    if normalize:
        denominator, last_keys = normalized(q_, k_, keys_, 0.7, reverse)
        expected = [expected[0] / denominator, expected[1], last_keys]
    used = [0, 1, 2, *([3] if takes(name, "g") else []), 4, *([5] if normalize else [])]
    agree([o, *last] if normalize else [o, last], expected, [leaves[at] for at in used], [exact[at] for at in used])
    o, last = getattr(ours, name)(positive(q), positive(k), v, **{**options, "output_final_state": False})
    assert last is None


@pytest.mark.parametrize(
    ("name", "reverse"), [(name, reverse) for name, reverse in DIRECTIONS if takes(name, "state_v_first")]
)
def test_state_layouts(name: str, reverse: bool) -> None:
    q, k, v, state = leaves = inputs("q", "k", "v", "state")
    run = functools.partial(getattr(ours, name), q, k, v, output_final_state=True)
    run = functools.partial(run, reverse=True) if reverse else run
    o, last = run(initial_state=state.transpose(-1, -2), state_v_first=True)
    assert last.shape == (B, H, V, K)
    agree([o, last.transpose(-1, -2)], [*run(initial_state=state)], leaves)


@given(
    name=st.sampled_from(TAKES_STATES),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3).filter(any),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    scale=st.none() | st.floats(0.1, 2) | st.floats(-2, -0.1),
    flags=st.fixed_dictionaries({"reverse": st.booleans(), "state_v_first": st.booleans(), "normalize": st.booleans()}),
    seed=st.integers(0, 1000),
)
def test_any_call_is_the_recurrence(
    name: str, lengths: list[int], dims: tuple[int, int, int], scale: float | None, flags: dict[str, bool], seed: int
) -> None:
    torch.manual_seed(seed)
    T, N, (H, K, V) = sum(lengths), len(lengths), dims
    q, k, v = torch.rand(1, T, H, K) + 0.1, torch.rand(1, T, H, K) + 0.1, torch.randn(1, T, H, V)
    g, state, keys = -torch.rand(1, T, H), torch.randn(N, H, K, V), torch.rand(N, 1, H, K)
    flags = {flag: value and takes(name, flag) for flag, value in flags.items()}
    options = {flag: value for flag, value in flags.items() if takes(name, flag)} | required(name)
    options |= {"g": g} if takes(name, "g") else {}
    first = state.transpose(-1, -2) if flags["state_v_first"] else state
    o, last = getattr(ours, name)(
        q, k, v, scale=scale, initial_state=(first, keys) if flags["normalize"] else first, output_final_state=True,
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)]), **options,
    )  # fmt: skip
    found = [o, *last] if flags["normalize"] else [o, last]

    scale = K**-0.5 if scale is None else scale
    parts = []
    for row, steps in enumerate(zip(*(t.double().split(lengths, 1) for t in (q, k, v, g)), strict=True)):
        q_, k_, v_, g_ = steps
        start, keys_ = state[[row]].double(), keys[[row]].double()
        if lengths[row] == 0:
            parts.append([v_, start, keys_])
            continue
        out, end = recurrence(q_, k_, v_, log_decays(name, g_), start, scale, flags["reverse"])
        denominator, keys_ = normalized(q_, k_, keys_, scale, flags["reverse"])
        parts.append([out / denominator if flags["normalize"] else out, end, keys_])
    out, end, sums = (torch.cat(results, int(at == 0)) for at, results in enumerate(zip(*parts, strict=True)))
    expected = [out, end.transpose(-1, -2) if flags["state_v_first"] else end, sums]
    for a, b in zip(found, expected[: len(found)], strict=True):
        assert a.shape == b.shape
        assert error(a, b) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", WITH_SCORES)
def test_parallel_functions_and_their_scores(name: str) -> None:
    leaves = inputs("q", "k", "v", "g")
    exact = [t.detach().double().requires_grad_() for t in leaves]
    gates = {"g": leaves[3]} if takes(name, "g") else {}
    o, none = getattr(ours, name)(*leaves[:3], scale=0.7, **gates)
    assert none is None
    same, scores = getattr(ours, name)(*leaves[:3], scale=0.7, output_attentions=True, **gates)
    assert torch.equal(o, same)
    b = log_decays(name, exact[3]).cumsum(1).transpose(1, 2)
    weights = torch.exp(b[..., :, None] - b[..., None, :])
    expected = (0.7 * torch.einsum("bthk,bshk->bhts", *exact[:2]) * weights).tril()
    used = [0, 1, 2, 3] if gates else [0, 1, 2]
    agree(
        [o, scores],
        [torch.einsum("bhts,bshv->bthv", expected, exact[2]), expected],
        [leaves[at] for at in used], [exact[at] for at in used],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^output_attentions: got True with cu_seqlens"):
        getattr(ours, name)(*(t[:1] for t in leaves[:3]), output_attentions=True, cu_seqlens=torch.tensor([0, T]))


def test_scores_are_the_packages() -> None:
    leaves = inputs("q", "k", "v", "g")
    naive = theirs("simple_gla.naive.naive_parallel_simple_gla")
    agree([*ours.parallel_simple_gla(*leaves, output_attentions=True)], [*naive(*leaves)], leaves)


def test_scores_of_closed_gates_and_of_shared_heads() -> None:
    q, k, v, g = (t.detach() for t in inputs("q", "k", "v", "g"))
    g[:, 20] = -torch.inf
    o, scores = ours.parallel_simple_gla(q[:, :, :1], k[:, :, :1], v, g, output_attentions=True)
    assert scores is not None
    assert not scores[:, :, 20:, :20].any()
    assert error(torch.einsum("bhts,bshv->bthv", scores, v), o) <= TOLERANCE[torch.float32]


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


@pytest.mark.parametrize("name", [name for name in WHERE if takes(name, "g_gamma")])
def test_constant_decays_and_none(name: str) -> None:
    run = getattr(ours, name)
    q, k, v, gamma = leaves = inputs("q", "k", "v", "g_gamma")
    naive = theirs("simple_gla.naive.naive_chunk_simple_gla")
    agree([run(q, k, v, g_gamma=gamma)[0]], [naive(q, k, v, gamma.expand(B, T, H))[0]], leaves)
    agree([run(q, k, v)[0]], [naive(q, k, v, q.new_zeros(B, T, H))[0]], [q, k, v])


def test_retention() -> None:
    leaves = inputs("q", "k", "v")
    naive = theirs("retention.naive.naive_retention")
    expected = naive(*(t.transpose(1, 2) for t in leaves)).transpose(1, 2)
    agree([ours.chunk_retention(*leaves)[0]], [expected], leaves)


def test_lightning_attention() -> None:
    """The decays of head h in layer l are those of the paper, exp(-8 h / H (1 - l / L))."""
    leaves = inputs("q", "k", "v")
    decay = torch.exp(torch.tensor([-8 * h / H * (1 - 3 / 12) for h in range(H)]))
    weights = decay[:, None, None] ** (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    q, k, v = leaves
    expected = torch.einsum("bihk,bjhk,hij,bjhv->bihv", q * K**-0.5, k, weights.tril(), v)
    agree([ours.chunk_lightning_attn(*leaves, layer_idx=3, num_layers=12)[0]], [expected], leaves)


def test_constant_decays_of_float64_are_not_rounded_to_float32() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 50, 3, 4, dtype=torch.float64) for _ in range(3))
    heads = torch.arange(3, dtype=torch.float64)
    for (o, _), g in (
        (ours.chunk_retention(q, k, v), torch.log1p(-torch.exp2(-5 - heads))),
        (ours.chunk_lightning_attn(q, k, v, layer_idx=1, num_layers=3), -8 / 3 * (1 - 1 / 3) * heads),
    ):
        expected, _ = ours.chunk_simple_gla(q, k, v, g_gamma=g)
        assert error(o, expected) <= 1e-14


def test_decays_of_a_number_of_heads_need_as_many_in_q_as_in_v() -> None:
    q, v = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 4, 4)
    for call in (
        ours.chunk_retention, ours.fused_chunk_retention, ours.fused_recurrent_retention, ours.parallel_retention,
        functools.partial(ours.chunk_lightning_attn, **LAYERS),
        functools.partial(ours.fused_recurrent_lightning_attn, **LAYERS),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^v: got shape \(1, 5, 4, 4\), expected \(B, T, 2, V\)"):
            call(q, q, v)


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attention(normalize: bool) -> None:
    leaves = inputs("q", "k", "v", "state", "keys")[: 5 if normalize else 4]
    q, k, v, *state = leaves
    positive = F.elu(q) + 1, F.elu(k) + 1, v  # sums of positive keys do not cancel
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
    """Return the tensors in a result: the output, and final states or scores if there are any."""
    found = [out[0], *(out[1] if isinstance(out[1], tuple) else out[1:])]
    return [t for t in found if t is not None]


@pytest.mark.parametrize(("name", "reverse"), DIRECTIONS)
def test_packed_sequences_are_sequences(name: str, reverse: bool) -> None:
    lengths, run, normalize = [11, 0, 30, 29], getattr(ours, name), takes(name, "normalize")
    q, k, v, g, state, keys = leaves = inputs("q", "k", "v", "g", "state", "keys", B=1, N=len(lengths))
    with_states = name in TAKES_STATES
    options = required(name) | ({"output_final_state": True} if with_states else {})
    options |= {"normalize": True} if normalize else {}
    options |= {"reverse": True} if reverse else {}
    q, k = q.exp(), k.exp()
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])

    def call(first: slice | list[int], steps: slice, **more: Any) -> list[Tensor]:
        given = [t[:, steps] for t in (q, k, v)]
        given += [g[:, steps]] if takes(name, "g") else []
        initial = (state[first], keys[first]) if normalize else state[first]
        return flat(run(*given, **options, **more, **({"initial_state": initial} if with_states else {})))

    packed = call(slice(None), slice(None), cu_seqlens=cu_seqlens)
    parts = []
    for row, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        if a < b:
            parts.append(call([row], slice(a, b)))
        elif with_states:
            parts.append([v[:, :0], state[[row]], *([keys[[row]]] if normalize else [])])
    apart = [torch.cat(results, int(at == 0)) for at, results in enumerate(zip(*parts, strict=True))]
    states = ([state, keys] if normalize else [state]) if with_states else []
    agree(packed, apart, [*leaves[: 4 if takes(name, "g") else 3], *states])


@pytest.mark.parametrize("packed", [False, True])
def test_reverse_is_the_flipped_sequence(packed: bool) -> None:
    options: dict[str, Any] = {"output_final_state": True}
    rows, spans = B, [slice(0, T)]
    if packed:
        rows, spans = 1, [slice(0, 11), slice(11, T)]
        options["cu_seqlens"] = torch.tensor([0, 11, T])
    *leaves, state = inputs("q", "k", "v", "g", "state", B=rows, N=2)
    found = ours.fused_recurrent_simple_gla(*leaves, initial_state=state, reverse=True, **options)
    flipped = [torch.cat([t[:, span].flip(1) for span in spans], 1) for t in leaves]
    o, last = ours.fused_recurrent_simple_gla(*flipped, initial_state=state, **options)
    agree([*found], [torch.cat([o[:, span].flip(1) for span in spans], 1), last], [*leaves, state])


def test_a_step() -> None:
    """A decoding step is computed by another operator than a sequence."""
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


@pytest.mark.parametrize("name", ["simple_gla", "linear_attn", "gla", "delta_rule", "gated_delta_rule", "kda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_after_a_step_have_the_dtype_of_those_after_sequences(name: str, dtype: torch.dtype) -> None:
    q, k, v, g, state = (t.detach().to(dtype) for t in inputs("q", "k", "v", "g", "state"))
    gates = {
        "simple_gla": {"g": g}, "gla": {"gk": g[..., None].expand(q.shape)}, "gated_delta_rule": {"g": g},
        "kda": {"g": g[..., None].expand(q.shape), "beta": g.exp()},
    }.get(name, {})  # fmt: skip
    run = getattr(ours, f"fused_recurrent_{name}")
    now = {n: t[:, :1] for n, t in {"q": q, "k": k, "v": v, **gates}.items()}
    _, last = run(**now, initial_state=state, output_final_state=True)
    with torch.no_grad():
        _, found = run(**now, initial_state=state, output_final_state=True)
    assert found.dtype == last.dtype == torch.float32
    assert error(found, last) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    q, k, v, g = (t.detach().to(device, dtype) for t in inputs("q", "k", "v", "g"))
    q, k = q.abs(), k.abs()
    for run, tensors in ((ours.chunk_simple_gla, (q, k, v, g)), (ours.chunk_linear_attn, (q, k, v))):
        o, _ = run(*tensors)
        exact, _ = run(*(t.double() for t in tensors))
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
    with pytest.raises(TypeError, match=r"^initial_state: got a tuple of 3"):
        ours.chunk_linear_attn(q, k, v, initial_state=(state, keys, keys))
    with pytest.raises(TypeError, match=r"^initial_state: got list"):
        ours.chunk_linear_attn(q, k, v, initial_state=[state, keys])


@pytest.mark.parametrize("name", ["chunk_lightning_attn", "fused_recurrent_lightning_attn"])
def test_layers_that_do_not_exist(name: str) -> None:
    q, k, v = (t.detach() for t in inputs("q", "k", "v"))
    for layer, layers, argument in ((0, 0, "num_layers"), (0, -3, "num_layers"), (-1, 4, "layer_idx"),
                                    (4, 4, "layer_idx")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{argument}: got -?\d, expected"):
            getattr(ours, name)(q, k, v, layer, layers)
    for layer, layers, argument in ((0.0, 4, "layer_idx"), (0, 4.0, "num_layers"), (True, 4, "layer_idx")):
        with pytest.raises(TypeError, match=rf"^{argument}: got (float|bool), expected an int"):
            getattr(ours, name)(q, k, v, layer, layers)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_no_argument_is_swallowed(name: str) -> None:
    q, k, v = (t.detach() for t in inputs("q", "k", "v"))
    run, options = getattr(ours, name), required(name)
    expected = run(q, k, v, **options)[0]
    assert torch.equal(run(q, k, v, **options, chunk_size=32, head_first=False)[0], expected)
    for unknown in ("head_frist", "offsets", *(["transpose_state_layout"] if name not in RENAMED else [])):
        with pytest.raises(TypeError, match=rf"^{unknown}: got an argument that {name} does not take, .* q, k, v,"):
            run(q, k, v, **options, **{unknown: True})
    with pytest.raises(ValueError, match=r"^head_first: got True"):
        run(q, k, v, **options, head_first=True)
    for size in (48, 0, -64, 64.0):
        with pytest.raises(ValueError, match=r"^chunk_size: got .*, expected a power of 2"):
            run(q, k, v, **options, chunk_size=size)


FLAGS = ("output_final_state", "reverse", "state_v_first", "normalize", "output_attentions")


@pytest.mark.parametrize(("name", "flag"), [(name, flag) for name in WHERE for flag in FLAGS if takes(name, flag)])
def test_flags_are_flags(name: str, flag: str) -> None:
    q, k, v = (t.detach().abs() for t in inputs("q", "k", "v"))
    run = functools.partial(getattr(ours, name), q, k, v, **required(name))
    for wrong in ("False", 2, [True], torch.ones(2)):
        with pytest.raises(TypeError, match=rf"^{flag}: got .*, expected True or False"):
            run(**{flag: wrong})
    for same in (None, 0, torch.tensor(0).bool().item()):
        assert torch.equal(run(**{flag: same})[0], run(**{flag: False})[0])


@pytest.mark.parametrize("name", RENAMED)
def test_the_deprecated_name_of_the_state_layout(name: str) -> None:
    q, k, v, state = (t.detach() for t in inputs("q", "k", "v", "state"))
    run = getattr(ours, name)
    options = {"initial_state": state.transpose(-1, -2), "output_final_state": True}
    o, last = run(q, k, v, state_v_first=True, **options)
    with pytest.warns(DeprecationWarning, match=r"^transpose_state_layout .* state_v_first") as caught:
        renamed, state = run(q, k, v, transpose_state_layout=True, **options)
    assert caught[0].filename == __file__
    assert torch.equal(o, renamed)
    assert torch.equal(last, state)
    with pytest.warns(DeprecationWarning, match=r"^transpose_state_layout"):
        assert run(q, k, v, transpose_state_layout=False, output_final_state=True)[1].shape == (B, H, K, V)
    with pytest.raises(ValueError, match=r"^transpose_state_layout: got it beside state_v_first"):
        run(q, k, v, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize(
    ("name", "options"),
    {
        "fused_recurrent_simple_gla": {"transpose_state_layout": True, "reverse": True, "output_final_state": True},
        "chunk_lightning_attn": {**LAYERS, "chunk_size": 32},
        "fused_recurrent_linear_attn": {"normalize": True},
        "parallel_retention": {"output_attentions": True},
    }.items(),
)
def test_compiles_whole(name: str, options: dict[str, Any]) -> None:
    q, k, v = leaves = inputs("q", "k", "v")
    positive, run = (q.exp(), k.exp(), v), getattr(ours, name)  # denominators are sums of positive numbers
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        agree(flat(compiled(*positive, **options)), flat(run(*positive, **options)), leaves)


@pytest.mark.parametrize("name", WHERE)
def test_without_numbers(name: str) -> None:
    """Forward and backward run on meta tensors and on fake tensors."""
    tensors, run = inputs("q", "k", "v"), functools.partial(getattr(ours, name), **required(name))
    given = [t.detach().to("meta").requires_grad_() for t in tensors]
    o = run(*given)[0]
    torch.autograd.grad(o.sum(), given)
    assert (o.device.type, o.shape) == ("meta", tensors[2].shape)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(t) for t in tensors]
        o = run(*given)[0]
        torch.autograd.grad(o.sum(), given)
    assert o.shape == tensors[2].shape


def test_malformed_inputs_of_a_reversed_scan() -> None:
    q, k, v, g, state = (t.detach() for t in inputs("q", "k", "v", "g", "state"))
    run = ours.fused_recurrent_simple_gla
    for argument, case in {
        "q": (q[0], k, v, g, None, None), "k": (q, k[0], v, g, None, None), "v": (q, k, v[0], g, None, None),
        "cu_seqlens": (q[:1], k[:1], v[:1], g[:1], torch.tensor([0, 5]), None),
        "initial_state": (q, k, v, g, None, state[1:]),
    }.items():  # fmt: skip
        *tensors, cu_seqlens, initial = case
        with pytest.raises(ValueError, match=rf"^{argument}: g"):
            run(*tensors, initial_state=initial, reverse=True, cu_seqlens=cu_seqlens)
    for reverse in (False, True):
        with pytest.raises(TypeError, match=r"^cu_seqlens: got list"):
            run(*(t[:1] for t in (q, k, v, g)), initial_state=state[:1], reverse=reverse, cu_seqlens=[0, T])
