"""Attention with windows, sinks, grouped heads, documents and caches equals softmax with a dense mask, in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tfla.nn import Attention, KeyValues, ModelConfig
from tfla.nn.mixers.attend import attend, attend_alone

WIDTH, HEADS, ROWS = 16, 4, 2
OPTIONS = st.fixed_dictionaries(
    {
        "num_kv_heads": st.sampled_from([1, 2, 4]),
        "window": st.none() | st.integers(1, 12) | st.sampled_from([100, 256, 300]),
        "attention_sinks": st.booleans(),
        "rope_base": st.sampled_from([10.0, 10_000.0]),
    }
)
LENGTHS = st.integers(1, 40) | st.sampled_from([256, 257, 300, 530])  # blocks of queries have 256


def build(options: dict[str, Any], seed: int) -> Attention:
    torch.manual_seed(seed)
    config = ModelConfig(d_model=WIDTH, num_blocks=1, num_heads=HEADS, mixer="attention", vocab_size=1, **options)
    layer = Attention(config).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) / (1 if p.dim() == 1 else math.sqrt(WIDTH)))
    return layer


def dense(layer: Attention, x: Tensor, document: Tensor) -> Tensor:
    """Return attention for x (B, T, width), where tokens of a document have the same number (B, T) in a row."""
    T, d = x.shape[1], layer.head_dim
    same = document[:, :, None] == document[:, None]
    token = torch.arange(T)
    seen = same & (token <= token[:, None]) & (token > token[:, None] - (layer.window or T))
    position = (same & (token < token[:, None])).sum(-1)
    angle = position[..., None] * layer.rope_base ** -(torch.arange(d // 2, dtype=x.dtype) / (d // 2))
    turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    q, k, v = (p(x).unflatten(-1, (-1, d)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (torch.complex(t[..., : d // 2], t[..., d // 2 :]) * turn for t in (q, k))
    k, v = (t.repeat_interleave(HEADS // t.shape[2], 2) for t in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k.conj()).real / math.sqrt(d)
    weights = logits.masked_fill(~seen[:, None], -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if layer.sinks is not None:
        total = total + layer.sinks.logits.exp()[:, None, None]
    return layer.out_proj(torch.einsum("bhij,bjhd->bihd", weights / total, v).flatten(-2))


def check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-11 * expected.norm()


def starts_of(T: int, seed: int, share: float) -> Tensor:
    return torch.rand(ROWS, T, generator=torch.Generator().manual_seed(seed)) < share


def inputs(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))


@settings(deadline=None)
@given(OPTIONS, LENGTHS, st.sampled_from([0.0, 0.01, 0.2, 1.0]), st.integers(0, 2**20), st.data())
def test_documents_and_caches(options: dict[str, Any], T: int, share: float, seed: int, data: st.DataObject) -> None:
    """Outputs and gradients are those of the mask, in one call and in parts that pass the cache on."""
    layer, start = build(options, seed), starts_of(T, seed, share)
    cuts = sorted(data.draw(st.sets(st.integers(1, T - 1), max_size=3))) if T > 1 else []
    found: list[list[Tensor]] = []
    for kind in ("dense", "whole", "parts"):
        x, out = inputs(ROWS, T, seed=seed).requires_grad_(), []
        if kind == "dense":
            out.append(dense(layer, x, start.cumsum(1)))
        elif kind == "whole":
            out.append(layer(x, document_start=start)[0])
        else:
            state = None
            for a, b in pairwise([0, *cuts, T]):
                y, state = layer(x[:, a:b], state, document_start=start[:, a:b], return_state=True)
                out.append(y)
        y = torch.cat(out, 1)
        weight = inputs(ROWS, T, seed=seed + 1)
        found.append([y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])])
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            scale = max(float(t.norm()) for t in found[0])
            assert (got - expected).norm() <= 1e-11 * scale
    check(found[1][0], found[0][0])


@settings(deadline=None)
@given(
    OPTIONS,
    st.lists(st.integers(0, 300) | st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.integers(0, 2**20),
)
def test_packed_sequences(options: dict[str, Any], lengths: list[int], seed: int) -> None:
    """Sequences without tokens are among them; the caches of all go on, in a batch with others."""
    layer, T = build(options, seed), sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x, more = inputs(1, T, seed=seed), inputs(len(lengths), 7, seed=seed + 1)
    with torch.no_grad():
        y, state = layer(x, cu_seqlens=offsets, return_state=True)
        check(y, dense(layer, x, document[None]))
        every = [
            torch.cat([x[0, a:b], rest])[None] for (a, b), rest in zip(pairwise(offsets.tolist()), more, strict=True)
        ]
        expected = [dense(layer, own, torch.zeros(1, own.shape[1]))[0, -7:] for own in every]
        check(layer(more, state)[0], torch.stack(expected))
        check(in_steps(layer, more, state.reserve(max(lengths) + 7)), torch.stack(expected))
        check(in_steps(layer, more, state), torch.stack(expected))


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("sinks", [False, True])
def test_no_tensor_has_an_element_for_each_query_and_key(packed: bool, window: int | None, sinks: bool) -> None:
    """Forward and backward have the logits of a block of 256 queries at a time, here an eighth of all."""
    T = 2048
    layer = build({"num_kv_heads": 1, "window": window, "attention_sinks": sinks}, 0)
    start = torch.zeros(1, T, dtype=torch.bool)
    start[0, [5, 700]] = True
    documents = {"cu_seqlens": torch.tensor([0, 5, 700, T])} if packed else {"document_start": start}
    with LargestTensor() as blocks:
        layer(inputs(1, T, seed=0).requires_grad_(), **documents)[0].sum().backward()
    with LargestTensor() as whole, torch.no_grad():
        dense(layer, inputs(1, T, seed=0), start.cumsum(1))
    assert whole.elements >= HEADS * T * T
    assert blocks.elements <= HEADS * 256 * (T + 1)  # with the logit of the sink


def in_steps(layer: Attention, x: Tensor, state: KeyValues) -> Tensor:
    """Return the outputs of steps, the first two of which are taken together where the cache has room."""
    out = []
    if state.length is not None:
        y, accept = layer.steps(x[:, :2], state)
        out, state = [y], accept(torch.full((len(x),), 2))
    for t in range(sum(part.shape[1] for part in out), x.shape[1]):
        y, state = layer.step(x[:, t], state)
        out.append(y[:, None])
    return torch.cat(out, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [1, 5, 15, 16, 17])
def test_infinite_queries_and_keys_whose_scores_are_nan_give_nan(keys: int, dtype: torch.dtype) -> None:
    """A score of inf - inf or inf * 0 makes the output NaN, as in softmax; other queries are as before."""
    q, k, v = (torch.randn(3, keys, heads, 8, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2))
    q[0, -1, 1, :2] = torch.tensor([math.inf, -math.inf])
    k[:, :, :, :2] = k[:, :, :, :2].abs()
    k[2, 0, 0, 5], q[2, :, :, 5] = math.inf, 0.0  # inf * 0
    q, k, v = (t.to(dtype) for t in (q, k, v))
    nan = torch.zeros(3, keys, 4, dtype=torch.bool)
    nan[0, -1, 1] = True
    nan[2, :, :2] = True  # all queries see the first key
    for found in (attend(q, k, v), attend_alone(q, k, v, None, None, None)):
        assert torch.equal(found.isnan().any(-1), nan)


def test_no_tokens() -> None:
    layer = build({}, 0)
    assert layer(torch.zeros(ROWS, 0, WIDTH, dtype=torch.float64))[0].shape == (ROWS, 0, WIDTH)


def test_compiled_for_any_number_of_tokens() -> None:
    layer, x = build({}, 0), torch.randn(ROWS, 70, WIDTH, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 70):
        check(compiled(x[:, :tokens])[0], layer(x[:, :tokens])[0])


def test_exported_for_any_number_of_tokens() -> None:
    layer, x = build({}, 0), torch.randn(ROWS, 70, WIDTH, dtype=torch.float64)
    T = torch.export.Dim("T", min=2, max=4096)
    for traced in (5, 20):
        exported = torch.export.export(layer, (x[:, :traced].contiguous(),), dynamic_shapes=({1: T},)).module()
        for tokens in (3, 70):
            check(exported(x[:, :tokens])[0], layer(x[:, :tokens])[0])
        q = x[:, :3].clone()
        q[0, -1] = torch.nan  # in 3 tokens, whose scores torch's kernel reads in one register
        assert torch.equal(exported(q)[0].isnan(), layer(q)[0].isnan())
