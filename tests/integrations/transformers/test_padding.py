"""The tests of padding: every row of a batch has the result that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from tfla.integrations.transformers import accelerate
from tfla.nn.layers import wrap_forward

Make = Callable[..., Any]
Tokens = Callable[..., Tensor]
LENGTHS = (13, 1, 18, 7)
WIDTH = 18
BOUND = 5 * TOLERANCE[torch.float32]


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Return tokens and mask (B, WIDTH); the padding has the id of an ordinary token."""
    ids, mask = rows[0].new_full((len(rows), WIDTH), 5), rows[0].new_zeros(len(rows), WIDTH)
    for n, row in enumerate(rows):
        start = {"left": WIDTH - len(row), "right": 0, "both": (WIDTH - len(row)) // 2}[side]
        ids[n, start : start + len(row)] = row
        mask[n, start : start + len(row)] = 1
    return ids, mask


@pytest.fixture
def rows(tokens: Tokens, device: str) -> list[Tensor]:
    return [tokens(length, seed=n).to(device) for n, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_rows_are_as_alone(make_xlstm: Make, rows: list[Tensor], device: str, side: str, use_bias: bool) -> None:
    model = accelerate(make_xlstm(device=device, use_bias=use_bias))
    ids, mask = padded(rows, side)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=True)
        after = model(
            ids[:, :1], attention_mask=torch.cat([mask, mask.new_ones(4, 1)], 1), cache_params=out.cache_params
        )
        for n, row in enumerate(rows):
            alone = model(row[None], use_cache=True)
            assert error(out.logits[n][mask[n].bool()], alone.logits[0]) <= BOUND
            assert error(out.logits[n, -1], alone.logits[0, -1]) <= BOUND
            following = model(ids[n : n + 1, :1], cache_params=alone.cache_params)
            assert error(after.logits[n], following.logits[0]) <= BOUND


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("checkpointing", ["", "model", "xLSTMBlock", "xLSTMLayer", "parallelize"])
def test_gradients_are_those_of_the_rows_alone(
    make_xlstm: Make, rows: list[Tensor], device: str, side: str, checkpointing: str
) -> None:
    model = make_xlstm(torch.float64, device, norm_reduction_force_float32=False).train()
    if checkpointing == "model":
        model.gradient_checkpointing_enable()
    elif checkpointing == "parallelize":
        for block in model.backbone.blocks:
            wrap_forward(block, checkpointing=True, compile=False)
    elif checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == checkpointing)
    accelerate(model)
    ids, mask = padded(rows, side)
    labels = ids.masked_fill(mask == 0, -100)
    labels[mask.cumsum(1) == 1] = -100  # a row alone predicts no first token
    loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
    if checkpointing:  # another batch before the backward, which recomputes this one
        model(ids[:2], attention_mask=mask[:2].flip(1), use_cache=False)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    steps = [len(row) - 1 for row in rows]
    losses = [
        n * model(row[None], labels=row[None], use_cache=False).loss for row, n in zip(rows, steps, strict=True) if n
    ]
    expected = sum(losses) / sum(steps)
    expected.backward()
    assert error(loss, expected) <= TOLERANCE[torch.float32]
    for name, p in model.named_parameters():  # logits and loss are float32 in every model
        assert error(found[name], p.grad) <= TOLERANCE[torch.float32], name


@pytest.mark.parametrize("side", ["left", "right"])
def test_generate_goes_on_with_every_row_as_alone(make_xlstm: Make, rows: list[Tensor], device: str, side: str) -> None:
    model = accelerate(make_xlstm(torch.float64, device))
    ids, mask = padded(rows, side)
    options = {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(ids, attention_mask=mask, **options)[:, WIDTH:]
    for n, row in enumerate(rows):
        alone = model.generate(row[None], attention_mask=torch.ones(1, len(row), device=device), **options)
        assert found[n].tolist() == alone[0, len(row) :].tolist()


def test_parts_of_a_prompt_read_their_part_of_the_mask(make_xlstm: Make, rows: list[Tensor], device: str) -> None:
    """The model itself or the caller splits a prompt; the caller passes the mask of all tokens so far."""
    ids, mask = padded(rows, "left")
    model = accelerate(make_xlstm(device=device))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[:, -1]
        first = model(ids[:, :10], attention_mask=mask[:, :10], use_cache=True)
        second = model(ids[:, 10:], attention_mask=mask, cache_params=first.cache_params)
        assert error(second.logits[:, -1], expected) <= BOUND
        model.config.max_inference_chunksize = 5
        assert error(model(ids, attention_mask=mask).logits[:, -1], expected) <= BOUND


def test_a_failing_pass_leaves_no_mask(make_xlstm: Make, rows: list[Tensor], device: str) -> None:
    ids, mask = padded(rows, "left")
    model = accelerate(make_xlstm(device=device))

    def fail(*_: object) -> None:
        raise RuntimeError("power cut")

    with torch.no_grad():
        block, x = model.backbone.blocks[0], torch.ones(4, WIDTH, 128, device=device)
        expected = block(x)[0]
        hook = model.backbone.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="power cut"):
            model(ids, attention_mask=mask)
        hook.remove()
        assert torch.equal(block(x)[0], expected)


def test_compiles_without_graph_breaks(make_xlstm: Make, rows: list[Tensor], device: str) -> None:
    torch._dynamo.reset()
    ids, mask = padded(rows, "left")
    model = accelerate(make_xlstm(device=device))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        assert torch.equal(compiled(ids, attention_mask=mask, use_cache=False).logits, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_compile_without_graph_breaks(
    make_xlstm: Make, rows: list[Tensor], device: str, use_reentrant: bool
) -> None:
    """Gradients are those of the uncompiled model, also after a call with another mask."""
    torch._dynamo.reset()
    model = accelerate(make_xlstm(device=device)).train()
    leaves = [p for p in model.parameters() if p.requires_grad]

    def gradients(run: Any, side: str) -> list[Tensor]:
        ids, mask = padded(rows, side)
        logits = run(ids, attention_mask=mask, use_cache=False).logits
        return list(torch.autograd.grad(logits[mask.bool()].square().sum(), leaves))

    expected = {side: gradients(model, side) for side in ("left", "right")}
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for side, exact in expected.items():
        for found, once in zip(gradients(compiled, side), exact, strict=True):
            assert error(found, once) <= BOUND


@pytest.mark.parametrize("shape", [(4, WIDTH - 1), (3, WIDTH), (4, 1, WIDTH, WIDTH)])
def test_a_mask_of_another_shape_is_named(
    make_xlstm: Make, rows: list[Tensor], device: str, shape: tuple[int, ...]
) -> None:
    ids, _ = padded(rows, "left")
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(.*\), expected \(4, 18 or more\)"):
        accelerate(make_xlstm(device=device))(ids, attention_mask=torch.ones(shape))


def test_tuples_are_filled_too(make_xlstm: Make, rows: list[Tensor], device: str) -> None:
    ids, mask = padded(rows, "right")
    backbone = accelerate(make_xlstm(device=device)).backbone
    with torch.no_grad():
        expected = backbone(ids, attention_mask=mask).last_hidden_state
        assert torch.equal(backbone(ids, attention_mask=mask, return_dict=False)[0], expected)
