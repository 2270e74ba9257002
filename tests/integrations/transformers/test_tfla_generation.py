"""The tests of generation by tfla's language model in transformers, and of its cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_transformers import transformers
from small_tfla import MIXTURES, WIDE, draw, make

import tfla.nn
from tfla.integrations.transformers import TflaCache

METHODS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 8, "temperature": 0.7},
    "beams": {"do_sample": False, "num_beams": 3},
    "beam sampling": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "several": {"do_sample": True, "num_return_sequences": 3},
}


def generate(model: Any, ids: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(ids, max_new_tokens=6, pad_token_id=0, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_the_cache_changes_no_token(layers: tuple[str, ...], method: str) -> None:
    model, ids = make(layers), draw(2, 9)
    assert torch.equal(
        generate(model, ids, **METHODS[method]), generate(model, ids, use_cache=False, **METHODS[method])
    )


def test_greedy_tokens_are_those_of_tfla() -> None:
    model, ids = make(), draw(2, 9)
    tokens = torch.stack(list(tfla.nn.generate(model.to_language_model(), ids, 6, temperature=0)), 1)
    assert torch.equal(generate(model, ids, do_sample=False)[:, 9:], tokens)


@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_every_device_generates_what_the_cpu_does_in_float64(device: str, layers: tuple[str, ...]) -> None:
    """With a cache and without, for padded prompts too, and by tfla's generate."""
    model, ids = make(layers, torch.float32, **WIDE), draw(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    exact = copy.deepcopy(model).double()
    expected = generate(exact, ids, do_sample=False), generate(exact, ids, attention_mask=mask, do_sample=False)
    model, ids, mask = model.to(device), ids.to(device), mask.to(device)
    for use_cache in (True, False):
        options = {"do_sample": False, "use_cache": use_cache}
        assert torch.equal(generate(model, ids, **options).cpu(), expected[0])
        assert torch.equal(generate(model, ids, attention_mask=mask, **options).cpu(), expected[1])
    tokens = torch.stack(list(tfla.nn.generate(model.to_language_model(), ids, 6, temperature=0)), 1)
    assert torch.equal(tokens.cpu(), expected[0][:, 9:])
    for method in ("sampling", "beams"):
        found, again = (generate(model, ids, use_cache=use, **METHODS[method]) for use in (True, False))
        assert torch.equal(found, again)


@pytest.mark.parametrize("reentrant", [True, False])
def test_text_is_generated_between_steps_of_training_with_checkpoints(reentrant: bool) -> None:
    model, ids = make(), draw(2, 9)
    expected = generate(model, ids, do_sample=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert torch.equal(generate(model.train(), ids, do_sample=False), expected)
    assert model(ids, use_cache=True).past_key_values is None  # as in other models where gradients are recorded


@pytest.mark.parametrize("given", ["static", "offloaded", "offloaded_static", "quantized", "paged"])
@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_other_caches_are_refused(given: str, where: str) -> None:
    model, ids, options = make(), draw(2, 4), {}
    if where == "argument":
        options["cache_implementation"] = given
    elif where == "config":
        options["generation_config"] = transformers.GenerationConfig(cache_implementation=given)
    else:
        model.generation_config.cache_implementation = given
    with pytest.raises(ValueError, match=f"^cache_implementation: got '{given}', expected None or 'dynamic', which"):
        generate(model, ids, do_sample=False, **options)


def test_a_dynamic_cache_is_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, warnings = make(), draw(2, 4), list[str]()
    monkeypatch.setattr(transformers.generation.utils.logger, "warning_once", warnings.append)
    found = generate(model, ids, do_sample=False, cache_implementation="dynamic", return_dict_in_generate=True)
    assert isinstance(found.past_key_values, TflaCache)
    assert torch.equal(found.sequences, generate(model, ids, do_sample=False))
    assert not any("ignored" in warning for warning in warnings)
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        generate(model, ids, cache_implementation="dynamic", past_key_values=TflaCache())


def test_continuous_batching_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"states have no pages; tfla\.nn\.Decoder"):
        make().generate_batch([[1, 2], [3]])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("beams", [1, 2])
def test_padded_rows_continue_as_they_do_alone(side: str, beams: int) -> None:
    model, ids = make(), draw(2, 9)
    mask = torch.ones_like(ids)
    kept = slice(3, None) if side == "left" else slice(None, 6)
    mask[0] = 0
    mask[0, kept] = 1
    options = {"do_sample": False, "num_beams": beams}
    found = generate(model, ids, attention_mask=mask, **options)[:, 9:]
    assert torch.equal(found[:1], generate(model, ids[:1, kept], **options)[:, 6:])
    assert torch.equal(found[1:], generate(model, ids[1:], **options)[:, 9:])


@torch.no_grad()
def test_a_cache_continues_rearranges_and_forgets() -> None:
    model, ids = make(), draw(3, 12)
    expected = model(ids).logits
    out = model(ids[:, :5], use_cache=True)
    cache = out.past_key_values
    assert isinstance(cache, TflaCache)
    assert (cache.get_seq_length(), cache.batch_size, len(cache)) == (5, 3, 4)
    copied = copy.deepcopy(cache)
    for a, b in ((5, 8), (8, 9), (9, 12)):
        logits = model(ids[:, a:b], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected[:, a:b], rtol=0, atol=1e-10)
    rows = torch.tensor([2, 0, 0, 1])
    copied.batch_select_indices(rows)
    torch.testing.assert_close(
        model(ids[rows, 5:], past_key_values=copied).logits, expected[rows, 5:], rtol=0, atol=1e-10
    )
    once = model(ids[:, :5], use_cache=True).past_key_values
    once.batch_repeat_interleave(2)
    twice, after = ids.repeat_interleave(2, 0), expected.repeat_interleave(2, 0)[:, 5:6]
    torch.testing.assert_close(model(twice[:, 5:6], past_key_values=once).logits, after, rtol=0, atol=1e-10)
    once.reset()
    assert (once.get_seq_length(), once.batch_size) == (0, -1)
    torch.testing.assert_close(model(ids, past_key_values=once).logits, expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="cache: got crop"):
        once.crop(-1)


@torch.no_grad()
def test_all_tokens_are_given_beside_a_cache() -> None:
    model, ids = make(), draw(1, 8)
    cache = model(ids[:, :5], use_cache=True).past_key_values
    for given in (ids[:, 5:], ids[:, :5]):
        with pytest.raises(ValueError, match=rf"input_ids: got {given.shape[1]} tokens, expected more than the 5 of"):
            model.generate(given, past_key_values=cache, max_new_tokens=3)
    assert cache.get_seq_length() == 5
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(input_ids=ids, past_key_values=cache, **options), model.generate(ids, **options))


@torch.no_grad()
@pytest.mark.parametrize("positions", [[0], [0, 1, 2], [0, 1, 0], [5, 0, 1]], ids=str)
def test_position_0_starts_a_document_after_a_cache_too(positions: list[int]) -> None:
    model, ids = make(), draw(2, 9)
    cache = model(ids[:, :5], use_cache=True).past_key_values
    found = model(ids[:, 5 : 5 + len(positions)], past_key_values=cache, position_ids=torch.tensor([positions])).logits
    start = torch.tensor([[position == 0 for position in [0, 1, 2, 3, 4, *positions]]])
    expected = model(ids[:, : start.shape[1]], document_start=start.expand(2, -1)).logits[:, 5:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_weights_that_hooks_fetch(layers: tuple[str, ...]) -> None:
    """The package accelerate moves inputs and weights of a model on several devices by hooks, also in decoding."""
    library, model, ids = pytest.importorskip("accelerate"), make(layers), draw(2, 9)
    expected = generate(model, ids, do_sample=False)
    assert torch.equal(generate(library.cpu_offload(model, torch.device("cpu")), ids, do_sample=False), expected)


@torch.no_grad()
def test_hooks_see_single_tokens() -> None:
    model, ids, seen = make(), draw(2, 9), list[str]()
    hooked = {"block": model.model.blocks[0], "mixer": model.model.blocks[1].mixer}
    for name, module in hooked.items():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    cache = model(ids[:, :8], use_cache=True).past_key_values
    found = model(ids[:, 8:], past_key_values=cache).logits
    assert seen == ["block", "mixer"] * 2
    torch.testing.assert_close(found, model(ids).logits[:, 8:], rtol=0, atol=1e-10)


def test_gradients_pass_through_a_cache() -> None:
    model, ids = make(), draw(2, 10)
    whole = torch.autograd.grad(model(ids).logits[:, -1].sum(), model.model.embedding.weight)[0]
    cache = model(ids[:, :9], use_cache=True).past_key_values
    parts = torch.autograd.grad(
        model(ids[:, 9:], past_key_values=cache).logits[:, -1].sum(), model.model.embedding.weight
    )[0]
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_a_cache_of_inference_mode_continues_outside_of_it(layers: tuple[str, ...]) -> None:
    model, ids = make(layers), draw(2, 9)
    with torch.inference_mode():
        cache = model(ids[:, :6], use_cache=True).past_key_values
    with torch.no_grad():
        expected = model(ids).logits[:, 6:]
        found = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(6, 9)]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-10)


def test_padding_after_the_tokens_of_a_cache_is_refused() -> None:
    model, ids = make(), draw(2, 6)
    cache = model(ids, use_cache=True).past_key_values
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, 7] = 0
    with pytest.raises(ValueError, match="attention_mask: got padding after the tokens of a cache"):
        model(ids[:, :2], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_a_row_of_padding_alone_begins_after_it(layers: tuple[str, ...]) -> None:
    """A prompt that is read in chunks may have nothing but padding in the first one."""
    model, ids = make(layers), draw(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    alone = model(ids[:1, 4:]).logits[0]
    for split in (5, 6):  # the next call has one token, or several
        cache = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True).past_key_values
        parts = [model(ids[:, a:b], past_key_values=cache).logits[0] for a, b in ((4, split), (split, 9))]
        torch.testing.assert_close(torch.cat(parts), alone, rtol=0, atol=1e-10)
    options: dict[str, Any] = {"do_sample": False, "attention_mask": mask}
    chunks = generate(model, ids, past_key_values=TflaCache(), prefill_chunk_size=4, **options)
    assert torch.equal(chunks, generate(model, ids, **options))


def test_a_cache_of_other_sequences_or_of_another_model_is_named() -> None:
    model, ids = make(("gla",), num_blocks=2), draw(2, 6)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values: got a cache of 2 sequences and 2 blocks, expected 1 and 2"):
        model(ids[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values: got a cache of 2 sequences and 2 blocks, expected 2 and 1"):
        make(("gla",), num_blocks=1)(ids, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 2])
def test_an_error_leaves_the_cache_as_it_is(steps: int) -> None:
    model, ids = make(), draw(2, 9)
    expected = model(ids[:, : 6 + steps]).logits[:, 6:]
    following, labels = ids[:, 6 : 6 + steps], ids[:, 6 : 6 + steps].clone()
    labels[0, 0] = 61
    cache = model(ids[:, :6], use_cache=True).past_key_values
    wrong = {"labels": ids, "logits_to_keep": torch.tensor([steps]), "input_ids": following + 61}
    for name, value in [*wrong.items(), ("labels", labels)]:
        with pytest.raises(ValueError, match=f"^{name}: got"):
            model(**{"input_ids": following, name: value}, past_key_values=cache)
    assert cache.num_tokens == 6
    kept = torch.tensor([True] * steps)  # a mask takes labels as indices do
    for each in ({}, {"logits_to_keep": kept, "labels": following}):
        found = model(following, past_key_values=copy.deepcopy(cache), **each).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_generation_config_is_read() -> None:
    model = make(dtype=torch.float32)
    config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert model.generate(draw(1, 4), generation_config=config).shape == (1, 7)


def test_a_pipeline_generates(tmp_path: Path) -> None:
    """A pipeline pads prompts of several lengths on the left, and gives each the text that it has alone."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(61)}, "w1"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
    model = make(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipeline = transformers.pipeline("text-generation", model=str(tmp_path), tokenizer=str(tmp_path), device="cpu")
    prompts = ["w5 w9 w20 w31 w7", "w44", "w8 w3"]
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    together = [found[0]["generated_text"] for found in pipeline(prompts, batch_size=3, **options)]
    for prompt, text in zip(prompts, together, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
        expected = tfla.nn.generate(model.to_language_model(), ids, 4, temperature=0)
        assert text.split() == [f"w{int(token)}" for token in expected]


def test_prompts_are_read_in_chunks_and_with_guidance() -> None:
    """A cache that is given lets transformers read a prompt in chunks; guidance has a second cache of its own."""
    model, ids = make(), draw(2, 9)
    expected = generate(model, ids, do_sample=False)
    found = generate(model, ids, do_sample=False, past_key_values=TflaCache(), prefill_chunk_size=4)
    assert torch.equal(found, expected)
    guided = [generate(model, ids, do_sample=False, guidance_scale=1.5, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*guided)
    out = model.generate(ids, max_new_tokens=6, pad_token_id=0, do_sample=False, return_dict_in_generate=True)
    more = generate(model, out.sequences, do_sample=False, past_key_values=out.past_key_values)
    assert torch.equal(more, model.generate(ids, max_new_tokens=12, pad_token_id=0, do_sample=False))


def test_assisted_generation_is_refused() -> None:
    model, ids = make(), draw(1, 5)
    for options in ({"assistant_model": make(("mlstm_exp",), num_blocks=1)}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            generate(model, ids, **options)
