"""All mixers and two hybrids: sequences, parts, steps, documents, packed sequences, training and saving."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tfla.nn import Decoder, LanguageModel, ModelConfig, generate

Close = Callable[[Tensor, Tensor], None]
SMALL: dict[str, Any] = {
    "d_model": 32, "num_blocks": 2, "num_heads": 2, "vocab_size": 23, "mamba_head_dim": 16, "mamba_state_dim": 8,
    "input_gate_bias": -1.0,
}  # fmt: skip
# The mLSTM and plain attention are in the tests beside this one.
CASES: dict[str, dict[str, Any]] = {
    "mamba2": {"mixer": "mamba2"},
    "retnet": {"mixer": "retnet"},
    "gla": {"mixer": "gla"},
    "delta_net": {"mixer": "delta_net"},
    "gated_delta_net": {"mixer": "gated_delta_net"},
    "kda": {"mixer": "kda", "negative_eigenvalues": True},
    "grouped attention": {"mixer": "attention", "num_kv_heads": 1},
    "window and sinks": {"mixer": "attention", "window": 5, "attention_sinks": True},
    "hybrid with attention": {"num_blocks": 4, "layers": ["gated_delta_net"] * 3 + ["attention"]},
    "hybrid of recurrences": {"num_blocks": 5, "layers": ["mlstm_exp", "mamba2", "retnet"]},
}
RECURRENT = [name for name in CASES if "attention" not in name and "window" not in name]


def build(case: str, dtype: torch.dtype = torch.float64, **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig.from_dict(SMALL | CASES[case] | fields))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.to(dtype)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def in_parts(model: LanguageModel, ids: Tensor, cuts: list[int], starts: Tensor | None = None) -> Tensor:
    logits, state = [], None
    for a, b in itertools.pairwise([0, *cuts, ids.shape[1]]):
        part = None if starts is None else starts[:, a:b]
        out, state = model(ids[:, a:b], state, document_start=part, return_state=True)
        logits.append(out)
    return torch.cat(logits, 1)


def by_steps(model: LanguageModel, ids: Tensor, state: Any) -> Tensor:
    logits = []
    for token in ids.T:
        out, state = model.step(token, state)
        logits.append(out)
    return torch.stack(logits, 1)


@torch.no_grad()
def test_whole_sequences_parts_and_steps_agree(case: str, dtype: torch.dtype, close: Close, ids: Tensor) -> None:
    model = build(case, dtype)
    whole = model(ids)
    close(in_parts(model, ids, [1, 3, 7, 16]), whole)
    close(by_steps(model, ids, model.initial_state(2)), whole)
    _, state = model(ids[:, :11], return_state=True)
    close(by_steps(model, ids[:, 11:], state), whole[:, 11:])
    close(model(ids, model.initial_state(2)), whole)


@torch.no_grad()
def test_documents_are_independent(
    case: str, dtype: torch.dtype, close: Close, ids: Tensor, document_start: Tensor
) -> None:
    model = build(case, dtype)
    logits = model(ids, document_start=document_start)
    for row in range(2):
        edges = sorted({0, 19, *document_start[row].nonzero().flatten().tolist()})
        for a, b in itertools.pairwise(edges):
            close(logits[row : row + 1, a:b], model(ids[row : row + 1, a:b]))
    close(in_parts(model, ids, [3, 6, 12, 18], document_start), logits)
    bounds = torch.tensor([0, 3, 3, 4, 11, 19, 19])
    close(model(ids[:1], cu_seqlens=bounds), logits[:1])


def test_no_gradient_crosses_documents_and_states_carry_it(case: str, close: Close, ids: Tensor) -> None:
    model = build(case)
    x: list[Tensor] = []
    hook = model.embedding.register_forward_hook(lambda _, __, out: x.append(out))
    starts = torch.zeros(2, 19, dtype=torch.bool)
    starts[:, 8] = True
    late = model(ids, document_start=starts)[:, 8:]
    size = torch.autograd.grad(late.square().sum(), x)[0].norm(dim=-1)
    assert size[:, :8].max() < 1e-12 * size[:, 8:].min()
    hook.remove()
    grads = []
    for cuts in ([], [6, 7]):
        model.zero_grad()
        in_parts(model, ids, cuts)[:, 7:].square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    close(grads[1], grads[0])


@torch.no_grad()
@pytest.mark.parametrize("name", RECURRENT)
def test_packed_sequences_have_a_state_each(name: str, close: Close, ids: Tensor) -> None:
    model = build(name)
    alone = model(ids)
    state: Any = None
    for lengths in ((2, 1), (5, 8), (1, 0), (4, 7)):
        done = [0, 0] if state is None else done  # noqa: F821
        row = torch.cat([ids[n, done[n] : done[n] + length] for n, length in enumerate(lengths)])[None]
        bounds = torch.tensor([0, lengths[0], sum(lengths)])
        packed, state = model(row, state, cu_seqlens=bounds, return_state=True)
        for n, (a, b) in enumerate(itertools.pairwise(bounds.tolist())):
            if b > a:
                close(packed[0, a:b], alone[n, done[n] : done[n] + b - a])
        done = [d + length for d, length in zip(done, lengths, strict=True)]
    rest = [ids[n, done[n] :] for n in range(2)]
    for n in range(2):
        own = tree_map_only(Tensor, lambda t, n=n: t[n : n + 1], state)
        close(by_steps(model, rest[n][None], own)[0], alone[n, done[n] :])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_graph_steps_as_the_model_does(case: str, ids: Tensor) -> None:
    exact, model, on_gpu = build(case), build(case, torch.float32).cuda(), ids.cuda()
    alone = exact(ids)
    decoder = Decoder(model, model.initial_state(2), capacity=20)
    assert decoder._graph is not None

    def check(tokens: Tensor, expected: Tensor) -> None:
        logits = torch.stack([decoder.step(token).clone() for token in tokens.T], 1).double().cpu()
        assert (logits - expected).norm() <= 1e-4 * expected.norm()

    check(on_gpu[:, :7], alone[:, :7])
    decoder.scatter([0], decoder.gather([1]))
    check(on_gpu[[1, 1], 7:], alone[[1, 1], 7:])
    decoder.reset([0, 1])
    check(on_gpu, alone)
    greedy = torch.stack(list(generate(model, on_gpu, 9, temperature=0)), 1)
    assert torch.equal(greedy, torch.stack(list(generate(model, on_gpu, 9, temperature=0, cuda_graph=False)), 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_what_the_cpu_does(case: str, ids: Tensor, document_start: Tensor) -> None:
    exact, model = build(case), build(case, torch.float32).cuda()
    expected = exact(ids, document_start=document_start)
    expected.square().mean().backward()
    found = model(ids.cuda(), document_start=document_start.cuda())
    found.square().mean().backward()
    pairs = [(found.double().cpu(), expected)]
    for got, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        pairs.append((got.grad.double().cpu(), wanted.grad))
    assert max(float((a - b).norm() / b.norm()) for a, b in pairs) < 1e-4
    packed = model(ids[:1].cuda(), cu_seqlens=torch.tensor([0, 3, 4, 11, 19], device="cuda"))
    assert (packed.double().cpu() - expected[:1]).norm() < 1e-4 * expected[:1].norm()


@torch.no_grad()
def test_states_of_packed_prompts_go_on_as_a_batch(case: str, close: Close, ids: Tensor) -> None:
    model = build(case)
    alone = model(ids)
    row = torch.cat([ids[0, :5], ids[1, :8]])[None]
    _, state = model(row, cu_seqlens=torch.tensor([0, 5, 13]), return_state=True)
    following = torch.stack([ids[0, 5:12], ids[1, 8:15]])
    for logits in (model(following, state, return_state=True)[0], by_steps(model, following, state)):
        close(logits[0], alone[0, 5:12])
        close(logits[1], alone[1, 8:15])
    decoder = Decoder(model, model.initial_state(2), capacity=19)
    decoder.scatter([1, 0], state)
    logits = torch.stack([decoder.step(token) for token in following.flip(0).T], 1)
    close(logits[1], alone[0, 5:12])
    close(logits[0], alone[1, 8:15])


@torch.no_grad()
def test_a_decoder_replaces_and_moves_sequences(case: str, close: Close, ids: Tensor) -> None:
    model = build(case)
    alone = model(ids)
    decoder = Decoder(model, model.initial_state(3), capacity=14)
    first = torch.stack([decoder.step(ids[[1, 0, 1], t]) for t in range(5)], 1)
    close(first[1], alone[0, :5])
    paused = decoder.gather([1])
    decoder.scatter([1], model(ids[1:, :8], return_state=True)[1])
    decoder.scatter([2], paused)
    decoder.reset([0])
    tokens = torch.stack([ids[0, :6], ids[1, 8:14], ids[0, 5:11]])
    second = torch.stack([decoder.step(token) for token in tokens.T], 1)
    close(second[0], alone[0, :6])
    close(second[1], alone[1, 8:14])
    close(second[2], alone[0, 5:11])
    if case in ("grouped attention", "hybrid with attention"):  # a window's cache holds fewer tokens
        with pytest.raises(ValueError, match=r"^ids: got token number 15 of a sequence, expected at most 14"):
            decoder.step(ids[[0, 0, 0], 0])
        with pytest.raises(ValueError, match=r"^capacity: got 19, expected at least 20"):
            Decoder(model, model(ids, return_state=True)[1], capacity=19)


def test_the_size_of_states(case: str, ids: Tensor) -> None:
    model = build(case)
    sizes = []
    for length in (6, 18):
        _, state = model(ids[:, :length], return_state=True)
        sizes.append(sum(t.numel() for t in tree_leaves(state) if t is not None))
        cut = tuple(s.detach() for s in state)
        assert not any(t.requires_grad for t in tree_leaves(cut) if t is not None)
    grows = case in ("grouped attention", "hybrid with attention")
    assert (sizes[1] > sizes[0]) == grows
    assert all(t.is_meta for t in tree_leaves(model.initial_state(2, device="meta")) if t is not None)


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_falls(case: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig.from_dict(SMALL | CASES[case]))
    ids = (torch.arange(17) * torch.tensor([[1], [3]])) % 11
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_bfloat16_is_close_to_float32(case: str, ids: Tensor) -> None:
    model = build(case, torch.float32)
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(ids[:, :18], return_state=True)
        last, _ = model.step(ids[:, 18], state)
    for rounded in (torch.cat([logits, last[:, None]], 1), model.bfloat16()(ids)):
        assert rounded.dtype == torch.float32
        # Tokens at which a head's output is close to 0 before its norm are few, and have larger errors.
        errors = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert errors.median() < 0.05


@torch.no_grad()
def test_saved_models_and_generation(case: str, tmp_path: Path, ids: Tensor) -> None:
    model = build(case, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = LanguageModel.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(ids), model(ids))
    text = ids
    for _ in range(5):
        text = torch.cat([text, model(text)[:, -1].argmax(-1)[:, None]], 1)
    assert torch.equal(torch.stack(list(generate(loaded, ids, 5, temperature=0)), 1), text[:, 19:])


def test_methods_trace_without_graph_breaks(close: Close, ids: Tensor, document_start: Tensor) -> None:
    torch._dynamo.reset()
    layers = ["mamba2", "retnet", "kda", "attention"]
    model = build("window and sinks", mixer="mlstm_exp", layers=layers, num_blocks=len(layers))
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    step = torch.compile(model.step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():  # a graph of the backward takes as long again; operators have theirs in tests/ops
        logits, state = forward(ids, document_start=document_start, return_state=True)
        close(logits, model(ids, document_start=document_start))
        close(step(ids[:, 0], state)[0], model.step(ids[:, 0], state)[0])


def test_exported_for_any_batch(close: Close, ids: Tensor) -> None:
    mixers = ["mlstm_exp", "mamba2", "retnet", "gla", "delta_net", "gated_delta_net", "kda", "attention"]
    model = build("hybrid of recurrences", layers=mixers, num_blocks=8)
    B = torch.export.Dim("B", max=64)
    exported = torch.export.export(model, (ids,), dynamic_shapes={"ids": {0: B}}).module()
    more = torch.cat([ids, ids.flip(0), ids[:1]])
    close(exported(more), model(more))


def test_states_of_other_mixers_are_refused() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    gla, attention = build("gla"), build("grouped attention")
    with pytest.raises(TypeError, match=r"^state\[0\]: got KeyValues, expected MixerState"):
        gla(ids, attention.initial_state(2))
    with pytest.raises(TypeError, match=r"^state\[0\]: got KeyValues, expected MixerState"):
        Decoder(gla, attention.initial_state(2))
    with pytest.raises(
        ValueError, match=r"^state\[0\]\.recurrence\.C: got shape \(2, 2, 16, 16\), expected \(2, 2, 8, 16\)"
    ):
        Decoder(gla, build("delta_net").initial_state(2))
