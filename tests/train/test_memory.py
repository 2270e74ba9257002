"""The memory that a run needs, and the errors and warnings if it does not suffice."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import INTERPRETED

from tfla._util.errors import UserError
from tfla.nn import LanguageModel, ModelConfig, capped_loss
from tfla.nn.layers import wrap_forward
from tfla.train import memory
from tfla.train.config import Optim
from tfla.train.evaluation import token_losses
from tfla.train.loop import train
from tfla.train.memory import Memory, Sharing, check_memory, count_parameters, memory_of, needed, size_text
from tfla.train.recipe import optimizer

CPU = torch.device("cpu")


def config(**changes) -> ModelConfig:
    return ModelConfig.from_dict({"d_model": 128, "num_blocks": 3, "num_heads": 2, "vocab_size": 257, **changes})


@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig", "attention"])
@pytest.mark.parametrize("trainable", [True, False])
def test_parameters_gradients_and_moments_are_exact(mixer, trainable):
    found = config(mixer=mixer, input_gate_trainable=trainable)
    model = LanguageModel(found)
    assert count_parameters(found)[0] == model.num_parameters()
    adamw = optimizer(model, Optim())
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    adamw.step()
    need = needed(found, 100, bfloat16=False)
    assert need.parameters == sum(p.nbytes for p in model.parameters())
    assert need.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert need.optimizer == sum(t.nbytes for s in adamw.state.values() for t in s.values() if t.dim())


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mixer": "mlstm_sig"}, {"mixer": "attention"}, {"vocab_size": 5000}, {"d_model": 384, "num_heads": 4}],
)
def test_activations_are_about_what_the_forward_keeps(changes, bfloat16):
    model = LanguageModel(config(**changes))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
    ):
        loss = token_losses(model, torch.randint(0, 257, (4, 257)), 256).mean()
    del loss
    measured = sum(storage.nbytes() for storage in kept.values())
    # The estimate has the gradients of the logits besides, 8 bytes a token and entry of the vocabulary.
    estimate = needed(model.config, 4 * 256, bfloat16).activations - 4 * 256 * 8 * model.config.vocab_size
    assert 0.7 < estimate / measured < 1.4


@pytest.mark.interpreter
@pytest.mark.parametrize("tokens", [1, 40])
def test_losses_keep_what_the_estimate_has_of_logits(tokens):
    """By the kernels the forward keeps the logits once, and their gradient takes as much; else both are there twice."""
    found, kept = config(vocab_size=5001), set()
    model = LanguageModel(found)
    hidden, targets = torch.randn(tokens, 128), torch.zeros(tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.add(x.untyped_storage()) or x, lambda x: x):
        losses = model.losses_of_hidden(hidden, targets)
    logits = {storage.data_ptr(): storage.nbytes() for storage in kept if storage.nbytes() == tokens * 5001 * 4}
    del losses
    few, many = (needed(replace(found, vocab_size=n), tokens, False, loss_kernels=INTERPRETED) for n in (1, 5001))
    assert many.activations - few.activations == tokens * 5000 * 8 * len(logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_logits_of_kernels_have_the_dtype_of_autocast(checkpointing):
    few, many = config(vocab_size=1000), config(vocab_size=2000)
    weights = 2 * 2 * 128 * 1000  # that autocast keeps copies of
    for bfloat16, kernels, size in [(True, True, 4), (False, True, 8), (True, False, 16), (False, False, 16)]:
        before, after = (
            needed(c, 9999, bfloat16, checkpointing=checkpointing, loss_kernels=kernels).activations
            for c in (few, many)
        )
        assert after - before == 1000 * size * (4096 if checkpointing else 9999) + weights * bfloat16


@pytest.mark.parametrize(
    ("runs", "compiles", "kernels"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_kernels_need_less_where_they_run(monkeypatch, runs, compiles, kernels):
    monkeypatch.setattr(capped_loss, "runs_on", lambda device: runs)
    need = needed(config(), 100, True, loss_kernels=kernels)
    monkeypatch.setattr(memory, "memory_of", lambda device: Memory(None, need.state))
    text = f"activations about {size_text(need.activations)};"
    assert text in (check_memory(config(), 100, True, CPU, compiles=compiles) or "")


def test_the_kernels_run_on_gpus_that_triton_compiles_for(monkeypatch):
    assert not capped_loss.runs_on(CPU)
    monkeypatch.setattr(torch, "empty", lambda size, device: torch.zeros(size))  # there may be no GPU
    for why in ("it needs compute capability 8.0 (Ampere) or newer", None):
        monkeypatch.setattr(type(capped_loss.BACKEND), "device_unsupported", lambda self, x, why=why: why)
        assert capped_loss.runs_on(torch.device("cuda")) == (why is None)


# Of the model of `config()`: all weights, those of a block, and those of embedding and unembedding.
WEIGHTS, BLOCK, EMBEDDINGS = 707_596, 213_892, 65_792


@pytest.mark.parametrize(
    ("sizes", "parts", "computed", "embeddings", "block"),
    [
        ({}, 1, 707_596, 0, 0),
        ({"dp_shard": 4}, 4, 707_596, 65_792, 213_935),
        ({"cp": 4}, 4, 707_596, 65_792, 213_935),
        ({"dp_shard": 2, "cp": 2}, 4, 707_596, 65_792, 213_935),
        ({"dp_replicate": 4, "dp_shard": 1}, 1, 707_596, 65_792, 213_935),
        ({"dp_replicate": 2, "dp_shard": 2}, 2, 707_596, 65_792, 213_935),
        ({"tp": 4}, 4, 176_899, 0, 0),
        ({"dp_shard": 2, "tp": 2}, 4, 353_798, 32_896, 106_968),
    ],
)  # fmt: skip
def test_processes_gather_what_they_compute_with(sizes, parts, computed, embeddings, block):
    """FSDP2 divides what is kept, but each process computes with the weights that tensor parallelism leaves it."""
    model = LanguageModel(config())
    assert model.num_parameters() == WEIGHTS
    assert sum(p.numel() for p in model.blocks[0].parameters()) == BLOCK
    assert model.embedding.weight.numel() + model.unembedding.weight.numel() == EMBEDDINGS
    for in_bfloat16 in (False, True):
        need = needed(config(), 100, True, Sharing.of(sizes, in_bfloat16))
        assert need.parameters == 4 * (WEIGHTS // parts)
        alone = needed(config(), 100, True).activations - 2 * WEIGHTS
        assert need.activations - alone == (0 if in_bfloat16 else 2 * computed)
        size = 2 if in_bfloat16 else 4
        # Two blocks are gathered beside the embeddings, whose gradients are whole with those of one block.
        assert need.gathered == size * (embeddings + 2 * block) + 4 * (embeddings + block)
        assert needed(config(), 100, True, Sharing.of(sizes, in_bfloat16), checkpointing=True).gathered == need.gathered
        # Without reshard_after_forward all three blocks are in memory at the end of the forward.
        kept = needed(config(), 100, True, Sharing.of(sizes, in_bfloat16, kept=True))
        assert kept == need._replace(gathered=need.gathered + size * block)


def test_gathered_weights_are_warned_about(monkeypatch):
    sharing = Sharing.of({"dp_shard": 8})
    need = needed(config(), 100, True, sharing)
    text = f"gathered weights about {size_text(need.gathered)}"
    for free, warned in ((need.state + need.activations, True), (need.state + need.activations + need.gathered, False)):
        monkeypatch.setattr(memory, "memory_of", lambda device, free=free: Memory(None, free))
        warning = check_memory(config(), 100, True, CPU, sharing)
        assert (warning is not None and text in warning) == warned


def test_what_does_not_fit_is_refused_before_it_is_allocated(tiny, monkeypatch):
    need = needed(tiny().model.build(257), 4 * 24, bfloat16=False)
    monkeypatch.setattr(memory, "memory_of", lambda device: Memory(need.state - 1, need.state - 1))
    monkeypatch.setattr("tfla.train.loop.LanguageModel", None)  # nothing is built
    with pytest.raises(UserError) as caught:
        train(tiny())
    message = str(caught.value)
    assert "model: d_model 32, num_blocks 1, vocabulary 257 does not fit on cpu: training needs parameters " in message
    for part in (need.parameters, need.gradients, need.optimizer, need.activations, need.state - 1):
        assert size_text(part) in message
    assert "\n" not in message
    assert not tiny().run.exists()


def test_checkpointed_activations_are_about_what_the_forward_keeps():
    found, ids = config(vocab_size=5000, num_blocks=6), torch.zeros(4, 256, dtype=torch.long)
    model = LanguageModel(found)
    for block in model.blocks:
        wrap_forward(block, checkpointing=True, compile=False)
    model.losses(ids, ids)  # imports the operator
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        losses = model.losses(ids, ids)
    kept = sum(event.self_cpu_memory_usage for event in profile.key_averages()) - losses.nbytes
    one_block, all_blocks = (needed(replace(found, **x), 1024, False).activations for x in ({"num_blocks": 1}, {}))
    again = (all_blocks - one_block) // 5 + 1024 * 4 * 5000 * 4  # a block and the logits, in the backward
    estimate = needed(found, 1024, False, checkpointing=True).activations - again
    assert 0.7 * kept < estimate < 1.5 * kept
    assert needed(found, 2**16, False, checkpointing=True).activations < 0.3 * needed(found, 2**16, False).activations


@pytest.mark.parametrize(("free", "warned"), [(0, True), (-1, True), (10**6, False), (None, False)])
def test_activations_are_warned_about_and_no_more(tiny, monkeypatch, capsys, free, warned):
    need = needed(tiny().model.build(257), 4 * 24, bfloat16=False)
    available = None if free is None else need.state + free
    monkeypatch.setattr(memory, "memory_of", lambda device: Memory(need.state, available))
    assert train(tiny(steps=4)).step == 4
    assert ("this may not fit on cpu" in capsys.readouterr().err) == warned


def test_a_process_has_the_memory_of_its_limits():
    there = memory_of(CPU)
    assert there.limit is None or 2**26 < there.free <= there.limit < 2**50
    code = """
import resource, torch
from tfla.train.memory import memory_of
before = memory_of(torch.device("cpu"))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
after = memory_of(torch.device("cpu"))
print(after.limit, after.free)
"""
    if sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert all(0 < int(number) <= 2**28 for number in done.stdout.split())


def test_a_gpu_has_what_is_free_and_what_torch_keeps_for_reuse(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert memory_of(torch.device("cuda")) == Memory(1200, 1200)
    monkeypatch.setattr(capped_loss, "runs_on", lambda device: True)
    with pytest.raises(UserError, match=r"does not fit on cuda: .*, and there are 1\.2 KiB"):
        check_memory(config(), 10, True, torch.device("cuda"))


def test_devices_of_unknown_memory_are_not_refused(monkeypatch):
    monkeypatch.setattr(memory, "memory_of", lambda device: Memory(None, None))
    assert check_memory(config(), 10**12, False, CPU) is None


def test_sizes_read_well():
    sizes = (0, 1, 1023, 1024, 1.5 * 2**30, 2**62)
    assert [size_text(size) for size in sizes] == [
        "0 bytes",
        "1 bytes",
        "1,023 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "4,096.0 PiB",
    ]
