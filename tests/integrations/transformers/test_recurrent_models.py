"""The tests of `accelerate` on the models in its table: they give the results of transformers' own path."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import exp, log
from statistics import fmean
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason='pip install "tfla[transformers]"')

import small_models  # noqa: E402

import tfla  # noqa: E402
from tfla.integrations.transformers import accelerate, restore  # noqa: E402
from tfla.integrations.transformers.recurrences import LAYERS  # noqa: E402

MODELS = list(small_models.MODELS)
ONE_EACH = ["mamba2", "qwen3_5", "kimi_linear", "minimax"]  # a model of each recurrence
WIDE: dict[str, dict[str, Any]] = {  # the same with head dims that the kernels of all GPUs take as they are
    "mamba2": {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "state_size": 64},
    "qwen3_5": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "kimi_linear": {"linear_head_dim": 64},
    "minimax": {"head_dim": 64, "num_experts_per_tok": 4},  # all experts, whose choice depends on rounding
}
WITHOUT_GENERATE = ["glm5_next"]  # whose text model has no head
RECURRENT_ONLY = ["granitemoehybrid", "glm5_next"]  # whose attention in PyTorch does not keep packed sequences apart
MAMBA2_FIELDS = {"n_groups", "mamba_n_groups", "mamba_ngroups"}  # each model with Mamba-2 has one of these
EXACT, BOUND = TOLERANCE[torch.float64], TOLERANCE[torch.float32]
Make = Callable[..., Any]
Tokens = Callable[..., Tensor]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that builds a small model of this name, whose own path computes in PyTorch."""

    def build(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
        model = small_models.make_model(name, dtype, **changes)
        small_models.use_torch_functions(monkeypatch, model)
        return model

    return build


@contextmanager
def use_float64() -> Iterator[None]:
    """Make float64 of float32, in which models compute recurrences and norms also where they are in float64."""
    importlib.import_module("torch._inductor.codegen.cpp")  # its tables of dtypes are made at import, by their names
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Make float64 of float32 in the whole test."""
    with use_float64():
        yield


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the model that are in the table."""
    return [module for module in model.modules() if type(module).__name__ in LAYERS]


def results(model: Any, ids: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Return the logits and the gradients of a weighted sum of them."""
    model.zero_grad()
    out = model(ids, **inputs)[0]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    out.backward(cotangent.to(out))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **gradients}


def check(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Check that logits and gradients are equal within the bound."""
    assert found.keys() == expected.keys()
    errors = {name: error(found[name], expected[name]) for name in expected}
    assert all(e <= bound for e in errors.values()), errors


def continued(model: Any, ids: Tensor, first: int, between: Callable[[Any], Any] = lambda model: model) -> Tensor:
    """Return the logits of a prefill of the first tokens and, with its cache, of the others one by one.

    Args:
        model: the model.
        ids: (B, T).
        first: how many tokens are read at once.
        between: what is done to the model after the prefill.
    """
    out = model(ids[:, :first], use_cache=True)
    outs, name = [out[0]], "cache_params" if "cache_params" in out else "past_key_values"
    between(model)
    for t in range(first, ids.shape[1]):
        inputs = {name: out[name], "attention_mask": torch.ones_like(ids[:, : t + 1])}
        if name == "past_key_values":
            inputs["position_ids"] = torch.full_like(ids[:, :1], t)
        out = model(ids[:, t : t + 1], use_cache=True, **inputs)
        outs.append(out[0])
    return torch.cat(outs, 1)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(make: Make, tokens: Tokens, name: str) -> None:
    model, ids = make(name).train(), tokens(2, 37)
    expected = results(model, ids)
    assert expected["out"].std() > 0.1
    check(results(accelerate(model), ids), expected, EXACT)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("name", "changes"), small_models.CHANGES, ids=lambda x: x if isinstance(x, str) else "")
def test_fields_of_configs(make: Make, tokens: Tokens, name: str, changes: dict[str, Any]) -> None:
    """Logits, gradients and steps are equal for biases, groups, limits of time steps, norms, gates and sizes."""
    model, ids = make(name, **changes), tokens(2, 21)
    draws = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # many biases and norms start at 0 or 1
                p.add_(0.2 * torch.randn(p.shape, generator=draws, dtype=p.dtype))
        steps = continued(model, ids, 11)
    expected = results(model, ids)
    check(results(accelerate(model), ids), expected, EXACT)
    with torch.no_grad():
        assert error(continued(model, ids, 11), steps) <= EXACT


@pytest.mark.parametrize("name", MODELS)
def test_float32(make: Make, tokens: Tokens, name: str) -> None:
    model, ids = make(name, torch.float32), tokens(2, 21)
    expected = results(model, ids)
    with torch.no_grad():
        steps = continued(model, ids, 11)
    found = results(accelerate(model), ids)
    assert error(found["out"], expected["out"]) <= BOUND
    assert all(found[name].dtype == torch.float32 for name in expected)
    with torch.no_grad():
        assert error(continued(model, ids, 11), steps) <= BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_logits_and_gradients_on_every_device(
    make: Make, tokens: Tokens, device: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors against the own path in float64 on the CPU are within tolerance, or not far above those of the own path.

    They are at most twice those in the geometric mean over logits and gradients, and ten times for each of them.
    """
    if not hasattr(transformers, small_models.MODELS[name].model):
        pytest.skip(f"transformers {transformers.__version__} has no {small_models.MODELS[name].model}")
    exact, ids = make(name, torch.float32, **WIDE[name]).train(), tokens(2, 37)
    model = copy.deepcopy(exact).to(device, dtype)
    with use_float64():
        truth = results(exact.double(), ids)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the own path's convolutions
    calls: list[torch.device] = []
    for each in ("linear_attention", "delta_rule"):
        own = getattr(tfla, each)
        monkeypatch.setattr(tfla, each, lambda q, *args, own=own, **kw: calls.append(q.device) or own(q, *args, **kw))
    theirs = results(model, ids.to(device))
    assert not calls
    found = results(accelerate(model), ids.to(device))
    assert [each.type for each in calls] == [device] * len(recurrent_layers(model))
    assert found.keys() == theirs.keys() == truth.keys()
    assert all(found[key].dtype == theirs[key].dtype for key in truth)
    errors = {key: (error(found[key].cpu(), x), error(theirs[key].cpu(), x)) for key, x in truth.items()}
    bound = TOLERANCE[dtype]
    assert all(ours <= max(bound, 10 * own) for ours, own in errors.values()), errors
    ours, own = (fmean(log(max(e, 1e-30)) for e in each) for each in zip(*errors.values(), strict=True))
    assert exp(ours) <= max(bound, 2 * exp(own)), errors


@pytest.mark.parametrize("name", ONE_EACH)
def test_bfloat16_is_no_further_from_the_truth(make: Make, tokens: Tokens, name: str) -> None:
    ids = tokens(2, 21)
    with torch.no_grad():
        truth = make(name)(ids)[0]
        model = make(name, torch.bfloat16)
        own, own_steps = model(ids)[0], continued(model, ids, 11)
        found, steps = accelerate(model)(ids)[0], continued(model, ids, 11)
    assert found.dtype == own.dtype
    assert error(found, truth) <= 1.1 * error(own, truth)
    assert error(steps, truth) <= 1.1 * error(own_steps, truth)
    if name != "minimax":  # its states are in float32, with which the own path fails
        with torch.no_grad():
            mixed = continued(model, ids, 11, restore)
        assert error(mixed, truth) <= 1.1 * error(own_steps, truth)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_computes_with_tfla(make: Make, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without this test, a table that replaces nothing would pass the others."""
    calls: Counter[str] = Counter()
    steps = ("linear_attention_step", "linear_attention_steps", "delta_rule_steps")
    for each in ("linear_attention", "delta_rule", *steps):
        own = getattr(tfla, each)
        monkeypatch.setattr(
            tfla, each, lambda *args, own=own, each=each, **kwargs: calls.update([each]) or own(*args, **kwargs)
        )
    model = accelerate(make(name, torch.float32))
    with torch.no_grad():
        continued(model, tokens(1, 8), 7)
    count = len(recurrent_layers(model))
    assert count >= 2
    assert calls["linear_attention"] + calls["delta_rule"] == count
    assert sum(calls[each] for each in steps) == count


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_padding(make: Make, tokens: Tokens, name: str, side: str) -> None:
    model, ids, mask = make(name), tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, slice(0, 9) if side == "left" else slice(12, 21)] = 0
    ids = ids * mask
    positions = (mask.cumsum(1) - 1).clamp(0)
    inputs = {"attention_mask": mask} | ({} if name == "mamba2" else {"position_ids": positions})
    with torch.no_grad():
        expected = model(ids, **inputs)[0][mask.bool()]
        found = accelerate(model)(ids, **inputs)[0][mask.bool()]
    assert error(found, expected) <= EXACT


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_steps(make: Make, tokens: Tokens, name: str) -> None:
    model, ids = make(name), tokens(2, 21)
    with torch.no_grad():
        expected = continued(model, ids, 11)
        assert error(continued(accelerate(model), ids, 11), expected) <= EXACT


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_outlives_the_change_of_the_path(make: Make, tokens: Tokens, name: str) -> None:
    model, ids = make(name), tokens(2, 16)
    with torch.no_grad():
        expected = continued(model, ids, 11)
        assert error(continued(model, ids, 11, accelerate), expected) <= EXACT
        assert error(continued(model, ids, 11, restore), expected) <= EXACT


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", [name for name in MODELS if small_models.MODELS[name].fields.keys() & MAMBA2_FIELDS])
def test_gradients_pass_through_a_cache_of_mamba2(make: Make, tokens: Tokens, name: str) -> None:
    """They are those of whole sequences. In other models the cache overwrites inputs of convolutions, an error."""
    model, ids = accelerate(make(name)), tokens(2, 14)
    cotangent = torch.randn(2, 14, 61, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = torch.autograd.grad((model(ids)[0] * cotangent).sum(), list(model.parameters()))
    outs, cache = [], dict[str, Any]()
    for a, b in ((0, 6), (6, 14)):
        # Some models do not count the tokens of a cache that begins with a recurrent layer.
        positions = {"position_ids": torch.arange(a, b)[None]} if "past_key_values" in cache else {}
        out = model(ids[:, a:b], use_cache=True, **cache, **positions)
        cache = {key: out[key] for key in ("cache_params", "past_key_values") if key in out}
        outs.append(out[0])
    found = torch.autograd.grad((torch.cat(outs, 1) * cotangent).sum(), list(model.parameters()))
    errors = {n: error(o, e) for (n, _), o, e in zip(model.named_parameters(), found, expected, strict=True)}
    assert all(e <= EXACT for e in errors.values()), errors


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_GENERATE])
def test_generate(make: Make, tokens: Tokens, name: str) -> None:
    model, prompt, mask = make(name), tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(prompt * mask, **options)
    assert torch.equal(accelerate(model).generate(prompt * mask, **options), expected)


@pytest.mark.parametrize("name", MODELS)
def test_restore_undoes_it_exactly(make: Make, tokens: Tokens, name: str) -> None:
    model, ids = make(name, torch.float32), tokens(2, 13)
    before = [dict(vars(module)) for module in model.modules()]
    with torch.no_grad():
        expected = model(ids)[0]
    names = list(model.state_dict())
    assert accelerate(accelerate(model)) is model
    twin = copy.deepcopy(model)
    assert list(model.state_dict()) == names
    for layer in recurrent_layers(twin):
        assert layer.forward.__self__ is layer
    for each in (model, twin):
        assert restore(restore(each)) is each
        with torch.no_grad():
            assert torch.equal(each(ids)[0], expected)
    assert [vars(module).keys() for module in model.modules()] == [attributes.keys() for attributes in before]


@pytest.mark.parametrize("name", [*ONE_EACH, "bamba"])
def test_copies_and_pickles_compute_with_tfla(make: Make, tokens: Tokens, name: str) -> None:
    model, ids = accelerate(make(name, torch.float32)), tokens(2, 13)
    with torch.no_grad():
        expected = model(ids)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layers = recurrent_layers(other)
        assert layers
        for layer, own in zip(layers, recurrent_layers(model), strict=True):
            assert layer.forward.__self__ is layer
            assert layer.forward.__func__ is own.forward.__func__
        with torch.no_grad():
            assert torch.equal(other(ids)[0], expected)
        restore(other)
        assert not any("forward" in vars(layer) for layer in layers)


def test_a_pickle_of_another_version_of_transformers_warns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerate(make("mamba2", torch.float32))
    kept, kind = pickle.dumps(model), type(recurrent_layers(model)[0])
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    with pytest.warns(UserWarning, match=r"^accelerate: a copied Mamba2Mixer computes with transformers again, whose"):
        layer = recurrent_layers(pickle.loads(kept))[0]
    assert layer(3) == 3


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("form", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences(make: Make, tokens: Tokens, name: str, form: str) -> None:
    """Each sequence has the logits that it has alone; without packages for GPUs the own path refuses them."""
    changes = {"layer_types": ["linear_attention"] * 3} if name in RECURRENT_ONLY else {}
    model, ids = accelerate(make(name, **changes)), tokens(1, 24)
    if name == "mamba2":
        model = model.backbone  # the model with a head passes on no such arguments
    lengths = [3, 1, 11, 9]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    index = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    offsets = torch.tensor([0, 3, 4, 15, 24], dtype=torch.int32)
    inputs: dict[str, Any] = {"seq_idx": index.int()} if form == "seq_idx" else {"cu_seq_lens_q": offsets}
    if name != "mamba2":
        inputs["position_ids"] = positions
    with torch.no_grad():
        found = model(ids, use_cache=False, **inputs)[0]
        alone = torch.cat([model(each, use_cache=False)[0] for each in ids.split(lengths, 1)], 1)
    assert error(found, alone) <= EXACT


@pytest.mark.parametrize("name", ONE_EACH)
def test_gradient_checkpointing_and_autocast(make: Make, tokens: Tokens, name: str) -> None:
    model, ids = accelerate(make(name, torch.float32)).train(), tokens(2, 19)
    expected = results(model, ids, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(results(model, ids, use_cache=False), expected, BOUND)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(model, ids, use_cache=False)
    assert error(found["out"], expected["out"]) <= 5 * TOLERANCE[torch.bfloat16]


def test_torch_compile_finds_no_graph_break(make: Make, tokens: Tokens) -> None:
    model, ids = accelerate(make("mamba2", torch.float32, num_hidden_layers=1)), tokens(2, 19)
    with torch.no_grad():
        expected = model(ids, use_cache=False)[0]
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert error(compiled(ids, use_cache=False)[0], expected) <= BOUND


def test_hooks_of_the_package_accelerate(make: Make, tokens: Tokens) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = make("mamba2"), tokens(1, 9)
    before, after = recurrent_layers(model)[:2]
    with torch.no_grad():
        expected = model(ids)[0]
        hooks.add_hook_to_module(before, hooks.ModelHook())
        accelerate(model)
        hooks.add_hook_to_module(after, hooks.ModelHook())
        found = model(ids)[0]
        assert 0 < error(found, expected) <= BOUND
        hooks.remove_hook_from_module(after)
        assert torch.equal(model(ids)[0], found)
        assert torch.equal(restore(model)(ids)[0], expected)


@pytest.mark.parametrize("name", ["MambaForCausalLM", "JambaForCausalLM"])
def test_a_recurrence_that_tfla_does_not_compute(name: str) -> None:
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8, "state_size": 4, "num_experts": 1}
    if name.startswith("Jamba"):
        fields |= {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = getattr(transformers, name)(getattr(transformers, name.replace("ForCausalLM", "Config"))(**fields))
    for call in (accelerate, restore):
        with pytest.raises(TypeError, match=rf"^model: got {name}, whose .* is a .*MambaMixer: Mamba has a decay"):
            call(model)


@pytest.mark.parametrize(("name", "layer"), [("Rwkv", "RwkvSelfAttention"), ("RecurrentGemma", "RecurrentGemmaRglru")])
def test_a_state_that_is_a_vector(name: str, layer: str) -> None:
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 8, "num_attention_heads": 2, "head_dim": 8}
    fields |= {"attention_hidden_size": 16, "lru_width": 16, "intermediate_size": 16, "num_key_value_heads": 1}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**fields))
    with pytest.raises(
        TypeError, match=rf"^model: got {name}ForCausalLM, whose .* is a {layer}: its state is a vector"
    ):
        accelerate(model)


def test_a_model_without_a_recurrence() -> None:
    with pytest.raises(TypeError, match=r"^model: got Linear, expected an xLSTM.* BambaMixer, "):
        accelerate(nn.Linear(1, 1))


@pytest.mark.parametrize("options", [{"chunk_size": 8}, {"backend": "reference"}], ids=["chunk_size", "backend"])
def test_options_of_xlstm_alone(make: Make, options: dict[str, Any]) -> None:
    model = make("mamba2")
    (name,) = options
    with pytest.raises(
        ValueError, match=rf"^{name}: got .* with backbone.layers.0.mixer \(Mamba2Mixer\), expected None"
    ):
        accelerate(model, **options)
    assert all("forward" not in vars(layer) for layer in recurrent_layers(model))


def test_another_version_of_transformers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mamba2")
    monkeypatch.setattr(type(recurrent_layers(model)[0]), "forward", lambda self, hidden_states: hidden_states)
    message = r"^model: got backbone.layers.0.mixer \(Mamba2Mixer\) of transformers .* does not call mamba2_chunk_scan"
    with pytest.raises(ValueError, match=message):
        accelerate(model)


def test_a_class_of_the_same_name_from_elsewhere() -> None:
    layer = type("MiniMaxLightningAttention", (nn.Identity,), {})()
    with pytest.raises(ValueError, match=r"^model: got 0 of class .*MiniMaxLightningAttention, expected the class of"):
        accelerate(nn.Sequential(layer))


def test_a_forward_that_another_program_has_replaced(make: Make) -> None:
    model = make("mamba2")
    recurrent_layers(model)[0].forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(ValueError, match=r"^model: got a Mamba2Mixer whose forward another program has replaced"):
        accelerate(model)


@pytest.mark.parametrize(("accelerated", "at"), [(False, -1), (True, 0)], ids=["own", "accelerated"])
def test_a_model_that_is_refused_stays_as_it_was(make: Make, tokens: Tokens, accelerated: bool, at: int) -> None:
    model, ids = make("mamba2"), tokens(1, 9)
    if accelerated:
        accelerate(model)
    layers = recurrent_layers(model)
    forward = layers[at].forward
    layers[at].forward = lambda *args, **kwargs: forward(*args, **kwargs)
    before = [vars(layer).get("forward") for layer in layers]
    with torch.no_grad():
        expected = model(ids)[0]
        with pytest.raises(ValueError, match=r"^model: got a Mamba2Mixer whose forward another program has replaced"):
            accelerate(model)
        assert [vars(layer).get("forward") for layer in layers] == before
        assert torch.equal(model(ids)[0], expected)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("form", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("name", ["bamba", "qwen3_5", "kimi_linear"])
def test_packed_sequences_after_a_cache(make: Make, tokens: Tokens, name: str, form: str) -> None:
    model, ids = accelerate(make(name)), tokens(1, 20)
    with torch.no_grad():
        expected = model(ids, use_cache=False)[0][:, 12:]
        cache = model(ids[:, :12], use_cache=True).past_key_values
        inputs = {"past_key_values": cache, "use_cache": True, "position_ids": torch.arange(12, 20)[None]}
        if form == "seq_idx":
            with pytest.raises(ValueError, match=r"^seq_idx: got 8 steps for 12 steps with those of the cache, expect"):
                model(ids[:, 12:], seq_idx=torch.zeros(1, 8, dtype=torch.int32), **inputs)
        else:
            found = model(ids[:, 12:], cu_seq_lens_q=torch.tensor([0, 8], dtype=torch.int32), **inputs)[0]
            assert error(found, expected) <= EXACT


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("offsets", [[0, 5, 8], [0, 1, 8, 8], [0, 0, 8]], ids=str)
def test_several_packed_sequences_after_a_cache(make: Make, tokens: Tokens, offsets: list[int]) -> None:
    """The cache belongs to the first of them; layers that have no such state for the others refuse them."""
    ids, packed = tokens(1, 20), {"cu_seq_lens_q": torch.tensor(offsets, dtype=torch.int32)}
    first = 12 + offsets[1]
    model = accelerate(make("mamba2")).backbone
    with torch.no_grad():
        parts = [model(each, use_cache=False)[0] for each in (ids[:, :first], ids[:, first:])]
        cache = model(ids[:, :12], use_cache=True).cache_params
        found = model(ids[:, 12:], cache_params=cache, use_cache=True, **packed)[0]
        assert error(found, torch.cat(parts, 1)[:, 12:]) <= EXACT
        model = accelerate(make("qwen3_5"))
        cache = model(ids[:, :12], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"^initial_state\.C: got shape \(1, .*, expected \([23], "):
            model(ids[:, 12:], past_key_values=cache, use_cache=True, **packed)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("offsets", [[0, 3], [0, 1, 3], [0, 2, 3, 3]], ids=str)
def test_packed_prompt_shorter_than_the_convolution(make: Make, tokens: Tokens, offsets: list[int]) -> None:
    """A new cache pads it on the left."""
    model, ids = accelerate(make("mamba2")).backbone, tokens(1, 3)
    packed = {"cu_seq_lens_q": torch.tensor(offsets, dtype=torch.int32)}
    with torch.no_grad():
        found = model(ids, use_cache=True, **packed)[0]
        assert error(found, model(ids, use_cache=False, **packed)[0]) <= EXACT
