"""Prefills of a model on rows of a pool: the operators get the pool itself, and no bit differs from gathered states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import INTERPRETED, error
from invariant_models import RECURRENCES, RECURRENT, build, leaves, same, tokens
from torch import Tensor

from tfla.backends import BACKENDS, DELTA_BACKENDS
from tfla.nn import LanguageModel
from tfla.nn.mixers import mlstm, passes

CASES = [*RECURRENT, "recurrences"]
ROWS = (4, -1, 1)  # the second sequence starts from zero, and its state is stored nowhere
KINDS = ("dense", "documents", "packed", "states in between")


def model_of(case: str, **fields: Any) -> LanguageModel:
    if case == "recurrences":
        return build("mlstm_exp", **RECURRENCES | fields)
    return build(case, **fields)


def random_pool(model: LanguageModel) -> Any:
    """A pool of six rows, whose states are random numbers."""
    pool, generator = model.initial_state(6), torch.Generator().manual_seed(0)
    for t in leaves(pool):
        new = torch.randn(t.shape, generator=generator) if t.is_floating_point() else torch.arange(6)
        t.copy_(new)
    return pool


def prefill(model: LanguageModel, kind: str, state: Any, **rows: Any) -> tuple[Tensor, Any, Any]:
    """Return the hidden states of three prompts, of which the second packed one is empty, and the states after them."""
    device = model.embedding.weight.device
    if kind == "states in between":
        return model.prefill(tokens(3, 11).to(device), state, states_every=4, **rows)
    if kind == "packed":
        ids, options = tokens(1, 17), {"cu_seqlens": torch.tensor([0, 5, 5, 17], device=device)}
    else:
        ids, options = tokens(3, 11), {}
    if kind == "documents":
        start = torch.zeros(3, 11, dtype=torch.bool, device=device)
        start[1, 6] = start[2, 3] = True
        options["document_start"] = start
    return *model.hidden(ids.to(device), state, return_state=True, **options, **rows), []


def gathered(model: LanguageModel, kind: str, pool: Any) -> tuple[Tensor, Any, Any]:
    """Return what :func:`prefill` does for ROWS of a pool, from copies of the states; the pool stays as it is."""
    states, pool = tuple(each.gather([4, 0, 1]) for each in pool), tuple(each.clone() for each in pool)
    for each in states:
        each.reset([1])
    hidden, after, between = prefill(model, kind, states)
    for own, new in zip(pool, after, strict=True):
        own.scatter([4, 1], new.gather([0, 2]))
    return hidden, pool, between


def check(model: LanguageModel, kind: str, pool: Any, expected: tuple[Tensor, Any, Any]) -> None:
    """Compare a prefill of ROWS of the pool, which it overwrites, with the result of :func:`gathered`."""
    rows = torch.tensor(ROWS, device=model.embedding.weight.device)
    hidden, after, between = prefill(model, kind, pool, state_indices=rows)
    assert all(a is b for a, b in zip(after, pool, strict=True))
    assert torch.equal(hidden, expected[0])
    if kind == "dense" and rows.is_cuda:  # kernels of GPUs get packed sequences, for which others are compiled
        assert all(error(x, y) <= 1e-6 for x, y in zip(leaves(after), leaves(expected[1]), strict=True))
    else:
        same(after, expected[1])
    same(between, expected[2])


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("invariant", [False, True])
def test_results_have_the_bits_of_gathered_states(case: str, kind: str, invariant: bool) -> None:
    model = model_of(case, batch_invariant=invariant)
    pool = random_pool(model)
    check(model, kind, pool, gathered(model, kind, pool))


@torch.no_grad()
@pytest.mark.parametrize("case", ["recurrences", "mamba2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_gathers_for_mixers_that_read_no_rows(case: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose processes share the steps do not, because their operators take no indices."""
    model = model_of(case, batch_invariant=False)
    mixers: list[Any] = [block.mixer for block in model.blocks]
    for mixer in mixers:
        with monkeypatch.context() as shared:
            shared.setattr(mixer, "context_parallel", object())
            assert not mixer.reads_rows
        assert mixer.reads_rows
    for mixer in mixers:
        monkeypatch.setattr(type(mixer), "reads_rows", False)
    pool = random_pool(model)
    check(model, kind, pool, gathered(model, kind, pool))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("invariant", [False, True])
def test_gradients_are_recorded_where_rows_are_only_read(case: str, invariant: bool) -> None:
    model, ids, rows = model_of(case, batch_invariant=invariant), tokens(3, 11), torch.tensor(ROWS)
    with torch.no_grad():
        pool = random_pool(model)
    before = tuple(each.clone() for each in pool)
    with pytest.raises(ValueError, match="state_indices: got them while gradients are recorded, expected"):
        model.hidden(ids, pool, state_indices=rows, return_state=True)
    hidden, _ = model.hidden(ids, pool, state_indices=rows)
    hidden.sum().backward()
    assert all(p.grad is not None for p in model.blocks[0].mixer.parameters())
    same(pool, before)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_operators_get_the_pool_and_the_rows(case: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model copies no state of a recurrence: each operator gets those of its block and the indices."""
    calls: list[dict[str, Any]] = []

    def recorded(operator: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(options)
            return operator(*args, **options)

        return call

    for module, name in ((mlstm, "mlstm"), (passes, "linear_attention"), (passes, "delta_rule")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    model = model_of(case, batch_invariant=False)
    pool, rows = random_pool(model), torch.tensor(ROWS)
    prefill(model, kind, pool, state_indices=rows)
    assert len(calls) == len(model.blocks)
    for options, own in zip(calls, pool, strict=True):
        given, held = options["initial_state"], getattr(own, "recurrence", own)
        assert [t.data_ptr() for t in leaves(given)] == [t.data_ptr() for t in leaves(held)]
        assert torch.equal(options["state_indices"], rows)


@pytest.mark.interpreter if INTERPRETED else pytest.mark.gpu
@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("invariant", [False] if INTERPRETED else [False, True])  # on a CPU, True is no packed call
def test_kernels_read_and_overwrite_the_pool(
    case: str, kind: str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[int] = []

    def recorded(by_rows: Any) -> Any:
        def call(self: Any, x: Any, *args: Any) -> Any:
            out = by_rows(self, x, *args)
            assert out is not None
            pools.append(x.C.data_ptr())
            return out

        return call

    for kernels in (type(BACKENDS["triton"]), type(DELTA_BACKENDS["triton"])):
        monkeypatch.setattr(kernels, "forward_by_rows", recorded(kernels.forward_by_rows))
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    model = model_of(
        case, batch_invariant=invariant, d_model=32, num_heads=2, mamba_state_dim=16, backend="triton", dtype=dtype
    )
    model = model.to("cpu" if INTERPRETED else "cuda")
    pool = random_pool(model)
    expected = gathered(model, kind, pool)
    assert not pools
    check(model, kind, pool, expected)
    assert pools == [getattr(each, "recurrence", each).C.data_ptr() for each in pool]
