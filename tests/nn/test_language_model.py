"""LanguageModel: whole sequences, parts, steps, documents and packed sequences give the same logits."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure, treespec_dumps, treespec_loads

from tfla.integrations.transformers import load_xlstm
from tfla.nn import LanguageModel, ModelConfig
from tfla.ops.state import State

Make = Callable[..., LanguageModel]
Close = Callable[[Tensor, Tensor], None]


def tensors(state: Any) -> list[Tensor]:
    return [t for t in tree_leaves(state) if t is not None]


def rows(state: Any, at: slice) -> Any:
    return tree_map_only(Tensor, lambda t: t[at], state)


def in_pieces(model: LanguageModel, ids: Tensor, cuts: list[int], starts: Tensor | None = None) -> Tensor:
    logits, state = [], None
    for a, b in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
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


def test_whole_sequences_parts_and_steps_agree(
    mixer: str, dtype: torch.dtype, make_model: Make, close: Close, ids: Tensor
) -> None:
    model = make_model(mixer, dtype)
    whole = model(ids)
    assert whole.dtype == dtype
    assert whole.shape == (2, 19, 23)
    close(in_pieces(model, ids, [1, 7, 16]), whole)
    close(by_steps(model, ids, model.initial_state(2)), whole)
    _, state = model(ids[:, :11], return_state=True)
    close(by_steps(model, ids[:, 11:], state), whole[:, 11:])


def test_documents_are_independent(
    mixer: str, dtype: torch.dtype, make_model: Make, close: Close, ids: Tensor, document_start: Tensor
) -> None:
    model = make_model(mixer, dtype)
    logits = model(ids, document_start=document_start)
    for row in range(2):
        edges = sorted({0, 19, *document_start[row].nonzero().flatten().tolist()})
        for a, b in itertools.pairwise(edges):
            close(logits[row : row + 1, a:b], model(ids[row : row + 1, a:b]))


def test_a_carried_state_belongs_to_the_document_that_goes_on(
    mixer: str, dtype: torch.dtype, make_model: Make, close: Close, ids: Tensor, document_start: Tensor
) -> None:
    model = make_model(mixer, dtype)
    whole = model(ids, document_start=document_start)
    close(in_pieces(model, ids, [3, 6, 18], document_start), whole)
    # Parts and steps in which no document starts need no document_start.
    _, state = model(ids[:, :9], document_start=document_start[:, :9], return_state=True)
    middle, _ = model(ids[:, 9:11], state, return_state=True)
    close(middle, whole[:, 9:11])
    close(by_steps(model, ids[:, 9:11], state), whole[:, 9:11])


@settings(max_examples=15, deadline=None)
@given(edges=st.sets(st.integers(1, 18)), empty=st.booleans())
@pytest.mark.parametrize("name", ["mlstm_exp", "mlstm_sig", "attention"])
def test_cu_seqlens_and_document_start_agree(
    name: str, make_model: Make, close: Close, edges: set[int], empty: bool
) -> None:
    model = make_model(name)
    ids = torch.randint(0, 23, (1, 19), generator=torch.Generator().manual_seed(3))
    starts = torch.zeros(1, 19, dtype=torch.bool)
    starts[0, list(edges)] = True
    bounds = [0, *sorted(edges), 19] + ([19] if empty else [])
    packed = model(ids, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    close(packed, model(ids, document_start=starts))


@pytest.mark.parametrize("mixer", ["mlstm_exp", "retnet", "kda", "attention"])
def test_a_file_has_a_state(mixer: str, make_model: Make, ids: Tensor, tmp_path: Path) -> None:
    _, state = make_model(mixer=mixer)(ids, return_state=True)
    torch.save(state, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt")
    assert [type(x) for x in found] == [type(x) for x in state]
    structure = tree_structure(state)  # which torch.export.save writes
    assert treespec_loads(treespec_dumps(structure)) == structure
    assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(state), strict=True))


@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig"])
def test_packed_sequences_have_a_state_each(mixer: str, make_model: Make, close: Close, ids: Tensor) -> None:
    model = make_model(mixer)
    row = torch.cat([ids[0, :5], ids[1, :8]])[None]
    packed, state = model(row, cu_seqlens=torch.tensor([0, 5, 13]), return_state=True)
    for n, length in enumerate((5, 8)):
        alone, own = model(ids[n : n + 1, :length], return_state=True)
        close(packed[:, 5 * n : 5 * n + length], alone)
        following, _ = model.step(ids[n, length : length + 1], rows(state, slice(n, n + 1)))
        close(following, model.step(ids[n, length : length + 1], own)[0])


def test_attention_takes_no_state_of_packed_sequences(make_model: Make, ids: Tensor) -> None:
    model = make_model("attention")
    with pytest.raises(ValueError, match="cu_seqlens, state: got both"):
        model(ids[:1], model.initial_state(1), cu_seqlens=torch.tensor([0, 19]))


def test_no_gradient_crosses_documents(mixer: str, make_model: Make, ids: Tensor) -> None:
    model = make_model(mixer)
    x: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _, __, out: x.append(out))
    starts = torch.zeros(2, 19, dtype=torch.bool)
    starts[:, 8] = True
    late = model(ids, document_start=starts)[:, 8:]
    size = torch.autograd.grad(late.square().sum(), x)[0].norm(dim=-1)
    assert size[:, :8].max() < 1e-12 * size[:, 8:].min()


def test_gradients_flow_through_a_carried_state(mixer: str, make_model: Make, close: Close, ids: Tensor) -> None:
    grads = []
    for cuts in ([], [6, 7]):
        model = make_model(mixer)
        in_pieces(model, ids, cuts)[:, 7:].square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    close(grads[1], grads[0])


def test_state_is_a_pytree_of_known_size(mixer: str, make_model: Make, close: Close, ids: Tensor) -> None:
    model = make_model(mixer)
    sizes = []
    for length in (4, 16):
        _, state = model(ids[:, :length], return_state=True)
        sizes.append(sum(t.numel() for t in tensors(state)))
    assert sizes[1] == (4 * sizes[0] if mixer == "attention" else sizes[0])
    close(model.step(ids[1:, 16], rows(state, slice(1, 2)))[0], model.step(ids[:, 16], state)[0][1:])
    cut = tuple(s.detach() for s in state)
    assert any(t.requires_grad for t in tensors(state))
    assert not any(t.requires_grad for t in tensors(cut))


def test_initial_state_is_the_state_of_no_tokens(mixer: str, make_model: Make, ids: Tensor) -> None:
    model = make_model(mixer)
    assert torch.equal(model(ids, model.initial_state(2)), model(ids))
    assert all(t.is_meta for t in tensors(model.initial_state(2, device="meta")))


@pytest.mark.parametrize("tokens_per_pass", [1, 7, 38, 4096])
def test_losses_by_parts_are_those_of_all_logits(
    mixer: str, make_model: Make, close: Close, ids: Tensor, tokens_per_pass: int
) -> None:
    model, targets, starts = make_model(mixer), ids.roll(-1, 1), ids == 0
    expected = F.cross_entropy(model(ids, document_start=starts).flatten(0, 1), targets.flatten(), reduction="none")
    losses = model.losses(ids, targets, document_start=starts, tokens_per_pass=tokens_per_pass)
    close(losses, expected.view(ids.shape))
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = torch.randn(ids.shape)
    both = [torch.autograd.grad((x.view(ids.shape) * weights).sum(), parameters) for x in (losses, expected)]
    for found, gradient in zip(*both, strict=True):
        close(found, gradient)


def test_wrong_targets_are_named(make_model: Make, ids: Tensor) -> None:
    model = make_model("mlstm_exp")
    with pytest.raises(ValueError, match=r"targets: got shape \(2, 18\), expected that of ids, \(2, 19\)"):
        model.losses(ids, ids[:, 1:])
    with pytest.raises(TypeError, match=r"targets: got a tensor of torch\.float32, expected an int64 tensor"):
        model.losses(ids, ids.float())
    with pytest.raises(ValueError, match="tokens_per_pass: got 0"):
        model.losses(ids, ids, tokens_per_pass=0)


def test_logits_are_soft_capped(make_model: Make, ids: Tensor) -> None:
    model = make_model(logit_soft_cap=0.5)
    with torch.no_grad():
        model.unembedding.weight.mul_(100)
    assert 0.45 < model(ids).abs().max() <= 0.5
    hidden, _ = model.hidden(ids)
    assert hidden.shape == (2, 19, 32)
    assert torch.equal(model.logits(hidden), model(ids))


def test_autocast_and_bfloat16_are_close_to_float32(mixer: str, make_model: Make, ids: Tensor) -> None:
    model = make_model(mixer, torch.float32)
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(ids[:, :18], return_state=True)
        last, _ = model.step(ids[:, 18], state)
    reduced = model.bfloat16()(ids)
    for rounded in (torch.cat([logits, last[:, None]], 1), reduced):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_falls(mixer: str, autocast: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(d_model=32, num_blocks=1, num_heads=2, vocab_size=11, mixer=mixer)
    model = LanguageModel(config)
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


def has_cpp_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))


@pytest.mark.skipif(not has_cpp_compiler(), reason="torch.compile needs a C++ compiler")
def test_compile_without_graph_breaks(make_model: Make, close: Close, ids: Tensor) -> None:
    torch._dynamo.reset()
    model = make_model("mlstm_exp", torch.float32, num_blocks=1)
    compiled = torch.compile(model, fullgraph=True)
    close(compiled(ids), model(ids))
    grads = []
    for run in (compiled, model):
        model.zero_grad()
        run(ids).square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    close(*grads)


def test_all_methods_trace_without_graph_breaks(
    mixer: str, make_model: Make, close: Close, ids: Tensor, document_start: Tensor
) -> None:
    torch._dynamo.reset()
    model = make_model(mixer, num_blocks=1)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    step = torch.compile(model.step, fullgraph=True, backend="aot_eager")
    logits, state = forward(ids, document_start=document_start, return_state=True)
    close(logits, model(ids, document_start=document_start))
    close(step(ids[:, 0], state)[0], model.step(ids[:, 0], state)[0])
    bounds = torch.tensor([0, 5, 19])
    close(forward(ids[:1], cu_seqlens=bounds), model(ids[:1], cu_seqlens=bounds))


GOOD = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("kind", "words", "ids", "arguments"),
    [
        (TypeError, ["ids", "float32", "int64"], GOOD.float(), {}),
        (TypeError, ["ids", "list", "int64"], [[1]], {}),
        (ValueError, ["ids", "(5,)", "(B, T)"], GOOD[0], {}),
        (ValueError, ["ids", "(2, 0)", "at least 1"], GOOD[:, :0], {}),
        (ValueError, ["ids", "meta", "that of the model, cpu"], GOOD.to("meta"), {}),
        (TypeError, ["return_state", "'no'", "True or False"], GOOD, {"return_state": "no"}),
        (TypeError, ["document_start", "int64", "bool"], GOOD, {"document_start": GOOD}),
        (ValueError, ["document_start", "(2, 4)", "(2, 5)"], GOOD, {"document_start": GOOD[:, :4].bool()}),
        (
            ValueError,
            ["document_start", "cu_seqlens"],
            GOOD[:1],
            {"document_start": GOOD[:1].bool(), "cu_seqlens": torch.tensor([0, 5])},
        ),
        (ValueError, ["batch 2", "1 with cu_seqlens"], GOOD, {"cu_seqlens": torch.tensor([0, 5])}),
        (ValueError, ["cu_seqlens", "4", "T = 5"], GOOD[:1], {"cu_seqlens": torch.tensor([0, 4])}),
        (TypeError, ["state", "Tensor", "tuple"], GOOD, {"state": GOOD}),
        (ValueError, ["state", "0 entries", "2 blocks"], GOOD, {"state": ()}),
    ],
)
def test_wrong_arguments_are_named(
    mixer: str, make_model: Make, kind: type[Exception], words: list[str], ids: Any, arguments: dict[str, Any]
) -> None:
    with pytest.raises(kind) as error:
        make_model(mixer)(ids, **arguments)
    assert all(word in str(error.value) for word in words), error.value


def test_wrong_arguments_of_steps_are_named(mixer: str, make_model: Make) -> None:
    model = make_model(mixer)
    state = model.initial_state(2)
    for call, ids in ((model.step, GOOD[:, 0]), (model.steps, GOOD)):
        with pytest.raises(TypeError, match=r"^in_place: got 'no', expected True or False"):
            call(ids, state, in_place="no")  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"^ids: got device meta, expected that of the model, cpu"):
            call(ids.to("meta"), state)  # type: ignore[operator]


def test_a_state_of_another_batch_or_mixer_is_refused(mixer: str, make_model: Make) -> None:
    model = make_model(mixer)
    with pytest.raises(ValueError, match=r"state.*expected \(2, "):
        model(GOOD, model.initial_state(3))
    with pytest.raises(ValueError, match=r"state.*expected \(2, "):
        model.step(GOOD[:, 0], model.initial_state(3))
    other = make_model("mlstm_exp" if mixer == "attention" else "attention")
    with pytest.raises(TypeError, match=r"^state\[0\]: got "):
        model(GOOD, other.initial_state(2))
    with pytest.raises(ValueError, match=r"ids: got shape \(2, 5\), expected \(B,\)"):
        model.step(GOOD, model.initial_state(2))


def test_importing_tfla_imports_no_layers() -> None:
    code = "import sys, tfla; sys.exit(any(m.startswith('tfla.nn') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tokens_outside_the_vocabulary_are_named(mixer: str, make_model: Make) -> None:
    model = make_model(mixer)
    for ids in (torch.tensor([[0, 23]]), torch.tensor([[5, -1]], dtype=torch.int32)):
        with pytest.raises(
            ValueError, match=r"^ids: got tokens from -?\d+ to \d+, expected from 0 to 22, the vocabulary"
        ):
            model(ids)
        with pytest.raises(ValueError, match=r"^ids: got tokens from"):
            model.step(ids[0], model.initial_state(2))


@pytest.mark.parametrize("device", ["foo", "", "cpu:x", *([] if torch.cuda.is_available() else ["cuda", "cuda:0"])])
def test_missing_devices_are_named(make_model: Make, tmp_path: Path, device: str) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    for call in (
        lambda: model.initial_state(1, device),
        lambda: State.zeros(1, 1, 4, 4, device=device),
        lambda: LanguageModel.from_pretrained(tmp_path, device),
        lambda: load_xlstm(tmp_path, device),
    ):
        with pytest.raises(ValueError, match=rf"^device: got '{device}', expected 'cpu'") as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match=r"^device: got int, expected a torch.device or its name"):
        model.initial_state(1, 0)


def test_the_error_says_why_cuda_is_missing(make_model: Make) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"'cpu': PyTorch (finds no GPU|\S+ was built without CUDA)$"):
        make_model().initial_state(1, "cuda")


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ((-1, 1, 4, 4), ValueError, "batch: got -1, expected at least 0"),
        ((1, 0, 4, 4), ValueError, "heads: got 0, expected at least 1"),
        ((1, 1, 4.0, 4), TypeError, "dqk: got 4.0, expected an int"),
        ((1, 1, 4, "4"), TypeError, "dhv: got '4', expected an int"),
        ((True, 1, 4, 4), TypeError, "batch: got True, expected an int"),
    ],
)
def test_sizes_of_a_state(sizes: tuple, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}$"):
        State.zeros(*sizes)
    with pytest.raises(TypeError, match=r"^dtype: got torch.int64, expected a float dtype$"):
        State.zeros(1, 1, 4, 4, dtype=torch.int64)
    assert torch.compile(State.zeros, fullgraph=True, backend="eager")(1, 1, 4, 4, device="cpu").C.shape == (1, 1, 4, 4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float64])
def test_dtypes_of_a_state(dtype: torch.dtype) -> None:
    C, n, m = State.zeros(2, 1, 4, 4, dtype=dtype)
    assert n is not None
    assert m is not None
    assert (C.dtype, n.dtype, m.dtype) == (dtype, dtype, torch.float64 if dtype.itemsize == 8 else torch.float32)


@pytest.mark.parametrize("batch", [0, -1, 1.0, "2", None])
def test_batches_of_an_initial_state(make_model: Make, batch: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^batch_size: got .*expected "):
        make_model().initial_state(batch)
