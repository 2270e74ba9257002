"""The tests of `accelerate`: models give the results of transformers' own path."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from plain_transformers import xLSTMCache
from torch import Tensor, nn

from tfla.integrations.transformers import accelerate, restore
from tfla.integrations.transformers.cell import Cell

Make = Callable[..., Any]
Tokens = Callable[..., Tensor]
CONFIGS: dict[str, dict[str, Any]] = {
    "7B's": {},
    "fused": {"weight_mode": "fused"},
    "biases": {"use_bias": True, "norm_reduction_force_float32": False},
    "one head, wide keys": {"num_heads": 1, "qk_dim_factor": 1.0, "gate_soft_cap": 3.0},
    "wide values": {"v_dim_factor": 2.0, "chunk_size": 32, "output_logit_soft_cap": 5.0},
    "train mode": {"mode": "train"},
}
WITH_XLSTM = """
import sys
import torch
from tfla.integrations.transformers import accelerate, restore
assert "transformers" not in sys.modules
from transformers import xLSTMConfig, xLSTMForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=61, hidden_size=128, num_hidden_layers=2, num_blocks=2, num_heads=4, chunk_size=16)
model = xLSTMForCausalLM(xLSTMConfig(**sizes))
assert type(model.backbone.blocks[0].mlstm_layer.mlstm_backend).__module__.startswith("mlstm_kernels")
with torch.no_grad():
    for p in model.parameters():
        p.add_(0.1 * torch.randn_like(p))
ids = torch.randint(61, (2, 32))

def results():
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), model.backbone.embeddings.weight.grad.clone(), model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
    )

expected = results()
accelerate(model)
found = results()
restore(model)
assert torch.equal(results()[0], expected[0])
errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found[:2], expected[:2])]
print(*errors, torch.equal(found[2], expected[2]))
"""
EXACT = {"norm_reduction_force_float32": False}  # norms in float64 stay in float64


def gradients(model: Any, ids: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Return logits, loss and the gradients, concatenated for each module with parameters.

    The gradient of an input gate's bias nearly cancels, so that by itself it would have a large relative error.
    """
    model.zero_grad()
    out = model(ids, labels=ids, **{"use_cache": False} | inputs)
    out.loss.backward()
    found = {}
    for name, module in model.named_modules():
        if own := [p.grad.flatten() for p in module.parameters(recurse=False)]:
            found[name] = torch.cat(own)
    return found | {"logits": out.logits.detach(), "loss": out.loss.detach()}


def log_error(found: Tensor, exact: Tensor) -> float:
    """Return the logarithm of the relative error."""
    return log(max(float(error(found, exact)), torch.finfo(torch.float32).tiny))


def check(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare tensors by name."""
    assert found.keys() == expected.keys()
    wrong = {name: e for name, x in expected.items() if not (e := error(found[name], x)) <= tolerance}
    assert not wrong, wrong


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_gradients_are_the_librarys(
    make_xlstm: Make, tokens: Tokens, device: str, fields: dict[str, Any]
) -> None:
    """Errors against transformers in float64 are at most twice those of transformers in float32, or within tolerance.

    This is checked in the geometric mean over inputs. For a single input, where small denominators amplify rounding,
    the error may be up to ten times that of transformers.
    """
    exact, model = make_xlstm(torch.float64, device, **fields | EXACT), make_xlstm(device=device, **fields)
    accelerated = accelerate(make_xlstm(device=device, **fields))
    logs: dict[str, list[tuple[float, float]]] = {}
    for seed in range(12):
        ids = tokens(2, 64, seed=seed).to(device)
        truth, library, found = (gradients(m, ids) for m in (exact, model, accelerated))
        assert truth["logits"].std() > 0.1
        for name, x in truth.items():
            logs.setdefault(name, []).append((log_error(found[name], x), log_error(library[name], x)))
    for name, each in logs.items():
        assert all(exp(own) <= max(TOLERANCE[torch.float32], 10 * exp(other)) for own, other in each), name
        ours, theirs = (exp(fmean(e)) for e in zip(*each, strict=True))
        assert ours <= max(TOLERANCE[torch.float32], 2 * theirs), name
    check(gradients(restore(accelerated), ids), library, TOLERANCE[torch.float32])


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_in_float64_nothing_is_left_but_eps(make_xlstm: Make, tokens: Tokens, fields: dict[str, Any]) -> None:
    ids = tokens(2, 64)
    for eps, tolerance in ((0.0, 1e-10), (1e-6, 1e-7)):
        model = make_xlstm(torch.float64, eps=eps, **fields | EXACT).backbone
        expected = model(ids, use_cache=False).last_hidden_state
        found = accelerate(model)(ids, use_cache=False).last_hidden_state
        assert error(found, expected) <= tolerance


@pytest.mark.parametrize("steps", [1, 2, 15, 17, 37])
def test_any_length_whole_split_and_token_by_token(make_xlstm: Make, tokens: Tokens, device: str, steps: int) -> None:
    model, ids = make_xlstm(device=device), tokens(2, steps).to(device)
    with torch.no_grad():
        expected = model(ids, use_cache=True)
        accelerate(model)
        whole = model(ids, use_cache=True)
        logits, cache = [], None
        for part in (ids[:, : steps // 2], *ids[:, steps // 2 :].split(1, 1)):
            if part.shape[1]:
                out = model(part, cache_params=cache, use_cache=True)
                cache = out.cache_params
                logits.append(out.logits)
    bound = 5 * TOLERANCE[torch.float32]
    assert error(whole.logits, expected.logits) <= bound
    assert error(torch.cat(logits, 1), expected.logits) <= bound
    for layer, (C, n, m) in expected.cache_params.rnn_state.items():
        for found in (whole.cache_params, cache):
            c, k, scale = found.rnn_state[layer]
            assert scale.shape == m.shape
            assert error(c * torch.exp(scale - m)[..., None], C) <= bound
            assert error(k * torch.exp(scale - m), n) <= bound
    assert int(cache.seqlen_offset) == steps


def test_training_takes_any_length_in_every_mode(make_xlstm: Make, tokens: Tokens) -> None:
    """transformers' mode "train" needs multiples of its chunk size, and its "train_with_padding" fails in the layer."""
    ids = tokens(2, 19)
    expected = gradients(make_xlstm(), ids)
    for fields in ({"mode": "train", "return_last_states": False}, {"mode": "train_with_padding"}):
        check(gradients(accelerate(make_xlstm(**fields)), ids), expected, 5 * TOLERANCE[torch.float32])


def test_training_goes_through_a_cache(make_xlstm: Make, tokens: Tokens) -> None:
    """A sequence that is split, with a cache between the parts, has the gradients of the whole sequence."""
    model, ids = accelerate(make_xlstm()), tokens(2, 24)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    cotangent = torch.randn(2, 24, 61, generator=torch.Generator().manual_seed(1))
    whole = torch.autograd.grad(model(inputs_embeds=embedded, use_cache=False).logits, embedded, cotangent)[0]
    first = model(inputs_embeds=embedded[:, :9], use_cache=True)
    then = model(inputs_embeds=embedded[:, 9:23], cache_params=first.cache_params, use_cache=True)
    last = model(inputs_embeds=embedded[:, 23:], cache_params=then.cache_params, use_cache=True)
    logits = torch.cat([first.logits, then.logits, last.logits], 1)
    assert error(torch.autograd.grad(logits, embedded, cotangent)[0], whole) <= TOLERANCE[torch.float32]


def test_checkpointing_goes_through_a_cache(make_xlstm: Make, tokens: Tokens) -> None:
    """The backward computes a block again from the state of its call, which the model has overwritten since."""
    model, ids = accelerate(make_xlstm(torch.float64)).train(), tokens(2, 24)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    cotangent = torch.randn(2, 24, 61, generator=torch.Generator().manual_seed(1))
    whole = torch.autograd.grad(model(inputs_embeds=embedded, use_cache=False).logits, embedded, cotangent)[0]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    cache = xLSTMCache(model.config, 2, dtype=torch.float64)
    parts = [model(inputs_embeds=part, cache_params=cache).logits for part in embedded.split((9, 14, 1), 1)]
    found = torch.autograd.grad(torch.cat(parts, 1), embedded, cotangent)[0]
    assert error(found, whole) <= TOLERANCE[torch.float32]


def test_generate(make_xlstm: Make, tokens: Tokens, device: str) -> None:
    model, prompt = make_xlstm(device=device), tokens(3, 21).to(device)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    assert torch.equal(accelerate(model).generate(prompt, **options), expected)
    assert torch.equal(model.generate(prompt, use_cache=False, **options), expected)


def test_a_cache_outlives_restore(make_xlstm: Make, tokens: Tokens) -> None:
    model, ids = make_xlstm(), tokens(2, 20)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 16:]
        cache = accelerate(model)(ids[:, :16], use_cache=True).cache_params
        found = restore(model)(ids[:, 16:], cache_params=cache).logits
    assert error(found, expected) <= 5 * TOLERANCE[torch.float32]


def test_a_bfloat16_cache_keeps_the_scale_of_its_states(make_xlstm: Make, tokens: Tokens) -> None:
    """Rounding m near 15 to bfloat16 changes exp(m) by up to 3 %, which the scale of C and n has to correct."""
    model, ids = accelerate(make_xlstm()), tokens(2, 33)
    for block in model.backbone.blocks:
        block.mlstm_layer.igate_preact.bias.data.add_(12)
    exact, rounded = (xLSTMCache(model.config, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():
        for cache in (exact, rounded):
            model(ids, cache_params=cache, use_cache=True)
    for (C, n, m), (rounded_C, rounded_n, rounded_m) in zip(
        exact.rnn_state.values(), rounded.rnn_state.values(), strict=True
    ):
        assert rounded_m.dtype == torch.bfloat16
        assert (rounded_m - m).abs().max() > 0.01
        assert error(rounded_C * torch.exp(rounded_m - m)[..., None], C) <= TOLERANCE[torch.bfloat16] / 2
        assert error(rounded_n * torch.exp(rounded_m - m), n) <= TOLERANCE[torch.bfloat16] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_cache_has_the_dtype_that_the_config_says(make_xlstm: Make, tokens: Tokens, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    model = accelerate(make_xlstm(torch.bfloat16, inference_state_dtype=name))
    with torch.no_grad():
        cache = model(tokens(2, 5), use_cache=True).cache_params
    assert {x.dtype for state in cache.rnn_state.values() for x in state} == {dtype}


def test_a_layer_by_itself_leaves_its_state_alone(make_xlstm: Make) -> None:
    block = accelerate(make_xlstm()).backbone.blocks[0]
    state = (torch.ones(2, 4, 16, 32), torch.ones(2, 4, 16), torch.ones(2, 4, 1))
    with torch.no_grad():
        _, new = block(torch.randn(2, 1, 128), state)
    assert all(bool((x == 1).all()) for x in state)
    assert not any(bool((x == 1).all()) for x in new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_from_the_truth(
    make_xlstm: Make, tokens: Tokens, device: str, dtype: torch.dtype
) -> None:
    """The head dims are those of the Hopper kernels."""
    wide, ids = {"hidden_size": 512, "num_heads": 2}, tokens(2, 64).to(device)
    with torch.no_grad():
        truth = make_xlstm(torch.float64, device, **wide)(ids, use_cache=False).logits
        library = make_xlstm(dtype, device, **wide)(
            ids, use_cache=True
        ).logits  # without a cache it mixes dtypes and fails
        found = accelerate(make_xlstm(dtype, device, **wide))(ids, use_cache=False).logits
    assert error(found, truth) <= 1.1 * error(library, truth)


def test_autocast_and_checkpointing(make_xlstm: Make, tokens: Tokens, device: str) -> None:
    model, ids = accelerate(make_xlstm(device=device)).train(), tokens(2, 19).to(device)
    expected = gradients(model, ids)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        check(gradients(model, ids), expected, TOLERANCE[torch.float32])
    with torch.autocast(device, torch.bfloat16):
        found = gradients(model, ids)
    assert error(found["logits"], expected["logits"]) <= 5 * TOLERANCE[torch.bfloat16]


def test_more_tokens_than_the_library_reads_at_once(make_xlstm: Make, tokens: Tokens, device: str) -> None:
    ids = tokens(2, 40).to(device)
    model = accelerate(make_xlstm(torch.float64, device, max_inference_chunksize=16))
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
        model.config.max_inference_chunksize = 64
        assert error(found, model(ids, use_cache=False).logits) <= TOLERANCE[torch.float32]


def test_what_is_saved_is_what_the_library_saves(make_xlstm: Make, tmp_path: Path) -> None:
    model = make_xlstm()
    names = [name for name, _ in model.named_modules()]
    model.save_pretrained(tmp_path / "before")
    accelerate(model).save_pretrained(tmp_path / "after")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    assert [name for name, _ in model.named_modules()] == names
    loaded = type(model).from_pretrained(tmp_path / "after")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_options_and_undoing(make_xlstm: Make, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_xlstm(), tokens(1, 5)
    originals = [block.mlstm_layer.mlstm_backend for block in model.backbone.blocks]
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "tfla.integrations.transformers.cell.mlstm",
        lambda q, k, v, i, f, **options: calls.append(options) or v,
    )
    monkeypatch.setattr(Cell, "_returns_states", lambda *_: False)
    assert accelerate(model) is model
    assert accelerate(model, chunk_size=8, backend="reference") is model
    model(ids, use_cache=False)
    assert [(o["chunk_size"], o["backend"]) for o in calls] == [(8, "reference")] * 2
    twin = copy.deepcopy(model)
    for each in (model, twin):
        assert restore(restore(each)) is each
        assert not any(isinstance(module, Cell) for module in each.modules())
        assert not each.backbone._forward_pre_hooks
        assert not each.backbone._forward_hooks
    assert [block.mlstm_layer.mlstm_backend for block in model.backbone.blocks] == originals


def test_a_cell_swallows_no_argument(make_xlstm: Make) -> None:
    cell = accelerate(make_xlstm()).backbone.blocks[0].mlstm_layer.mlstm_backend
    q, k, v, i, f = (torch.randn(1, 2, 5, *dims) for dims in ((4,), (4,), (4,), (), ()))
    given = dict(zip(cell.input_names, (q, k, v, i, f), strict=True))
    assert cell(**given)[0].shape == v.shape
    with pytest.raises(TypeError, match=r"^chunk_size: got an unknown argument, expected one of "):
        cell(**given, chunk_size=8)
    with pytest.raises(ValueError, match=r"^c_initial, n_initial, m_initial: got some of them"):
        cell(**given, c_initial=torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"^mode: got 'serve'"):
        cell(**given, mode="serve")


def test_a_model_inside_another_module(make_xlstm: Make, tokens: Tokens) -> None:
    inner, ids = make_xlstm().backbone, tokens(1, 7)
    accelerate(nn.Sequential(inner))
    assert isinstance(inner.blocks[0].mlstm_layer.mlstm_backend, Cell)
    assert torch.isfinite(inner(ids).last_hidden_state).all()


@pytest.mark.parametrize("wrong", [nn.Linear(1, 1), "xlstm"], ids=["module", "string"])
def test_without_an_xlstm(wrong: Any) -> None:
    for call in (accelerate, restore):
        with pytest.raises(TypeError, match=f"model: got {type(wrong).__name__}, expected an xLSTMForCausalLM"):
            call(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nope"}, r"^backend: got 'nope', expected None or one of .*'chunkwise'"),
        ({"backend": ["chunkwise"]}, r"^backend: got \['chunkwise'\], expected None or one of "),
        ({"chunk_size": 0}, r"^chunk_size: got 0, expected at least 1"),
        ({"chunk_size": "64"}, r"^chunk_size: got str, expected an int or None"),
    ],
)
def test_options_that_there_are_not(make_xlstm: Make, options: dict[str, Any], message: str) -> None:
    """The error is raised before any layer is changed."""
    model = make_xlstm()
    with pytest.raises((TypeError, ValueError), match=message):
        accelerate(model, **options)
    assert not any(isinstance(module, Cell) for module in model.modules())


def test_kernels_of_another_form_are_refused(make_xlstm: Make) -> None:
    model = make_xlstm()
    # A config knows this name where the xlstm package is installed.
    model.config.__dict__["chunkwise_kernel"] = "chunkwise--triton_xl_chunk_siging"
    with pytest.raises(ValueError, match="chunkwise_kernel: got 'chunkwise--triton_xl_chunk_siging'"):
        accelerate(model)


def test_without_transformers_the_extra_is_named(make_xlstm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_xlstm()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "tfla\[transformers\]"'):
        accelerate(model)


def test_with_the_xlstm_package(tmp_path: Path) -> None:
    """Where xlstm is installed, transformers builds its layers from that package, with other names of arguments."""
    if importlib.util.find_spec("xlstm") is None:
        pytest.skip("xlstm is not installed")
    script = tmp_path / "script.py"
    script.write_text(WITH_XLSTM)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    logits, gradient, same = done.stdout.split()[-3:]
    assert float(logits) <= 5 * TOLERANCE[torch.float32]
    assert float(gradient) <= 5 * TOLERANCE[torch.float32]
    assert same == "True"


def test_what_fails_on_the_librarys_own_path(make_xlstm: Make, tokens: Tokens) -> None:
    """These are the failures that docs/transformers.md lists; one that transformers mends has to leave the list."""
    ids = tokens(2, 19)
    with pytest.raises(ValueError, match="not divisible by chunk size"):
        make_xlstm(mode="train")(ids, use_cache=False)
    with pytest.raises(ValueError, match="return_last_states=True is not supported"):
        make_xlstm(mode="train_with_padding")(ids, use_cache=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        make_xlstm()(ids, labels=ids, use_cache=True).loss.backward()
    with pytest.raises(RuntimeError, match="same dtype"):
        make_xlstm(torch.bfloat16)(ids, use_cache=False)
    model, mask = make_xlstm(), torch.ones_like(ids)
    mask[:, :9] = 0
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, model(ids).logits)
        model.config.max_inference_chunksize = 8
        cache = model(ids, use_cache=False).cache_params
    assert cache.rnn_state[0][0].dtype == torch.bfloat16
