"""The modules of flax.nnx give what tfla.nn gives from the same files, and train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import tfla.nn
from tfla.jax.nn import LanguageModel
from tfla.nn import ModelConfig

B, T = 2, 30


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(
        **{"d_model": 32, "num_blocks": 2, "num_heads": 4, "vocab_size": 50, "ffn_multiple": 16} | fields
    )


def torch_model(dtype: torch.dtype = torch.float32, **fields: Any) -> tfla.nn.LanguageModel:
    """A model of PyTorch, whose gates are not the constants that they start as."""
    torch.manual_seed(0)
    model = tfla.nn.LanguageModel(config(**fields)).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "gate.weight" in name or "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def ids() -> Any:
    return np.random.default_rng(0).integers(0, 50, (B, T))


def near(found: Any, expected: Any, tolerance: float = 2e-6) -> None:
    expected = expected.detach().double().numpy() if isinstance(expected, torch.Tensor) else np.asarray(expected)
    assert np.linalg.norm(np.asarray(found, np.float64) - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.float32),
        ({"mixer": "mlstm_sig", "head_norm": "rms"}, torch.float32),
        ({"input_gate_trainable": False, "backend": "triton"}, torch.float64),
    ],
    ids=str,
)
def test_logits_are_those_of_pytorch(tmp_path: Path, fields: dict[str, Any], dtype: torch.dtype) -> None:
    ours = torch_model(dtype, **fields)
    ours.save_pretrained(tmp_path)
    model = LanguageModel.from_pretrained(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"directory: got .* `tfla train`"):
        model.save_pretrained(tmp_path / "run")
    assert model.num_parameters() == ours.num_parameters()
    tokens = ids()
    reference = tfla.nn.LanguageModel.from_pretrained(tmp_path, backend=None)
    expected, torch_state = reference(torch.from_numpy(tokens), return_state=True)
    logits, state = nnx.jit(lambda model, x: model(x, return_state=True))(model, jnp.asarray(tokens))
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    near(logits, expected, tolerance)
    for a, b in zip(state, torch_state, strict=True):
        weight = 1.0 if b.m is None else torch.exp(b.m.double())[..., None, None]
        own = 1.0 if a.m is None else np.exp(np.asarray(a.m, np.float64))[..., None, None]
        near(np.asarray(a.C, np.float64) * own, b.C.double() * weight, 2 * tolerance)


def test_documents_states_and_steps(tmp_path: Path) -> None:
    """Parts of a sequence, single tokens and documents give the logits of the whole."""
    torch_model().save_pretrained(tmp_path)
    model = LanguageModel.from_pretrained(tmp_path)
    run = nnx.jit(lambda model, x, state: model(x, state, return_state=True))
    tokens = jnp.asarray(ids())
    whole, last = run(model, tokens, model.initial_state(B))
    first, state = run(model, tokens[:, :15], model.initial_state(B))
    second, after = run(model, tokens[:, 15:], state)
    near(jnp.concatenate([first, second], 1), whole)
    near(after[1].n * jnp.exp(after[1].m)[..., None], last[1].n * jnp.exp(last[1].m)[..., None])
    step = nnx.jit(lambda model, x, state: model.step(x, state))
    stepped, _ = step(model, tokens[:, 15], state)
    near(stepped, whole[:, 15])
    starts = jnp.zeros((B, T), bool).at[:, 15].set(True)
    near(nnx.jit(lambda model, x, d: model(x, document_start=d))(model, tokens, starts)[:, 15:],
         run(model, tokens[:, 15:], model.initial_state(B))[0])  # fmt: skip
    packed = nnx.jit(lambda model, x, at: model(x, cu_seqlens=at))(model, tokens[:1], jnp.array([0, 15, T]))
    near(packed[:, :15], first[:1])


def test_files_go_both_ways(tmp_path: Path) -> None:
    model = LanguageModel(config(input_gate_trainable=False), rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path / "a")
    loaded = tfla.nn.LanguageModel.from_pretrained(tmp_path / "a")
    near(nnx.jit(lambda model, x: model(x))(model, jnp.asarray(ids())), loaded(torch.from_numpy(ids())))
    loaded.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()
    again = LanguageModel.from_pretrained(tmp_path / "b", param_dtype=jnp.bfloat16)
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(again))} == {"bfloat16"}
    std = model.blocks[0].mixer.q_proj.kernel[...].std()
    assert abs(std / np.sqrt(2 / (5 * 32)) - 1) < 0.1


def test_gradients_are_those_of_pytorch(tmp_path: Path) -> None:
    """Frozen weights have none."""
    ours = torch_model(input_gate_trainable=False)
    ours.save_pretrained(tmp_path)
    model = LanguageModel.from_pretrained(tmp_path)
    tokens = ids()
    ours(torch.from_numpy(tokens)).logsumexp(-1).sum().backward()
    grads = nnx.jit(nnx.grad(lambda model, x: jax.nn.logsumexp(model(x), -1).sum()))(model, jnp.asarray(tokens))
    flat = {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(grads)}
    assert not any("input_gate" in name for name in flat)
    expected = dict(ours.named_parameters())
    for name in ("blocks.0.mixer.k_proj", "blocks.1.mixer.forget_gate", "blocks.0.ffn.down_proj", "unembedding"):
        near(flat[f"{name}.kernel"].T, expected[f"{name}.weight"].grad, 2e-5)
    near(flat["blocks.0.mixer_norm.scale"], expected["blocks.0.mixer_norm.weight"].grad, 2e-5)
    near(flat["embedding.embedding"], expected["embedding.weight"].grad, 2e-5)


def test_bfloat16_activations_keep_float32_logits() -> None:
    model = LanguageModel(config(), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    logits = nnx.jit(lambda model, x: model(x))(model, jnp.asarray(ids()))
    assert logits.dtype == jnp.float32
    model32 = LanguageModel(config(), rngs=nnx.Rngs(0))
    near(logits, nnx.jit(lambda model, x: model(x))(model32, jnp.asarray(ids())), 2e-2)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^mixer: got 'lstm'"):
        LanguageModel(config(mixer="lstm"), rngs=nnx.Rngs(0))
    model = LanguageModel(config(), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^ids: got list, expected an array of integers"):
        model([1, 2])
    with pytest.raises(ValueError, match=r"^ids: got shape \(3,\), expected \(B, T\)"):
        model(jnp.zeros(3, int))
    vocab = model.config.vocab_size
    for token in (-1, vocab):
        text = (
            rf"^ids: got tokens from {min(token, 0)} to {max(token, 0)}, expected from 0 to {vocab - 1}, the vocabulary"
        )
        with pytest.raises(ValueError, match=text):
            model(jnp.array([[0, token]]))
        with pytest.raises(ValueError, match=text):
            model.step(np.array([token, 0]), model.initial_state(2))
        assert nnx.jit(lambda model, x: model(x))(model, jnp.array([[0, token]])).shape == (1, 2, vocab)
    with pytest.raises(ValueError, match=r"^state: got 1 entries, expected one for each of the 2 blocks"):
        model(jnp.zeros((1, 3), int), model.initial_state(1)[:1])
    with pytest.raises(ValueError, match=r"^document_start: got it together with cu_seqlens"):
        model(jnp.zeros((1, 3), int), document_start=jnp.zeros((1, 3), bool), cu_seqlens=(0, 3))
    with pytest.raises(FileNotFoundError, match=r"config.json: no such file"):
        LanguageModel.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.safetensors: its arrays do not fit .*: missing are \['blocks.2"):
        LanguageModel.from_pretrained(tmp_path, num_blocks=3)
    with pytest.raises(ValueError, match=r"embedding.weight: got shape \(50, 32\), expected \(60, 32\)"):
        LanguageModel.from_pretrained(tmp_path, vocab_size=60)
    (tmp_path / "model.safetensors").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"model.safetensors: not a complete safetensors file"):
        LanguageModel.from_pretrained(tmp_path)


def test_dtypes_that_weights_cannot_have() -> None:
    """A name that is none was kept until the first call."""
    for name, dtype in (("dtype", "foo"), ("dtype", int), ("param_dtype", "int8"), ("param_dtype", 3)):
        with pytest.raises(TypeError, match=rf"^{name}: got .*, expected a float dtype"):
            LanguageModel(config(), rngs=nnx.Rngs(0), **{name: dtype})
        with pytest.raises(TypeError, match=rf"^{name}: got .*, expected a float dtype"):
            LanguageModel.from_pretrained("nowhere", **{name: dtype})


def test_states_and_offsets_that_do_not_fit() -> None:
    model = LanguageModel(config(layers=("gla", "gated_delta_net", "retnet"), num_blocks=3), rngs=nnx.Rngs(0))
    one, ids = model.initial_state(1), jnp.zeros((2, 3), int)
    with pytest.raises(TypeError, match=r"^state: got NoneType, expected a tuple"):
        model.step(ids[:, 0], None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^state\[0\]: got NoneType, expected"):
        model.step(ids[:, 0], (None, *one[1:]))  # type: ignore[arg-type]
    x = jnp.zeros((2, 3, model.config.d_model))
    for block, held in zip(model.blocks[1:], one[1:], strict=True):
        part = r"position" if held.position is not None else r"convolution\[0\]"
        for call in (lambda m, s: m(x, s), lambda m, s: m.step(x[:, 0], s)):
            with pytest.raises(ValueError, match=rf"^state\.{part}: got shape \(1, ?.*expected \(2"):
                call(block.mixer, held)
    with pytest.raises(ValueError, match=r"^state\.convolution: got 0 entries, expected 3"):
        model.blocks[1].mixer(x, model.blocks[2].mixer.initial_state(2)._replace(position=None))
    with pytest.raises(TypeError, match=r"^state\.position: got None, expected numbers"):
        model.blocks[2].mixer(x, one[2]._replace(position=None))
    for offsets, kind in ((5, TypeError), ([0, 3], TypeError), ((0, 2), ValueError), (jnp.zeros((), int), ValueError)):
        with pytest.raises(kind, match=r"^cu_seqlens: "):
            model(ids[:1], cu_seqlens=offsets)  # type: ignore[arg-type]
