"""MLSTMStack equals its equations, sequence by sequence and step by step, in every layout that torch.nn.LSTM takes."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence, unpack_sequence

import tfla
from tfla.nn import MLSTMStack, reverse_sequences
from tfla.nn.sequences import Sequences
from tfla.nn.stack import StackLayer

INPUT, HIDDEN, HEADS = 5, 8, 2
Close = Callable[[Tensor, Tensor], None]
Pair = tuple[Tensor, Tensor | None]  # the true state of one sequence: C (heads, dqk, dhv) and n (heads, dqk)


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> MLSTMStack:
    torch.manual_seed(seed)
    stack = MLSTMStack(INPUT, HIDDEN, num_heads=HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for p in stack.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return stack


def by_steps(layer: StackLayer, x: Tensor, starts: list[bool], state: Pair | None) -> tuple[Tensor, Pair]:
    """Return the outputs of one sequence x (T, features) in one direction, by the equations without stabilization."""
    w, heads, exponential = dict(layer.named_parameters()), layer.num_heads, layer.input_gate_kind == "exp"

    def project(name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    q, k, v = (project(f"{name}_proj").unflatten(-1, (heads, -1)) for name in "qkv")
    i, f = (15 * torch.tanh(project(f"{name}_gate") / 15) for name in ("input", "forget"))
    write, forget = i.exp() if exponential else i.sigmoid(), f.sigmoid()
    C, n = x.new_zeros(heads, q.shape[-1], v.shape[-1]), x.new_zeros(heads, q.shape[-1])
    if state is not None:
        C, n = state[0], n if state[1] is None else state[1]
    outputs = []
    for t in range(len(x)):
        keep = torch.zeros_like(forget[t]) if starts[t] else forget[t]
        C = keep[:, None, None] * C + write[t][:, None, None] * k[t][:, :, None] * v[t][:, None, :]
        n = keep[:, None] * n + write[t][:, None] * k[t]
        query = q[t] / math.sqrt(q.shape[-1])
        h = (query[:, :, None] * C).sum(1)
        if exponential:
            h = h / (query * n).sum(-1).abs().clamp(min=1.0)[:, None]
        outputs.append(nn.functional.layer_norm(h, h.shape[-1:], eps=1e-6).flatten())
    gate = torch.sigmoid(project("output_gate"))
    y = torch.stack(outputs) if outputs else x.new_zeros(0, HIDDEN)
    return gate * w["head_norm.weight"] * y, (C, n if exponential else None)


def truth(stack: MLSTMStack, x: Tensor, starts: list[bool], states: list[Pair] | None) -> tuple[Tensor, list[Pair]]:
    """Return the outputs of one sequence x (T, features) of all layers, and the last state of each direction."""
    found: list[Pair] = []
    backward_starts = [False, *starts[:0:-1]]  # a step is a start in reverse if the one after it starts forward
    for _ in range(stack.num_layers):
        outputs = []
        for backward in (False, True)[: 1 + stack.bidirectional]:
            layer, state = stack.layers[len(found)], None if states is None else states[len(found)]
            assert isinstance(layer, StackLayer)
            y, last = by_steps(layer, x.flip(0) if backward else x, backward_starts if backward else starts, state)
            outputs.append(y.flip(0) if backward else y)
            found.append(last)
        x = torch.cat(outputs, -1)
    return x, found


def unstabilized(state: tfla.State) -> tuple[Tensor, Tensor | None]:
    """Return the true C and n of a state, exp(m) C and exp(m) n."""
    if state.n is None or state.m is None:
        return state.C, None
    scale = state.m.exp()
    return scale[..., None, None] * state.C, scale[..., None] * state.n


@dataclass
class Layout:
    """How sequences are handed to the module and taken out of what it returns."""

    batch_first: bool
    enter: Callable[[list[Tensor]], tuple[Any, dict[str, Any]]]
    leave: Callable[[Any, list[int]], list[Tensor]]


def padded(batch_first: bool) -> Layout:
    def enter(xs: list[Tensor]) -> tuple[Any, dict[str, Any]]:
        x = pad_sequence(xs, batch_first, padding_value=math.nan if xs[0].is_floating_point() else 1)
        return x, {"lengths": torch.tensor([len(x) for x in xs], device=x.device)}

    def leave(y: Tensor, lengths: list[int]) -> list[Tensor]:
        rows = y.unbind(0 if batch_first else 1)
        assert not any(row[n:].any() for row, n in zip(rows, lengths, strict=True))
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]

    return Layout(batch_first, enter, leave)


def packed(enforce_sorted: bool) -> Layout:
    return Layout(False, lambda xs: (pack_sequence(xs, enforce_sorted), {}), lambda y, lengths: unpack_sequence(y))


LAYOUTS = {
    "batch first": padded(True),
    "time first": padded(False),
    "packed": packed(False),
    "packed sorted": packed(True),
}


def solve(
    stack: MLSTMStack, layout: Layout, xs: list[Tensor], starts: list[Tensor] | None, states: list[tfla.State] | None
) -> tuple[list[Tensor], tuple[tfla.State, ...]]:
    """Run the module on sequences in a layout, and return the outputs of each."""
    x, options = layout.enter(xs)
    if starts is not None:
        given = layout.enter(starts)[0]
        options["document_start"] = given.data if isinstance(given, PackedSequence) else given
    y, new = stack(x, None if states is None else tuple(states), **options)
    assert type(y) is type(x)
    return layout.leave(y, [len(x) for x in xs]), new


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    input_gate=st.sampled_from(["exp", "sigmoid"]),
    starts=st.booleans(),
    carried=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_equals_its_equations(
    layout: str, lengths: list[int], starts: bool, carried: bool, seed: int, **options: Any
) -> None:
    """Outputs, final states and gradients of all parameters and inputs, with resets and initial states."""
    lengths = sorted(lengths, reverse=True) if layout == "packed sorted" else lengths
    stack = build(seed, batch_first=LAYOUTS[layout].batch_first, **options)
    xs = [torch.randn(n, INPUT, dtype=torch.float64, requires_grad=True) for n in lengths]
    resets = [torch.rand(n) < 0.3 for n in lengths] if starts else None
    states = None
    if carried:
        states = [tfla.State(*(None if t is None else torch.randn_like(t) for t in s))
                  for s in stack.initial_state(len(lengths))]  # fmt: skip
    expected, last = [], []
    for row, x in enumerate(xs):
        own = None if states is None else [
            (C[row], None if n is None else n[row]) for C, n in map(unstabilized, states)
        ]  # fmt: skip
        y, final = truth(stack, x, [False] * len(x) if resets is None else resets[row].tolist(), own)
        expected.append(y)
        last.append(final)
    outputs, new = solve(stack, LAYOUTS[layout], xs, resets, states)
    cotangents = [torch.randn_like(y) for y in expected]

    def gradients(ys: list[Tensor]) -> tuple[Tensor, ...]:
        loss = torch.stack([(y * d).sum() for y, d in zip(ys, cotangents, strict=True)]).sum()
        return torch.autograd.grad(loss, [*xs, *stack.parameters()], allow_unused=True, materialize_grads=True)

    found, wanted = [*outputs, *gradients(outputs)], [*expected, *gradients(expected)]
    for index, state in enumerate(new):
        C, n = unstabilized(state)
        found.append(C)
        wanted.append(torch.stack([final[index][0] for final in last]))
        if n is not None:
            found.append(n)
            wanted.append(torch.stack([final[index][1] for final in last]))  # type: ignore[misc]
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= 1e-9 * b.norm() + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("layout", ["batch first", "packed"])
def test_every_device_computes_what_the_cpu_does_in_float64(
    device: str, layout: str, input_gate: Any, dtype: torch.dtype
) -> None:
    """Outputs, last states and gradients, from initial states; all kernels of GPUs take these heads.

    Without a state a first step is the norm of a multiple of v, whose sign depends on rounding.
    """
    torch.manual_seed(0)
    options = {"batch_first": LAYOUTS[layout].batch_first, "bidirectional": True, "num_heads": 2, "qk_factor": 1.0}
    model = MLSTMStack(24, 128, 2, input_gate=input_gate, dtype=dtype, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    lengths = [33, 1, 90, 64]
    xs, cotangents = ([torch.randn(n, width).to(dtype) for n in lengths] for width in (24, 256))
    states = [tfla.State(*(None if t is None else torch.randn_like(t) for t in s)) for s in model.initial_state(4)]

    def results(stack: MLSTMStack, place: torch.device | str, wide: torch.dtype | None = None) -> dict[str, Tensor]:
        inputs = [x.to(place, wide).requires_grad_() for x in xs]
        given = [tfla.State(*(None if t is None else t.to(place, wide) for t in s)) for s in states]
        ys, new = solve(stack, LAYOUTS[layout], inputs, None, given)
        loss = torch.stack([(y * d.to(y)).sum() for y, d in zip(ys, cotangents, strict=True)]).sum()
        # The gradient of a gate's bias, a number for each head, nearly cancels; it counts beside that of the weight.
        parts = {name: list(m.parameters(recurse=False)) for name, m in stack.named_modules()}
        leaves = {name: own for name, own in {**parts, "x": inputs}.items() if own}
        loss.backward()
        found = {name: torch.cat([t.grad.flatten() for t in own]) for name, own in leaves.items()}
        for n, state in enumerate(new):
            assert state.C.device.type == torch.device(place).type
            found |= {f"{n} {name}": t for name, t in zip("Cn", unstabilized(state), strict=True) if t is not None}
        return {"y": torch.cat(ys), **found}

    expected = results(copy.deepcopy(model).double(), "cpu", torch.float64)
    found = results(model.to(device), device)
    errors = {name: error(found[name].cpu(), x) for name, x in expected.items()}
    assert max(errors.values()) <= 5 * TOLERANCE[dtype], sorted(errors.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_sequence_without_a_batch(bidirectional: bool, close: Close) -> None:
    stack = build(bidirectional=bidirectional, num_layers=2)
    x, starts = torch.randn(7, INPUT, dtype=torch.float64), torch.tensor([0, 0, 1, 0, 0, 1, 0], dtype=torch.bool)
    y, state = stack(x, document_start=starts)
    wanted, wanted_state = stack(x[:, None], document_start=starts[:, None])
    close(y, wanted[:, 0])
    again, _ = stack(x, state)
    close(again, stack(x[:, None], wanted_state)[0][:, 0])
    assert not torch.equal(again, y)


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("parts", [[4, 1, 6], [1] * 11])
def test_streaming_equals_one_pass(parts: list[int], input_gate: Any, close: Close) -> None:
    stack = build(num_layers=3, input_gate=input_gate)
    x = torch.randn(11, 2, INPUT, dtype=torch.float64)
    starts = torch.zeros(11, 2, dtype=torch.bool)
    starts[[5, 8], [0, 1]] = True
    expected, last = stack(x, document_start=starts)
    for state in (None, stack.initial_state(2)):
        outputs = []
        for part, start in zip(x.split(parts), starts.split(parts), strict=True):
            y, state = stack(part, state, document_start=start)
            outputs.append(y)
        close(torch.cat(outputs), expected)
        assert state is not None
        for a, b in zip(state, last, strict=True):
            close(unstabilized(a)[0], unstabilized(b)[0])


def test_streaming_of_packed_sequences(close: Close) -> None:
    """The state's rows are in the order before the sequences were sorted, so that they may be packed in another way."""
    stack = build(num_layers=2)
    xs = [torch.randn(n, INPUT, dtype=torch.float64) for n in (6, 9, 7)]
    whole = unpack_sequence(stack(pack_sequence(xs, enforce_sorted=False))[0])
    y, state = stack(pack_sequence([x[:n] for x, n in zip(xs, (3, 2, 5), strict=True)], enforce_sorted=False))
    first = unpack_sequence(y)
    rest = [x[n:] for x, n in zip(xs, (3, 2, 5), strict=True)]
    second = unpack_sequence(stack(pack_sequence(rest, enforce_sorted=False), state)[0])
    for a, b, expected in zip(first, second, whole, strict=True):
        close(torch.cat([a, b]), expected)


def test_gradients_pass_through_the_state(close: Close) -> None:
    stack = build(num_layers=2)
    x = torch.randn(8, 2, INPUT, dtype=torch.float64)
    whole = torch.autograd.grad(stack(x)[0][-1].square().sum(), list(stack.parameters()))
    _, state = stack(x[:5])
    parts = torch.autograd.grad(stack(x[5:], state)[0][-1].square().sum(), list(stack.parameters()))
    for a, b in zip(parts, whole, strict=True):
        close(a, b)


@pytest.mark.parametrize("kind", ["batch", "single", "packed", "packed sorted"])
@pytest.mark.parametrize(("bidirectional", "batch_first"), [*itertools.product([False, True], repeat=2)])
def test_outputs_have_the_shapes_of_lstm(kind: str, bidirectional: bool, batch_first: bool) -> None:
    options: Any = {"num_layers": 2, "batch_first": batch_first, "bidirectional": bidirectional}
    lstm, stack = nn.LSTM(INPUT, HIDDEN, **options), MLSTMStack(INPUT, HIDDEN, **options)
    x: Any = {
        "batch": torch.randn(3, 6, INPUT),
        "single": torch.randn(6, INPUT),
        "packed": pack_sequence([torch.randn(n, INPUT) for n in (2, 6, 4)], enforce_sorted=False),
        "packed sorted": pack_sequence([torch.randn(n, INPUT) for n in (6, 4, 2)]),
    }[kind]
    expected, (h, _) = lstm(x)
    y, state = stack(x)
    assert type(y) is type(expected)
    assert len(state) == len(h)
    if isinstance(y, PackedSequence):
        for a, b in zip(y[1:], expected[1:], strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        y, expected = y.data, expected.data
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    assert y.is_contiguous()


def test_arguments_of_lstm() -> None:
    names = list(inspect.signature(MLSTMStack).parameters)
    wanted = list(inspect.signature(nn.RNNBase).parameters)  # nn.LSTM has these but for the mode
    assert ["mode", *names[:8]] == wanted[:9]
    assert {"device", "dtype"} <= {*names}
    assert list(inspect.signature(MLSTMStack.forward).parameters)[:3] == list(
        inspect.signature(nn.LSTM.forward).parameters
    )
    stack = MLSTMStack(INPUT, HIDDEN, proj_size=0)
    stack.flatten_parameters()
    x = torch.randn(3, 2, INPUT)
    assert torch.equal(stack(x, hx=stack.initial_state(2))[0], stack(x)[0])


def test_bias() -> None:
    names = {name for name, _ in MLSTMStack(INPUT, HIDDEN, bias=False).named_parameters() if name.endswith("bias")}
    assert names == {"layers.0.input_gate.bias", "layers.0.forget_gate.bias"}
    assert sum(name.endswith("bias") for name, _ in MLSTMStack(INPUT, HIDDEN).named_parameters()) == 6


def test_dropout_is_between_layers(close: Close) -> None:
    stack = build(num_layers=2, dropout=1.0)
    x = torch.randn(6, 2, INPUT, dtype=torch.float64)
    trained = stack(x)[0]
    assert torch.equal(trained, stack(torch.randn_like(x))[0])  # the last layer reads zeros
    assert trained.any()
    whole = stack.eval()(x)[0]
    assert not torch.equal(whole, trained)
    assert torch.equal(whole, stack(x)[0])
    assert build(num_layers=1, dropout=1.0)(x)[0].any()


def test_parameters_are_made_and_drawn_again() -> None:
    torch.manual_seed(3)
    stack = MLSTMStack(INPUT, HIDDEN, 2, bidirectional=True, dtype=torch.bfloat16)
    assert {p.dtype for p in stack.parameters()} == {torch.bfloat16}
    saved = {name: t.clone() for name, t in stack.state_dict().items()}
    with torch.no_grad():
        for p in stack.parameters():
            p.fill_(7.0)
    torch.manual_seed(3)
    stack.reset_parameters()
    assert all(torch.equal(t, saved[name]) for name, t in stack.state_dict().items())
    meta = MLSTMStack(INPUT, HIDDEN, 2, bidirectional=True, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta for p in meta.parameters())
    made = meta.to_empty(device="cpu")
    torch.manual_seed(3)
    made.reset_parameters()
    assert all(torch.equal(t, saved[name]) for name, t in made.state_dict().items())


def test_state_dict_round_trip(close: Close) -> None:
    stack, other = build(0, num_layers=2, bidirectional=True), build(1, num_layers=2, bidirectional=True)
    x = torch.randn(6, 2, INPUT, dtype=torch.float64)
    assert not torch.equal(stack(x)[0], other(x)[0])
    other.load_state_dict(stack.state_dict())
    assert torch.equal(stack(x)[0], other(x)[0])


@pytest.mark.parametrize(("num_layers", "bidirectional"), [(2, False), (1, True)])
def test_compiled(num_layers: int, bidirectional: bool) -> None:
    stack = build(dtype=torch.float32, num_layers=num_layers, bidirectional=bidirectional)
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    x, lengths = torch.randn(9, 2, INPUT), torch.tensor([9, 4])
    for options in ({}, {"lengths": lengths}):
        grads = []
        for module in (stack, compiled):
            y, state = module(x, **options)
            y, _ = module(x, state, **options)
            grads.append([y, *torch.autograd.grad(y.square().sum(), list(stack.parameters()))])
        for a, b in zip(*grads, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_compiled_with_packed_sequences() -> None:
    stack = build(dtype=torch.float32, bidirectional=True)
    packed = pack_sequence([torch.randn(n, INPUT) for n in (4, 6)], enforce_sorted=False)
    y, _ = torch.compile(stack, backend="aot_eager")(packed)
    assert isinstance(y, PackedSequence)
    expected = stack(packed)[0].data
    assert (y.data - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    stack = build(num_layers=2, bidirectional=True)
    x = torch.randn(40, 2, INPUT, dtype=torch.float64)
    expected, _ = stack(x)
    found, state = stack.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    assert state[0].C.dtype == torch.float32
    assert (found - expected).norm() <= {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype] * expected.norm()


def test_autocast() -> None:
    stack = build(dtype=torch.float32)
    x = torch.randn(20, 2, INPUT)
    with torch.autocast("cpu", torch.bfloat16):
        found = stack(x)[0]
    assert found.dtype == torch.bfloat16
    assert (found - stack(x)[0]).norm() <= 3e-2 * found.norm()


def test_initial_state_is_the_start() -> None:
    for input_gate in ("exp", "sigmoid"):
        stack = build(num_layers=2, bidirectional=True, input_gate=input_gate, dtype=torch.float32)
        x = torch.randn(5, 3, INPUT)
        state = stack.initial_state(3)
        assert len(state) == 4
        assert torch.equal(stack(x, state)[0], stack(x)[0])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_sequences_do_not_depend_on_others(bidirectional: bool) -> None:
    stack = build(bidirectional=bidirectional)
    x = torch.randn(6, 2, INPUT, dtype=torch.float64)
    starts = torch.zeros(6, 2, dtype=torch.bool)
    starts[3] = True
    y, _ = stack(x, document_start=starts)
    changed = x.clone()
    changed[:3] += 1
    again, _ = stack(changed, document_start=starts)
    assert torch.equal(y[3:], again[3:])
    assert not torch.equal(y[:3], again[:3])


CUTS = [((2, 7, 3), {"lengths": [3, 7]}, [[2, 1, 0, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0]]),
        ((2, 4), {}, [[3, 2, 1, 0]] * 2),
        ((1, 7, 2, 2), {"cu_seqlens": [0, 3, 3, 7]}, [[2, 1, 0, 6, 5, 4, 3]]),
        ((2, 3), {"lengths": [0, 1]}, [[0, 1, 2]] * 2),
        ((1, 5), {"cu_seqlens": [1, 4, 4]}, [[0, 3, 2, 1, 4]])]  # fmt: skip


@pytest.mark.parametrize(("shape", "options", "index"), CUTS)
def test_reverse_sequences(shape: tuple[int, ...], options: dict[str, list[int]], index: list[list[int]]) -> None:
    x = torch.randn(shape)
    for dtype in (torch.int32, torch.int64):
        given = {name: torch.tensor(value, dtype=dtype) for name, value in options.items()}
        found = reverse_sequences(x, **given)
        assert torch.equal(found, torch.stack([row[order] for row, order in zip(x, index, strict=True)]))
        assert torch.equal(reverse_sequences(found, **given), x)


@settings(max_examples=50, deadline=None)
@given(T=st.integers(1, 6), values=st.lists(st.integers(-9, 9), min_size=2, max_size=5))
def test_the_reverse_reads_no_step_outside(T: int, values: list[int]) -> None:
    """On a GPU, where values are not checked, no index leaves x: values count as the nearest ones that are allowed."""
    given, inside = torch.tensor(values), torch.tensor(values).clamp(0, T)
    x = torch.randn(len(values), T, 2)
    assert torch.equal(Sequences(lengths=given).reverse(x), reverse_sequences(x, lengths=inside))
    found = Sequences(cu_seqlens=given).reverse(x[:1])
    assert found.shape == (1, T, 2)
    if inside.tolist() == sorted(inside.tolist()):
        assert torch.equal(found, reverse_sequences(x[:1], cu_seqlens=inside))


ROW = torch.zeros(1, 3)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        ("x: got int", {"x": 3}),
        (r"x: got shape \(3,\)", {"x": torch.zeros(3)}),
        ("lengths, cu_seqlens: got both", {"lengths": torch.tensor([2]), "cu_seqlens": torch.tensor([0, 2])}),
        ("lengths: got from 1 to 4, expected from 0 to 3", {"lengths": torch.tensor([1, 4])}),
        (r"lengths: got shape \(1,\), expected \(2,\)", {"lengths": torch.tensor([1])}),
        ("lengths: got a tensor of torch.float32", {"lengths": torch.ones(2)}),
        (r"lengths: got shape \(2, 1\)", {"lengths": torch.ones(2, 1, dtype=torch.int64)}),
        ("cu_seqlens: got it with 2 rows", {"cu_seqlens": torch.tensor([0, 3])}),
        ("lengths: got device meta, expected that", {"lengths": torch.tensor([3, 3], device="meta")}),
        ("cu_seqlens: got device meta, expected that", {"x": ROW, "cu_seqlens": torch.tensor([0, 3], device="meta")}),
        ("cu_seqlens: got 1 offsets", {"x": torch.zeros(1, 3), "cu_seqlens": torch.tensor([0])}),
        ("cu_seqlens: got from 0 to 4, expected from 0 to 3", {"x": ROW, "cu_seqlens": torch.tensor([0, 4])}),
        ("cu_seqlens: got from -1 to 3, expected from 0 to 3", {"x": ROW, "cu_seqlens": torch.tensor([-1, 3])}),
        (r"cu_seqlens: got \[0, 3, 2\], expected values that never", {"x": ROW, "cu_seqlens": torch.tensor([0, 3, 2])}),
    ],
)
def test_reverse_sequences_refuses(error: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        reverse_sequences(**{"x": torch.zeros(2, 3)} | arguments)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        ("input_size: got 0", {"input_size": 0}),
        ("num_layers: got float", {"num_layers": 2.0}),
        ("num_heads: got 3, expected a divisor of hidden_size, 8", {"num_heads": 3}),
        ("dropout: got 1.5, expected from 0 to 1", {"dropout": 1.5}),
        ("bidirectional: got int, expected a bool", {"bidirectional": 1}),
        ("proj_size: got 4, expected 0", {"proj_size": 4}),
        ("proj_size: got True, expected 0", {"proj_size": True}),
        ("proj_size: got 0.0, expected 0", {"proj_size": 0.0}),
        ("qk_factor: got 0", {"qk_factor": 0}),
        ("input_gate: got 'tanh'", {"input_gate": "tanh"}),
        ("forget_gate_bias: got 3.0, expected two numbers", {"forget_gate_bias": 3.0}),
        ("forget_gate_bias: got str, expected a number", {"forget_gate_bias": (1.0, "x")}),
        ("forget_gate_bias: got inf, expected a finite number", {"forget_gate_bias": (1.0, math.inf)}),
        ("input_gate_bias: got str, expected a number", {"input_gate_bias": "x"}),
        ("device: got 'gpu', expected 'cpu'", {"device": "gpu"}),
        ("dtype: got torch.int32, expected one of", {"dtype": torch.int32}),
        ("dtype: got torch.complex64, expected one of", {"dtype": torch.complex64}),
    ],
)
def test_constructor_refuses(error: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        MLSTMStack(**{"input_size": INPUT, "hidden_size": HIDDEN} | arguments)


STATE_OF = MLSTMStack(INPUT, HIDDEN, 2).initial_state
PACKED = pack_sequence([torch.zeros(n, INPUT) for n in (4, 2)])


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        ("input: got list", {"input": [1]}),
        ("input: got dtype torch.float64, expected that of the", {"input": torch.zeros(4, 2, INPUT).double()}),
        ("input: got device meta, expected that of the", {"input": torch.zeros(4, 2, INPUT, device="meta")}),
        (r"input: got shape \(4, 2, 6\), expected \(T, B, 5\) or \(T, 5\)", {"input": torch.zeros(4, 2, 6)}),
        ("hx: got Tensor", {"hx": torch.zeros(2)}),
        (
            "hx: got 1 entries, expected 2, one for each layer and direction",
            {"hx": (tfla.State(torch.zeros(1)),)},
        ),
        (r"input: got shape \(0, 2, 5\), expected .*, all from 1", {"input": torch.zeros(0, 2, INPUT)}),
        (r"input: got shape \(4, 0, 5\), expected .*, all from 1", {"input": torch.zeros(4, 0, INPUT)}),
        (r"input: got shape \(0, 5\), expected .*, all from 1", {"input": torch.zeros(0, INPUT)}),
        (r"hx\[0\].C: got shape \(7, 4, 1, 2\), expected \(2, 4, 1, 2\)", {"hx": STATE_OF(7)}),
        (
            r"hx\[0\].C: got shape \(2, 4, 1, 2\), expected \(1,",
            {"input": torch.zeros(4, INPUT), "hx": STATE_OF(2)},
        ),
        (r"hx\[0\].C: got shape \(3, 4, 1, 2\), expected \(2,", {"input": PACKED, "hx": STATE_OF(3)}),
        (r"hx\[1\].C: got shape \(7,", {"hx": (STATE_OF(2)[0], STATE_OF(7)[1])}),
        (r"hx\[0\].C: got device meta, expected that of input, cpu", {"hx": STATE_OF(2, "meta")}),
        (r"hx\[1\].n: got NoneType, expected a float", {"hx": (STATE_OF(2)[0], tfla.State(STATE_OF(2)[0].C))}),
        (
            "document_start: got device meta, expected that of input, cpu",
            {"document_start": torch.zeros(4, 2, dtype=torch.bool, device="meta")},
        ),
        ("lengths: got a tensor, expected None", {"input": torch.zeros(4, INPUT), "lengths": torch.tensor([4])}),
        (r"lengths: got shape \(4,\), expected \(2,\)", {"lengths": torch.tensor([4] * 4)}),
        ("lengths: got device meta, expected that of the input", {"lengths": torch.tensor([4, 2], device="meta")}),
        ("document_start: got a tensor of torch.float32", {"document_start": torch.zeros(4, 2)}),
        (r"document_start: got shape \(2, 4\), expected \(4, 2\)", {"document_start": torch.zeros(2, 4).bool()}),
    ],
)
def test_call_refuses(error: str, arguments: dict[str, Any]) -> None:
    stack = MLSTMStack(INPUT, HIDDEN, 2)
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        stack(**{"input": torch.zeros(4, 2, INPUT)} | arguments)
