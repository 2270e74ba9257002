"""The tests of tfla's language model as one of transformers: results, saving, training and conversions."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from plain_transformers import transformers
from small_tfla import MIXTURES, SIZES, WIDE, draw, make
from torch import Tensor

from tfla.cli import main
from tfla.integrations import transformers as integration
from tfla.integrations.transformers import TflaConfig, TflaForCausalLM, TflaModel
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.documents import Document
from tfla.train.tokenizer import ByteTokenizer, load_tokenizer


@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_logits_loss_and_gradients_are_those_of_the_language_model(layers: tuple[str, ...]) -> None:
    model, ids = make(layers), draw(2, 21)
    own = model.to_language_model()
    assert own.embedding.weight.data_ptr() == model.model.embedding.weight.data_ptr()
    out = model(ids, labels=ids, output_hidden_states=True)
    assert torch.equal(out.logits, own(ids))
    loss = own.losses(ids[:, :-1], ids[:, 1:]).mean()
    assert error(out.loss, loss) <= 1e-7  # transformers computes it in float32
    assert len(out.hidden_states) == 5
    assert torch.equal(out.hidden_states[-1], model.model(ids).last_hidden_state)
    F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    loss.backward()
    given = dict(own.named_parameters())
    for name, p in model.named_parameters():
        assert error(p.grad, given[name.removeprefix("model.").replace("lm_head", "unembedding")].grad) <= 1e-9, name
    again = TflaForCausalLM.from_language_model(own, eos_token_id=7)
    assert again.config.eos_token_id == 7
    assert torch.equal(again(ids).logits, out.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_every_device_computes_what_the_cpu_does_in_float64(
    device: str, layers: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Logits, loss and gradients of a padded batch."""
    model, ids, mask = make(layers, dtype, **WIDE), draw(3, 70), torch.ones(3, 70, dtype=torch.int64)
    mask[0, :9], mask[1, 66:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)

    def results(model: Any, place: str) -> dict[str, Tensor]:
        out = model(ids.to(place), attention_mask=mask.to(place), labels=labels.to(place))
        assert out.logits.device.type == place
        out.loss.backward()
        parts = {name: list(module.parameters(recurse=False)) for name, module in model.named_modules()}
        found = {name: torch.cat([p.grad.flatten() for p in own]) for name, own in parts.items() if own}
        return {"logits": out.logits[mask.to(place) > 0], "loss": out.loss, **found}

    truth, found = results(copy.deepcopy(model).double(), "cpu"), results(model.to(device), device)
    errors = {name: error(found[name].cpu(), x) for name, x in truth.items()}
    assert max(errors.values()) <= 5 * TOLERANCE[dtype], sorted(errors.items(), key=lambda item: -item[1])[:5]


def test_models_are_saved_and_loaded_by_the_auto_classes(tmp_path: Path) -> None:
    model, ids = make(dtype=torch.float32), draw(2, 9)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is TflaForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base) is TflaModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"directory: got .* `tfla train`"):
        model.save_pretrained(tmp_path / "run")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    shards = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    assert torch.equal(shards(ids).logits, model(ids).logits)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(ids).logits.dtype == torch.float32
    assert error(half(ids).logits, model(ids).logits) <= 0.1


def test_frozen_input_gates_are_loaded_frozen(tmp_path: Path) -> None:
    """Through the Auto classes, with the loading info and with the config's field as an argument too."""
    model = make(("mlstm_exp", "gla", "mlstm_sig"), torch.float32, input_gate_trainable=False)
    model.save_pretrained(tmp_path / "frozen")
    loaded, info = TflaForCausalLM.from_pretrained(tmp_path / "frozen", output_loading_info=True)
    assert not info["missing_keys"]
    make(("mlstm_exp", "gla", "mlstm_sig"), torch.float32).save_pretrained(tmp_path / "trained")
    for given in (
        loaded,
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "frozen"),
        TflaForCausalLM.from_pretrained(tmp_path / "trained", input_gate_trainable=False),
    ):
        found = {name for name, p in given.named_parameters() if not p.requires_grad}
        assert found == {name for name, p in model.named_parameters() if not p.requires_grad}
        assert len(found) == 6
    trained = TflaForCausalLM.from_pretrained(tmp_path / "frozen", input_gate_trainable=True)
    assert all(p.requires_grad for p in trained.parameters())


def test_a_program_without_an_import_of_tfla_loads_a_model_through_its_folder(tmp_path: Path) -> None:
    make(dtype=torch.float32).save_pretrained(tmp_path)
    code = (
        "import sys, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "model.save_pretrained(sys.argv[1] + '/again')\n"
        "print(type(model).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "tfla.integrations.transformers.modeling"
    assert sorted(p.name for p in (tmp_path / "again").glob("*.py")) == ["tfla_model.py"]


def test_documents_and_packed_sequences(device: str) -> None:
    model, ids = make().to(device), draw(1, 20).to(device)
    parts = [model(ids[:, a:b]).logits for a, b in ((0, 7), (7, 20))]
    expected = torch.cat(parts, 1)
    offsets, position = (torch.tensor(x, device=device) for x in ([0, 7, 20], [[*range(7), *range(13)]]))
    start = position == 0
    for arguments in ({"cu_seqlens": offsets}, {"cu_seq_lens_q": offsets}, {"position_ids": position}):
        assert error(model(ids, **arguments).logits, expected) <= 1e-10
    assert error(model(ids, document_start=start).logits, expected) <= 1e-10
    with pytest.raises(ValueError, match="attention_mask: got padding together with documents"):
        model(ids, attention_mask=(ids > 30).long(), document_start=start)


def test_indices_of_documents() -> None:
    """Those of a collator, beside positions and alone; in a padded row; and of tokens after those of a cache."""
    model, ids = make(), draw(1, 20)
    expected = torch.cat([model(ids[:, a:b]).logits for a, b in ((0, 7), (7, 20))], 1)
    features = [{"input_ids": part.tolist()} for part in (ids[0, :7], ids[0, 7:])]
    for options in ({}, {"return_position_ids": False}, {"position_ids_start": 2}):
        collate = transformers.DataCollatorWithFlattening(return_seq_idx=True, return_tensors="pt", **options)
        batch = collate(features)
        assert batch["seq_idx"].tolist() == [[0] * 7 + [1] * 13]
        assert error(model(**batch).logits, expected) <= 1e-10, options
    index = batch["seq_idx"]
    mask = F.pad(torch.ones_like(ids), (3, 1))
    padded = model(F.pad(ids, (3, 1)), attention_mask=mask, seq_idx=F.pad(index, (3, 1), value=-1)).logits
    assert error(padded[:, 3:-1], expected) <= 1e-10
    cache = integration.TflaCache()
    slices = slice(0, 4), slice(4, 20)
    found = [model(ids[:, at], past_key_values=cache, seq_idx=index[:, at]).logits for at in slices]
    assert error(torch.cat(found, 1), expected) <= 1e-10
    for block in model.model.blocks:
        block.mixer.context_parallel = True
    with pytest.raises(ValueError, match=r"^seq_idx: got a tensor with context parallelism, expected cu_seqlens, doc"):
        model(ids, seq_idx=index)


def test_documents_start_after_padding_too() -> None:
    """The tokens of a padded row are those of its documents, wherever padding is and whatever index it has."""
    model, ids = make(), draw(2, 12)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]])
    index = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 5, 0, 0, 0, 1, 1, 1, 1]])
    documents = [[[0, 1, 2], [5, 6, 7, 8], [10, 11]], [[2, 3, 5, 6, 7], [8, 9, 10]]]
    logits = model(ids, attention_mask=mask, seq_idx=index).logits
    for row, places in enumerate(documents):
        for place in places:
            assert error(logits[row : row + 1, place], model(ids[row : row + 1, place]).logits) <= 1e-10


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_changes_no_result(side: str) -> None:
    model, ids = make(), draw(2, 12)
    first, last = {"left": (4, 12), "right": (0, 8), "both": (3, 9)}[side]
    mask = torch.ones_like(ids)
    mask[0] = 0
    mask[0, first:last] = 1
    alone = model(ids[:1, first:last], output_hidden_states=True)
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert error(out.logits[0, first:last], alone.logits[0]) <= 1e-10
    assert error(out.hidden_states[1][0, first:last], alone.hidden_states[1][0]) <= 1e-10
    assert error(out.logits[1], model(ids[1:]).logits[0]) <= 1e-10
    gradients = torch.autograd.grad(out.logits[0, first:last].sum(), model.lm_head.weight)
    assert error(gradients[0], torch.autograd.grad(alone.logits.sum(), model.lm_head.weight)[0]) <= 1e-9


@pytest.mark.parametrize("first", [0, 3, 1], ids=["right", "left", "both"])
def test_positions_of_padded_rows_start_documents(first: int) -> None:
    model, ids = make(), draw(2, 12)
    mask, position = torch.zeros_like(ids), torch.zeros_like(ids)
    mask[:, first : first + 9] = 1
    position[:, first : first + 9] = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2])
    expected = model(ids[:, first : first + 9], position_ids=position[:, first : first + 9]).logits
    out = model(ids, attention_mask=mask, position_ids=position)
    assert error(out.logits[:, first : first + 9], expected) <= 1e-10


def test_tied_embeddings_and_resized_ones(tmp_path: Path) -> None:
    model, ids = make(tie_word_embeddings=True), draw(2, 9)
    assert model.lm_head.weight is model.model.embedding.weight
    model.save_pretrained(tmp_path)
    loaded = TflaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embedding.weight
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert error(model.to_language_model()(ids), model(ids).logits) <= 1e-12
    before = model(ids).logits
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == model.config.to_model_config().vocab_size == 70
    assert model.lm_head.weight is model.model.embedding.weight
    assert error(model(ids).logits[..., :61], before) <= 1e-12


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_parameters_stay_frozen_when_converted(tied: bool) -> None:
    model = make(tie_word_embeddings=tied)
    model.model.embedding.requires_grad_(False)
    model.model.blocks[1].requires_grad_(False)
    own = model.to_language_model()
    again = TflaForCausalLM.from_language_model(own)
    expected = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert {name for name, p in again.named_parameters() if not p.requires_grad} == expected
    frozen = {name for name, p in own.named_parameters() if not p.requires_grad}
    assert frozen == {name.removeprefix("model.") for name in expected}


def test_tied_embeddings_stay_tied_when_converted(tmp_path: Path) -> None:
    model, ids = make(tie_word_embeddings=True), draw(2, 9)
    own = model.to_language_model()
    assert own.unembedding.weight is own.embedding.weight
    own.save_pretrained(tmp_path / "own")
    assert error(LanguageModel.from_pretrained(tmp_path / "own")(ids), model(ids).logits) <= 1e-12
    again = TflaForCausalLM.from_language_model(own)
    assert again.lm_head.weight is again.model.embedding.weight
    again.save_pretrained(tmp_path / "again")
    assert error(TflaForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, model(ids).logits) <= 1e-12
    with pytest.raises(ValueError, match=r"^tie_word_embeddings: got False, expected True, as in the model$"):
        TflaForCausalLM.from_language_model(own, tie_word_embeddings=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    model, ids = make().train(), draw(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    runs = []
    model.model.blocks[0].mixer.register_forward_pre_hook(lambda *_: runs.append(1))
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    assert len(runs) == 2
    for name, p in model.named_parameters():
        assert error(p.grad, expected[name]) <= 1e-12, name


@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_goes_through_a_cache(layers: tuple[str, ...], reentrant: bool) -> None:
    model, ids = make(layers).train(), draw(2, 12)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    (expected,) = torch.autograd.grad(logits, embedded, torch.cos(torch.arange(logits.numel())).reshape(logits.shape))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    cache = integration.TflaCache()
    parts = [model(inputs_embeds=x, past_key_values=cache).logits for x in embedded.split((6, 5, 1), 1)]
    found = torch.cat(parts, 1)
    assert error(found, logits) <= 1e-12
    found.backward(torch.cos(torch.arange(found.numel())).reshape(found.shape))
    assert error(embedded.grad, expected) <= 1e-9


def test_compiled_in_one_graph() -> None:
    model, ids = make(("mlstm_exp",), num_blocks=1), draw(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert error(compiled(ids, labels=ids, use_cache=False).loss, model(ids, labels=ids).loss) <= 1e-12
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask).logits
    assert error(compiled(ids, attention_mask=mask, use_cache=False).logits[mask > 0], expected[mask > 0]) <= 1e-12


def test_trainer_learns_a_text_by_heart(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = make(dtype=torch.float32, num_blocks=2)
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in draw(4, 24)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=60, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none", use_cpu=True,
        disable_tqdm=True, gradient_checkpointing=True, logging_steps=1,
    )  # fmt: skip
    trainer = transformers.Trainer(model.train(), arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] > 3
    assert losses[-1] < 0.3
    trainer.save_model()
    loaded = TflaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in loaded.named_parameters())


@pytest.mark.parametrize("adapted", [False, True])
def test_label_smoothing_of_the_trainer_compares_the_next_tokens(tmp_path: Path, adapted: bool) -> None:
    pytest.importorskip("accelerate")
    model, ids = make(dtype=torch.float32, num_blocks=2), draw(2, 12)
    labels = ids.masked_fill(torch.arange(12) > torch.tensor([[8], [11]]), -100)
    if adapted:
        model = pytest.importorskip("peft").get_peft_model(
            model, pytest.importorskip("peft").LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        )
    arguments = transformers.TrainingArguments(
        str(tmp_path), label_smoothing_factor=0.2, report_to="none", use_cpu=True
    )
    loss = transformers.Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": labels})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    assert error(loss, F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.2)) <= 1e-6


def test_lora_trains_the_projections_alone() -> None:
    peft = pytest.importorskip("peft")
    model, ids = make(), draw(2, 12)
    expected = model(ids).logits
    before = copy.deepcopy(model.state_dict())
    names = ["q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    assert torch.equal(adapted(ids).logits, expected)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    tokens = adapted.generate(ids, max_new_tokens=4, do_sample=False)
    merged = adapted.merge_and_unload()
    assert torch.equal(merged.generate(ids, max_new_tokens=4, do_sample=False), tokens)
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.split(".")[-2] in names}


@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_lora_of_all_linear_layers_but_soft_capped_gates_is_merged_exactly(layers: tuple[str, ...]) -> None:
    """PEFT adds to the output of a layer, and merges into its weight: for a soft-capped gate these differ."""
    peft = pytest.importorskip("peft")
    ids = draw(2, 12)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    gates = ["input_gate", "forget_gate"]
    adapted = peft.get_peft_model(make(layers), peft.LoraConfig(**options, exclude_modules=gates)).eval()
    names = {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert {"q_proj", "v_proj", "out_proj", "up_proj", "down_proj"} <= names
    assert not names & set(gates)
    logits = adapted(ids).logits
    assert (adapted.merge_and_unload()(ids).logits - logits).norm() <= 1e-12 * logits.norm()
    everything = peft.get_peft_model(make(layers), peft.LoraConfig(**options)).eval()
    logits = everything(ids).logits
    assert (everything.merge_and_unload()(ids).logits - logits).norm() > 1e-6 * logits.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids + 1000, "input_ids: got tokens from 10.. to 10.., expected from 0 to "),
        (lambda ids: ids.float(), "input_ids: got a tensor of torch.float32, expected an int64 tensor"),
        (lambda ids: ids[0], r"input_ids: got shape \(5,\), expected \(B, T\)"),
        (lambda ids: ids[:, :0], "input_ids: got T = 0, expected at least 1"),
        (lambda ids: ids.to("meta"), "input_ids: got device meta, expected that of the model, cpu"),
    ],
)
def test_tokens_that_do_not_fit_are_named(change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        make(("mlstm_exp",))(change(draw(2, 5)))


STARTS = torch.tensor([[True, False, True, False, False]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens": [0, 2, 5]}, "cu_seqlens: got list, expected an int32 or int64 tensor"),
        ({"cu_seqlens": torch.tensor([0, 2, 4])}, "cu_seqlens: goes from 0 to 4, expected from 0 to T = 5"),
        (
            {"cu_seqlens": torch.tensor([0, 2, 5]), "cu_seq_lens_q": torch.tensor([0, 3, 5])},
            "cu_seqlens: got it together with cu_seq_lens_q",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 2, 5]), "document_start": STARTS},
            "document_start: got it together with cu_seqlens",
        ),
        ({"document_start": STARTS.long()}, "document_start: got a tensor of torch.int64, expected a bool tensor"),
        (
            {"document_start": STARTS[:, :4]},
            r"document_start: got shape \(1, 4\), expected that of input_ids, \(1, 5\)",
        ),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, r"position_ids: got shape \(1, 4\), expected \(1, 5\)"),
        ({"position_ids": torch.zeros(2, 5)}, r"position_ids: got shape \(2, 5\), expected \(1, 5\)"),
        ({"seq_idx": torch.zeros(1, 5)}, "seq_idx: got dtype torch.float32, expected an int32 or int64 tensor"),
        ({"seq_idx": torch.zeros(1, 4).int()}, r"seq_idx: got shape \(1, 4\), expected \(1, 5\)"),
        ({"labels": torch.ones(1, 4, dtype=torch.int64)}, r"labels: got shape \(1, 4\), expected \(1, 5\)"),
        ({"labels": torch.ones(1, 5)}, "labels: got a tensor of torch.float32, expected an int64 tensor"),
        ({"labels": torch.tensor([[1, 2, 999, 3, -100]])}, "labels: got 999, expected -100 or from 0 to "),
        ({"labels": torch.tensor([[1, 2, -1, 3, -100]])}, "labels: got -1, expected -100 or from 0 to "),
        ({"logits_to_keep": -2}, "logits_to_keep: got -2, expected at least 0"),
        ({"logits_to_keep": torch.tensor([0, 5])}, "logits_to_keep: got 5, expected an index of one of 5 positions"),
        (
            {"logits_to_keep": torch.tensor([-6]).int()},
            "logits_to_keep: got -6, expected an index of one of 5 positions",
        ),
        (
            {"logits_to_keep": torch.tensor([True] * 4)},
            r"logits_to_keep: got a mask of shape \(4,\), expected \(5,\)",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    """Of two that say where documents start, one was read; positions of another shape were not read at all."""
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        make(("gla",))(draw(1, 5), **arguments)


def test_a_model_of_another_kind_is_not_converted() -> None:
    with pytest.raises(TypeError, match=r"^model: got TflaForCausalLM, expected a LanguageModel"):
        TflaForCausalLM.from_language_model(make(("gla",)))  # type: ignore[arg-type]


def test_config_has_the_fields_of_a_model_config() -> None:
    with pytest.raises(ValueError, match="hidden_size: got 48, expected 32, the d_model that is also given"):
        TflaConfig(hidden_size=48, d_model=32, num_heads=2)
    config = TflaConfig(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, layers=["retnet"])
    assert config.to_model_config() == ModelConfig(d_model=48, num_blocks=3, num_heads=3, layers=("retnet",))
    assert TflaConfig.from_dict(config.to_dict()).to_model_config() == config.to_model_config()
    with pytest.raises(ValueError, match="num_heads: got 5"):
        TflaConfig(d_model=48, num_heads=5)
    with pytest.raises(ValueError, match="past_key_values: got DynamicCache"):
        make()(draw(1, 3), past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="input_ids: expected exactly one"):
        make()()
    with pytest.raises(AttributeError, match="Nothing"):
        integration.Nothing  # noqa: B018
    integration.register()


def test_a_config_keeps_options_that_nobody_reads_but_takes_none(tmp_path: Path) -> None:
    given = {"d_model": 48, "num_blocks": 1, "num_heads": 3, "layers": ["retnet"]}
    with pytest.raises(ValueError, match=r"window: got 4, expected None with 'retnet': only 'attention' has it"):
        TflaConfig(**given, window=4)
    stored = TflaConfig.from_dict(given | {"window": 4})
    stored.save_pretrained(tmp_path)
    for again in (
        TflaConfig.from_pretrained(tmp_path), TflaConfig.from_json_file(tmp_path / "config.json"),
        transformers.AutoConfig.from_pretrained(tmp_path, window=4), TflaConfig(**stored.to_dict()),
    ):  # fmt: skip
        assert again.to_model_config() == stored.to_model_config()
        assert again.window == 4
    own = LanguageModel(stored.to_model_config())
    assert TflaForCausalLM.from_language_model(own).config.to_model_config() == own.config
    found, left = TflaConfig.from_dict(stored.to_dict(), hidden_size=96, revision="x", return_unused_kwargs=True)
    assert (found.d_model, found.window, left) == (96, 4, {"revision": "x"})
    with pytest.raises(ValueError, match=r"window: got 5, expected None with 'retnet'"):
        transformers.AutoConfig.from_pretrained(tmp_path, window=5)


def test_export_writes_the_model_and_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    config = ModelConfig.from_dict(SIZES | {"vocab_size": 257, "num_blocks": 1, "layers": ("gla",)})
    own = LanguageModel(config)
    own.save_pretrained(tmp_path / "own")
    ByteTokenizer().save(tmp_path / "own")
    assert main(["export", "--checkpoint", str(tmp_path / "own"), "--to", str(tmp_path / "hf")]) == 0
    assert "trust_remote_code=True" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Größe: 3 <|bos|>\n  \x00~ ü"
    ids = tokenizer(text)["input_ids"]
    assert ids == ByteTokenizer().encode([Document("text", text.encode())])[0].tolist()
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256
    assert torch.equal(model(torch.tensor([ids])).logits, own(torch.tensor([ids])))

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    words.add_special_tokens(["<s>"])
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    arguments = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--dtype", "bfloat16"]
    assert main(["export", "--checkpoint", str(tmp_path / "own"), "--to", str(tmp_path / "words"), *arguments]) == 0
    exported, own_words = transformers.AutoTokenizer.from_pretrained(tmp_path / "words"), load_tokenizer(tmp_path)
    assert exported("a b c")["input_ids"] == [0, 1, 2, 3]
    assert exported("a<s> b")["input_ids"] == own_words.encode([Document("text", b"a<s> b")])[0].tolist() == [0, 3, 2]
    assert load_tokenizer(tmp_path / "words").vocab_size == 4
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "words").dtype == torch.bfloat16
    capsys.readouterr()
    assert main(["export", "--checkpoint", str(tmp_path / "none"), "--to", str(tmp_path / "x")]) != 0
    assert "neither a run nor a checkpoint" in capsys.readouterr().err


def test_export_replaces_no_run_and_no_model_of_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig.from_dict(SIZES | {"vocab_size": 257, "num_blocks": 1, "layers": ("gla",)})
    LanguageModel(config).save_pretrained(tmp_path / "own")
    ByteTokenizer().save(tmp_path / "own")
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 20)
    sizes = ["--model.d-model", "32", "--model.num-blocks", "1", "--model.num-heads", "2", "--context", "8"]
    options = ["--data.paths", str(text), "--steps", "1", "--batch-size", "1", "--no-tensorboard", "--device", "cpu"]
    assert main(["train", "--run", str(tmp_path / "run"), *sizes, *options]) == 0
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    for folder in (tmp_path / "own", tmp_path / "run", checkpoint):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert main(["export", "--checkpoint", str(tmp_path / "run"), "--to", str(folder)]) == 1
        assert f"to: got {folder}, whose config.json is not one of transformers" in capsys.readouterr().err
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for _ in range(2):  # what was exported may be exported again
        assert main(["export", "--checkpoint", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
