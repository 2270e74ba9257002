"""Mixers whose steps several processes share: packed sequences and documents that end anywhere."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from attention_parts import CASES, solve_attention
from cases import TOLERANCE, error
from context_parts import own_steps
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from process_pool import Pool, RankError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tfla.distributed import ContextParallel, parallelize
from tfla.nn import Decoder, LanguageModel, ModelConfig, NGram, SequenceMixer, generate
from tfla.nn.mixers import MIXERS, attention, block_attention, ring
from tfla.nn.mixers.key_values import KeyValues

CONFIG: dict[str, Any] = {
    "d_model": 16, "num_blocks": 1, "num_heads": 4, "vocab_size": 8, "num_kv_heads": 2, "mamba_head_dim": 8,
    "mamba_state_dim": 4,
}  # fmt: skip


def layer(mixer: str, window: int | None = None, sinks: bool = False) -> SequenceMixer:
    torch.manual_seed(0)
    config = ModelConfig.from_dict(CONFIG | {"mixer": mixer, "window": window, "attention_sinks": sinks})
    return MIXERS[mixer](config).double()  # type: ignore[call-arg]


@contextlib.contextmanager
def exchange_in_rounds(rounds: bool, queries: int = 4, keys: int = 3) -> Iterator[None]:
    """Let attention receive keys and values from one process after the other, in small tiles, or gather them."""
    with (
        mock.patch.object(attention, "GATHERED", -1 if rounds else 2**22),
        mock.patch.multiple(block_attention, QUERIES=queries, KEYS=keys),
    ):
        yield


def solve(
    group: dist.ProcessGroup,
    *,
    mixer: str,
    x: torch.Tensor,
    dy: torch.Tensor,
    window: int | None,
    sinks: bool,
    rounds: bool,
    again: bool,
    options: dict[str, Any],
    order: str,
    lengths: tuple[int, ...],
    given: bool,
    state: Any = None,
    dstate: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return this process's output, the gradients of its input and of the weights, its new state, and those of states.

    Args:
        group: the processes.
        mixer, window, sinks: the layer.
        rounds: whether keys and values go from process to process, in small tiles, or are gathered.
        again: whether the backward computes the layer again.
        x, dy: its whole input, and the cotangent of its whole output.
        options: further arguments of the layer.
        order: of the spans.
        lengths: the steps of each span.
        given: whether the layer gets the lengths.
        state: the state before the first step, or None.
        dstate: this process's cotangents of the tensors of the new state, or None where none is requested.
    """
    module = layer(mixer, window, sinks)
    before, state = detached(state)
    module.context_parallel = ContextParallel(group, order=order, lengths=lengths if given else None)  # type: ignore[assignment]
    steps = own_steps(dist.get_rank(group), dist.get_world_size(group), order, lengths)
    ours, cotangent = x[:, steps], dy[:, steps]
    if "document_start" in options:
        options = {"document_start": options["document_start"][:, steps]}
    options = {**options, "return_state": dstate is not None}
    with exchange_in_rounds(rounds):
        if again:
            y, new = checkpoint(module, ours.requires_grad_(), state, use_reentrant=False, **options)
        else:
            y, new = module(ours.requires_grad_(), state, **options)
        after = tensors(new)
        torch.autograd.backward([y, *differentiable(after)], [cotangent, *(dstate or [])])
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in before]
    return y.detach(), ours.grad, [p.grad for p in module.parameters()], [t.detach() for t in after], grads


def tensors(state: Any) -> list[torch.Tensor]:
    """Return the tensors of a state that are compared."""
    return [t for t in tree_leaves(state) if t is not None and t.is_floating_point()]


def differentiable(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that carry gradients, which max states do not."""
    return [t for t in found if t.requires_grad]


def detached(state: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors of a copy of a state that get gradients, and the copy."""
    if state is None:
        return [], None
    copy = state.detach().clone()
    found = [t.requires_grad_() for t in tensors(copy)]
    return found, copy


EXACT = 1e-12


@settings(max_examples=80)
@given(data=st.data())
def test_parts_are_those_of_the_whole(pool: Pool, data: st.DataObject) -> None:
    mixer = data.draw(st.sampled_from(list(MIXERS)), "mixer")
    parts = data.draw(st.integers(2, 4), "processes")
    order = data.draw(st.sampled_from(["contiguous", "zigzag"]), "order")
    spans, equal = parts * (2 if order == "zigzag" else 1), data.draw(st.booleans(), "equal spans")
    each = st.integers(1, 9)
    lengths = (data.draw(each),) * spans if equal else tuple(data.draw(st.tuples(*[each] * spans), "lengths"))
    given = not equal or data.draw(st.booleans(), "lengths are given")
    T = sum(lengths)
    window, sinks, rounds = None, False, False
    if mixer == "attention":
        window = data.draw(st.none() | st.integers(1, T), "window")
        sinks, rounds = data.draw(st.booleans(), "sinks"), data.draw(st.booleans(), "rounds")
    again = data.draw(st.booleans(), "computed again")
    kind = data.draw(st.sampled_from(["plain", "document_start", "cu_seqlens"]))
    B = 1 if kind == "cu_seqlens" else 2
    starts = data.draw(st.lists(st.integers(1, T - 1), max_size=5), "starts")  # those of empty sequences too
    # Where no query sees two keys, the gradients of q and k are rounding alone.
    assume(not rounds or (window != 1 and (kind != "cu_seqlens" or len(set(starts)) < T - 1)))
    options: dict[str, Any] = {}
    if kind == "document_start":
        options[kind] = torch.zeros(B, T, dtype=torch.bool)
        options[kind][1, starts] = True
    elif kind == "cu_seqlens":
        options[kind] = torch.tensor([0, *sorted(starts), T])
    draw = torch.Generator().manual_seed(T)
    x, dy = torch.randn(2, B, T, 16, dtype=torch.float64, generator=draw)
    module, whole = layer(mixer, window, sinks), x.clone().requires_grad_()
    if mixer != "attention":
        module.backend = "reference"  # type: ignore[assignment]
    # Attention returns states of packed sequences, but takes none.
    past = data.draw(st.sampled_from([0, 1, 6]), "tokens before") if (kind, mixer) != ("cu_seqlens", "attention") else 0
    carried = bool(past) or data.draw(st.booleans(), "return_state")
    rows = len(starts) + 1 if kind == "cu_seqlens" else B
    state, dstate = None, None
    if past:
        _, state = module(torch.randn(rows, past, 16, dtype=torch.float64, generator=draw), return_state=True)
    before, own = detached(state)
    y, new = module(whole, own, **options, return_state=carried)
    if carried:
        dstate = [torch.randn(t.shape, dtype=t.dtype, generator=draw) for t in differentiable(tensors(new))]
    torch.autograd.backward([y, *differentiable(tensors(new))], [dy, *(dstate or [])])
    found = pool.run(
        parts, solve, mixer=mixer, x=x, dy=dy, window=window, sinks=sinks, rounds=rounds, again=again, options=options,
        order=order, lengths=lengths, given=given, state=None if state is None else state.detach(),
        dstate=None if dstate is None else [d / parts for d in dstate],
    )  # fmt: skip
    in_time = torch.cat([own_steps(rank, parts, order, lengths) for rank in range(parts)]).argsort()
    h, dx = (torch.cat([part[k] for part in found], 1)[:, in_time] for k in (0, 1))  # type: ignore[misc]
    assert error(h, y.detach()) <= EXACT
    assert error(dx, whole.grad) <= EXACT
    for p, *gradients in zip(module.parameters(), *(part[2] for part in found), strict=True):
        assert error(sum(gradients), p.grad) <= EXACT
    for part in found:
        for a, b in zip(part[3], tensors(new), strict=True):
            assert error(a, b.detach()) <= EXACT
    for t, *gradients in zip(before, *(part[4] for part in found), strict=True):
        assert error(sum(gradients), torch.zeros_like(t) if t.grad is None else t.grad) <= EXACT


RECURRENT = [name for name in MIXERS if name != "attention"]


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize("parts", [1, 2])
def test_nan_of_a_packed_sequence_stays_in_it(pool: Pool, mixer: str, parts: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 1, 16, 16, dtype=torch.float64, generator=draw)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 7, 9, 16])}
    module, found = layer(mixer), []
    for value in (0.0, torch.nan):
        x[:, 6] = value
        whole = x.clone().requires_grad_()
        y, new = module(whole, **options, return_state=True)
        after = tensors(new)
        if parts == 1 or value == 0:
            torch.autograd.backward(
                [y, *differentiable(after)], [dy, *(torch.ones_like(t) for t in after if t.requires_grad)]
            )
            found.append((y.detach(), whole.grad, [t.detach() for t in after]))
    if parts == 2:
        ones = [torch.full_like(t, 1 / parts) for t in differentiable(after)]
        each = pool.run(
            parts, solve, mixer=mixer, x=x, dy=dy, window=None, sinks=False, rounds=False, again=False,
            options=options, order="contiguous", lengths=(8, 8), given=False, dstate=ones,
        )  # fmt: skip
        h, dx = (torch.cat([part[k] for part in each], 1) for k in (0, 1))  # type: ignore[misc]
        found += [(h, dx, part[3]) for part in each]
    (y, dx, states), *others = found
    for h, grad, after in others:
        assert h[:, 6].isnan().all()
        assert error(h[:, 7:], y[:, 7:]) <= EXACT
        assert error(grad[:, 7:], dx[:, 7:]) <= EXACT
        for a, b in zip(after, states, strict=True):
            assert error(a[1:], b[1:]) <= EXACT


def _empty(group: dist.ProcessGroup, *, mixer: str, order: str, carried: bool) -> list[tuple[int, ...]]:
    """Return the shapes of the results of a layer for a batch without sequences."""
    module = layer(mixer)
    module.context_parallel = ContextParallel(group, order=order)  # type: ignore[assignment]
    found = []
    for starts in (None, torch.zeros(0, 8, dtype=torch.bool)):
        x = torch.zeros(0, 8, 16, dtype=torch.float64, requires_grad=True)
        y, state = module(x, document_start=starts, return_state=carried)
        after = tensors(state)
        (y.sum() + sum(t.sum() for t in after)).backward()
        found += [y, x.grad, *after]
    return [tuple(t.shape) for t in found]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_an_empty_batch_has_empty_results(pool: Pool, mixer: str, order: str, carried: bool) -> None:
    x = torch.zeros(0, 16, 16, dtype=torch.float64)  # all steps
    _, state = layer(mixer)(x, return_state=carried)
    expected = [(0, 8, 16), (0, 8, 16), *(tuple(t.shape) for t in tensors(state))] * 2
    assert pool.run(2, _empty, mixer=mixer, order=order, carried=carried) == [expected, expected]


def _compiled(group: dist.ProcessGroup, *, mixer: str, order: str, rounds: bool) -> float:
    """Return the largest difference of output and gradient between a compiled layer and the layer itself."""
    with exchange_in_rounds(rounds, queries=64, keys=64):
        return _difference_of_compiled(group, mixer, order)


def _difference_of_compiled(group: dist.ProcessGroup, mixer: str, order: str) -> float:
    """Return what :func:`_compiled` does."""
    module = layer(mixer)
    module.context_parallel = ContextParallel(group, order=order)  # type: ignore[assignment]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, starts: module(x, document_start=starts)[0], backend="aot_eager", fullgraph=True)
    worst = 0.0
    for T in (8,) if mixer == "retnet" else (8, 12):  # symbolic sizes are those of mamba2, with a convolution besides
        x = torch.randn(1, T, 16, dtype=torch.float64, requires_grad=True)
        starts = torch.zeros(1, T, dtype=torch.bool)
        starts[0, 3 + dist.get_rank(group)] = True
        found = []
        for call in (compiled, lambda x, starts: module(x, document_start=starts)[0]):
            y = call(x, starts)
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
        worst = max(worst, *(error(a, b) for a, b in zip(*found, strict=True)))
    return worst


@pytest.mark.parametrize(
    ("mixer", "rounds", "order"),
    [
        ("attention", False, "zigzag"),
        ("attention", True, "contiguous"),
        ("mamba2", False, "contiguous"),
        ("retnet", False, "zigzag"),
    ],
)
def test_compiled_layers(pool: Pool, mixer: str, rounds: bool, order: str) -> None:
    assert max(pool.run(2, _compiled, mixer=mixer, order=order, rounds=rounds)) <= EXACT


def _generated(group: dist.ProcessGroup, *, ids: torch.Tensor, order: str, sharded: bool) -> torch.Tensor:
    """Return the logits of steps after a prompt in two parts, of each of which every process has its steps."""
    model, found = hybrid(), []
    rank, size, state = dist.get_rank(group), dist.get_world_size(group), None
    if sharded:
        parallelize(model, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",)), cp_order=order)
    else:
        for module in model.modules():
            if hasattr(module, "context_parallel"):
                module.context_parallel = ContextParallel(group, order=order)  # type: ignore[assignment]
    with torch.no_grad():
        for part in (ids[:, :24], ids[:, 24:48]):
            steps = own_steps(rank, size, order, (3,) * 2 * size if order == "zigzag" else (6,) * size)
            _, state = model(part[:, steps], state, return_state=True)
        decoder = Decoder(model, state, capacity=60)
        for t in range(48, 52):
            found.append(decoder.step(ids[:, t]))
            logits, state = model.step(ids[:, t], state)
            assert error(logits, found[-1]) <= EXACT
    assert all(isinstance(p, DTensor) == sharded for p in model.parameters())
    return torch.stack(found, 1)


def hybrid() -> LanguageModel:
    torch.manual_seed(0)
    layers = ("mlstm_exp", "gated_delta_net", "retnet", "attention")
    return LanguageModel(ModelConfig.from_dict(CONFIG | {"num_blocks": 4, "layers": layers})).double()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_a_shared_prompt_is_continued_by_steps(pool: Pool, order: str, sharded: bool) -> None:
    """Processes read a prompt together, in two parts, and each of them then has the states to generate."""
    ids = torch.randint(0, 8, (2, 52), generator=torch.Generator().manual_seed(0))
    expected = hybrid()(ids)[:, 48:].detach()
    for logits in pool.run(4, _generated, ids=ids, order=order, sharded=sharded):
        assert error(logits, expected) <= EXACT


def recurrent() -> LanguageModel:
    torch.manual_seed(0)
    layers = ("mlstm_exp", "gated_delta_net", "mamba2", "retnet")
    return LanguageModel(ModelConfig.from_dict(CONFIG | {"num_blocks": 4, "layers": layers})).double()


PACKED = [[0, 5, 5, 17, 24], [0, 10, 11, 11, 24]]  # two parts of four sequences, some without a token in one of them


def _packed_parts(
    group: dist.ProcessGroup, *, ids: torch.Tensor, order: str
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return the logits of this process's steps of each part, the last states, and the gradients of the weights."""
    model, found, state = recurrent(), [], None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for block in model.blocks:
        block.mixer.context_parallel = ContextParallel(group, order=order)  # type: ignore[assignment]
    steps = own_steps(rank, size, order, (24 // size,) * size if order == "contiguous" else (12 // size,) * 2 * size)
    for part, offsets in zip(ids, PACKED, strict=True):
        logits, state = model(part[None, steps], state, cu_seqlens=torch.tensor(offsets), return_state=True)
        found.append(logits)
    after = tensors(state)
    (sum(y.square().sum() for y in found) + sum(t.square().sum() for t in after) / size).backward()
    return [y.detach() for y in found], [t.detach() for t in after], [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("size", "order"), [(2, "zigzag"), (3, "contiguous"), (4, "contiguous")])
def test_packed_sequences_continue_in_a_model_of_many_mixers(pool: Pool, size: int, order: str) -> None:
    ids = torch.randint(0, 8, (2, 24), generator=torch.Generator().manual_seed(0))
    model, expected, state = recurrent(), [], None
    for part, offsets in zip(ids, PACKED, strict=True):
        logits, state = model(part[None], state, cu_seqlens=torch.tensor(offsets), return_state=True)
        expected.append(logits)
    after = tensors(state)
    (sum(y.square().sum() for y in expected) + sum(t.square().sum() for t in after)).backward()
    found = pool.run(size, _packed_parts, ids=ids, order=order)
    lengths = (24 // size,) * size if order == "contiguous" else (12 // size,) * 2 * size
    in_time = torch.cat([own_steps(rank, size, order, lengths) for rank in range(size)]).argsort()
    for k, logits in enumerate(expected):
        assert error(torch.cat([part[0][k] for part in found], 1)[:, in_time], logits.detach()) <= EXACT
    for _, states, _ in found:
        for a, b in zip(states, after, strict=True):
            assert error(a, b.detach()) <= EXACT
    for p, *gradients in zip(model.parameters(), *(part[2] for part in found), strict=True):
        assert error(sum(gradients), p.grad) <= EXACT


def _text_of_sharded_model(group: dist.ProcessGroup, *, ids: torch.Tensor) -> torch.Tensor:
    """Return what a model generates whose parameters the processes share."""
    model = parallelize(hybrid(), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))
    text = torch.stack(list(generate(model, ids, 6, temperature=0)), 1)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(ValueError, match=r"^draft: got one with a model whose parameters FSDP2 shards, expected None"):
        generate(model, ids, 6, draft=NGram(2))
    return text


def test_a_sharded_model_generates(pool: Pool) -> None:
    ids = torch.randint(0, 8, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = torch.stack(list(generate(hybrid(), ids, 6, temperature=0)), 1)
    assert all(torch.equal(text, expected) for text in pool.run(2, _text_of_sharded_model, ids=ids))


def _verified_by_sharded_model(group: dist.ProcessGroup, *, mixers: tuple[str, ...], name: str) -> None:
    """Compare proposed tokens of a model whose parameters processes share, of which some are accepted."""
    ids, lengths = torch.randint(0, 8, (2, 14), generator=torch.Generator().manual_seed(0)), torch.tensor([2, 5])
    found = []
    for shared in (False, True):
        torch.manual_seed(0)
        layers = {"num_blocks": len(mixers), "layers": mixers}
        model = LanguageModel(ModelConfig.from_dict(CONFIG | layers)).double()
        if shared:
            parallelize(model, DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,)))
        with torch.no_grad():
            prefill = ids[:, :8]
            if shared and name == "cp":
                prefill = prefill.chunk(2, 1)[dist.get_rank()]
            _, state = model.read_prompt(prefill)
            state = tuple(s.reserve(30) if isinstance(s, KeyValues) else s for s in state)
            logits, accept = model.steps(ids[:, 8:13], state)
            assert all(isinstance(p, DTensor) == shared for p in model.parameters())
            state = accept(lengths)
            # With tensor parallelism each process has the states of its heads.
            after = [] if name == "tp" else tensors(state)
            found.append([logits, model.step(ids[:, 13], state)[0], *after])
    for a, b in zip(*found, strict=True):
        assert error(b, a) <= EXACT


@pytest.mark.parametrize("name", ["dp_shard", "cp", "tp"])
@pytest.mark.parametrize("mixers", [("mlstm_exp", "attention", "gated_delta_net"), ("mamba2", "retnet", "kda", "gla")])
def test_a_sharded_model_verifies_proposed_tokens(pool: Pool, mixers: tuple[str, ...], name: str) -> None:
    pool.run(2, _verified_by_sharded_model, mixers=mixers, name=name)


def test_a_prompt_is_no_part_of_one() -> None:
    """With context parallelism, tokens given to generate would be read as this process's part of a longer prompt."""
    model = hybrid()
    model.blocks[3].mixer.context_parallel = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^model: got one with context parallelism, expected none: let each process"):
        generate(model, torch.zeros(1, 3, dtype=torch.int64), 2)


def _sizes_sent(group: dist.ProcessGroup, *, window: int | None, order: str, offsets: list[int] | None) -> list[int]:
    """Return the steps that each exchange of a forward and backward brings to this process."""
    module, found = layer("attention", window), list[int]()
    real = ring.Ring._exchange

    def exchange(self: ring.Ring, x: torch.Tensor, got: list[ring.Rows], target: int, source: int) -> torch.Tensor:
        found.append(sum(rows.stop - rows.start for rows in got))
        return real(self, x, got, target, source)

    module.context_parallel = ContextParallel(group, order=order)  # type: ignore[assignment]
    packed = None if offsets is None else torch.tensor(offsets)
    with exchange_in_rounds(True), mock.patch.object(ring.Ring, "_exchange", exchange):
        y, _ = module(torch.randn(1, 16, 16, dtype=torch.float64, requires_grad=True), cu_seqlens=packed)
        y.sum().backward()
    return found


@pytest.mark.parametrize(
    ("window", "order", "offsets", "expected"),
    [
        # Four processes of 16 steps. By process: the rounds of the forward, and of the backward with what they return.
        (
            None, "contiguous", None,
            [
                [0, 0, 0, 0, 0, 16, 0, 16, 16], [16, 0, 0, 16, 0, 16, 0, 16, 0], [16, 16, 0, 16, 16, 16, 0, 0, 0],
                [16, 16, 16, 16, 16, 0, 16, 0, 0],
            ],
        ),
        (5, "contiguous", None, [[0, 0, 4], [4, 4, 4], [4, 4, 4], [4, 4, 0]]),
        # A process gets the steps before its early span in the first round, and those before its late one in the last.
        (5, "zigzag", None, [[0, 4, 0, 4, 4, 0], [4] * 6, [4] * 6, [4, 0, 4, 0, 0, 4]]),
        (None, "contiguous", [0, 32, 64], [[0, 0, 16], [16, 16, 0], [0, 0, 16], [16, 16, 0]]),
    ],
)  # fmt: skip
def test_a_process_receives_what_its_queries_see(
    pool: Pool, window: int | None, order: str, offsets: list[int] | None, expected: list[list[int]]
) -> None:
    assert pool.run(4, _sizes_sent, window=window, order=order, offsets=offsets) == expected


def _refused(group: dist.ProcessGroup, *, mixer: str, case: str) -> None:
    T = {"short": 2, "zigzag": 4, "odd": 5}.get(case, 4)
    module, x = layer(mixer), torch.zeros(1, T, 16, dtype=torch.float64)
    zigzag = ContextParallel(group, order="zigzag")
    module.context_parallel = zigzag if case in ("zigzag", "odd") else group  # type: ignore[assignment]
    if case == "offsets":
        module(x, cu_seqlens=torch.tensor([0, 3]))
    if case == "state":
        module(x, module.initial_state(1, x.device), cu_seqlens=torch.tensor([0, 3, 8]))
    if case == "room":
        module(x, module.initial_state(1, x.device).reserve(9))
    module(x)


@pytest.mark.parametrize(
    ("mixer", "case", "message"),
    [
        ("mamba2", "offsets", "cu_seqlens: goes from 0 to 3, expected from 0 to 8, the steps of all 2 processes"),
        ("mamba2", "odd", "x: got T = 5, expected an even number of steps with order 'zigzag' and no lengths"),
        ("retnet", "state", "initial_state.C: got shape .1, 4, 4, 8., expected .2, 4, 4, 8."),
        ("attention", "odd", "x: got T = 5, expected an even number of steps with order 'zigzag' and no lengths"),
        ("attention", "state", "cu_seqlens, state: got both, expected at most one of them in attention"),
        ("attention", "room", "state: got a cache with room for more tokens, expected one that forward has returned"),
    ],
)
def test_what_cannot_be_shared_is_named(pool: Pool, mixer: str, case: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(2, _refused, mixer=mixer, case=case)


def _refusal(group: dist.ProcessGroup, *, mixer: str, options: dict[str, Any], packed: bool, rounds: bool) -> str:
    """Return the message of the exception of a call with 4, 5 and 6 steps on three processes."""
    module = layer(mixer)
    module.context_parallel = ContextParallel(group, **options) if options else group  # type: ignore[assignment]
    offsets = {"cu_seqlens": torch.tensor([0, 7, 15])} if packed else {}
    with exchange_in_rounds(rounds), pytest.raises(ValueError) as refused:
        module(torch.zeros(1, 4 + dist.get_rank(group), 16, dtype=torch.float64), **offsets)
    return str(refused.value)


GOT = "x: got 4, 5, 6 steps on the 3 processes of context_parallel, expected "


@pytest.mark.parametrize(
    ("mixer", "options", "expected"),
    [
        ("attention", {}, "as many on each: for parts .*order='contiguous', lengths=...., here .4, 5, 6.$"),
        ("attention", {"order": "zigzag"}, "as many on each: for parts .*, here those of all 6 spans in the order of "),
        ("attention", {"lengths": (4, 5, 7)}, "4, 5, 7, by its lengths .4, 5, 7.$"),
        ("retnet", {}, "as many on each: for parts .*order='contiguous', lengths=...., here .4, 5, 6.$"),
    ],
)
@pytest.mark.parametrize("rounds", [False, True])
def test_every_process_names_the_parts_that_are_not_as_they_should_be(
    pool: Pool, mixer: str, options: dict[str, Any], expected: str, rounds: bool
) -> None:
    for message in pool.run(3, _refusal, mixer=mixer, options=options, packed=mixer == "retnet", rounds=rounds):
        assert re.match(GOT + expected, message), message


def _short_spans(group: dist.ProcessGroup) -> str:
    module = layer("mamba2")
    module.context_parallel = group  # type: ignore[assignment]
    with pytest.raises(ValueError) as refused:
        module(torch.zeros(1, 2 + 2 * dist.get_rank(group), 16, dtype=torch.float64))
    return str(refused.value)


def test_every_process_names_a_span_that_is_shorter_than_it_takes_it_to_be(pool: Pool) -> None:
    for message in pool.run(2, _short_spans):
        assert message.startswith("x: got spans of 2, 3 steps, counted up to 3, expected spans of equal lengths, or ")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_tiles_of_their_size(pool: Pool, dtype: torch.dtype, case: str) -> None:
    found = pool.run(
        2, solve_attention, dtype=dtype, device="cpu", order="zigzag", lengths=(300, 200, 400, 100), **CASES[case]
    )
    for errors in found:
        assert max(errors.values()) <= TOLERANCE[dtype], errors
