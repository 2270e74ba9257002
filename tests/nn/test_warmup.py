"""`warmup` makes the calls that compile, and says what they compiled; on a CPU there is nothing to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfla._util.warm_calls import compiled_kernels
from tfla.cli import main
from tfla.nn import Decoder, LanguageModel, ModelConfig, warmup
from tfla.nn import warmup as warmup_function

SMALL: dict[str, Any] = {"d_model": 32, "num_blocks": 2, "num_heads": 2, "vocab_size": 23}


def build(**fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**SMALL | fields))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on a CPU count as calls that compile."""
    import sys

    monkeypatch.setattr(sys.modules[warmup_function.__module__], "compiles", lambda device: True)


def test_there_is_nothing_to_compile_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    monkeypatch.setattr(model, "hidden", None)  # no call is made
    found = warmup(model)
    assert found.calls == ()
    assert str(found) == "cpu: there is nothing to compile"


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize("states_every", [None, 4])
@pytest.mark.parametrize(("fields", "capacity"), [({}, None), ({"mixer": "attention"}, 8)])
def test_each_kind_of_call_is_made(fields: dict[str, Any], capacity: int | None, states_every: int | None) -> None:
    model, lengths, steps = build(**fields), [], []
    model.blocks[0].register_forward_hook(lambda _, args, out: lengths.append(args[0].shape[1]))
    original = Decoder.step

    def step(self: Decoder, ids: torch.Tensor) -> torch.Tensor:
        steps.append(self.batch)
        return original(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "step", step)
        found = warmup(model, prompts=(1, 9), batches=(1, 3), states_every=states_every, capacity=capacity)
    assert lengths[:4] == [1, 1, 9, 9]
    assert steps == [1, 1, 3, 3]
    names = ["a prompt of 1 tokens", "a prompt of 9 tokens", "a step of 1 sequences", "a step of 3 sequences"]
    assert [call.name for call in found.calls] == names
    assert all(call.seconds > 0 and call.again > 0 for call in found.calls)
    assert str(found).count("0 kernels compiled") == 4


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize("states_every", [None, 4])
@pytest.mark.parametrize("fields", [{}, {"layers": ("gated_delta_net", "attention")}])
def test_calls_of_a_server_use_a_pool(fields: dict[str, Any], states_every: int | None) -> None:
    """Prompts start from a state, since a row of a pool is one, and are read packed too; all calls are padding."""
    model, prompts, steps = build(**fields), [], []
    original = Decoder.step

    def step(self: Decoder, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        steps.append((self.batches, rows.tolist()))
        return original(self, ids, rows)

    def watch(_: Any, args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        prompts.append((args[0].shape[1], options.get("cu_seqlens") is not None, args[1] is not None))

    model.blocks[0].register_forward_hook(watch, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "step", step)
        found = warmup(model, prompts=(3, 9), batches=(1, 3), states_every=states_every, capacity=16, pool=5)
    assert prompts == [(3, False, True)] * 2 + [(9, False, True)] * 2 + [(3, True, True)] * 2 + [(9, True, True)] * 2
    assert steps == [((1,), [-1])] * 2 + [((3,), [-1] * 3)] * 2
    assert [call.name for call in found.calls][1:3] == ["a prompt of 9 tokens", "a packed prompt of 3 tokens"]


@pytest.mark.usefixtures("pretend")
def test_kernels_are_named_by_the_call_that_compiles_them() -> None:
    triton = pytest.importorskip("triton")
    model, fresh = build(), {"o_dv", "one_step"}

    def compile(name: str) -> None:  # as Triton does at the first launch
        if name in fresh and triton.knobs.runtime.jit_post_compile_hook is not None:
            fresh.remove(name)
            triton.knobs.runtime.jit_post_compile_hook(key="k", repr=f"{name}[num_warps=4](x)", fn=None)

    model.blocks[0].register_forward_hook(lambda *_: compile("o_dv"))
    original = model.step
    model.step = lambda *args, **options: (compile("one_step"), original(*args, **options))[1]  # type: ignore[method-assign]
    found = warmup(model, prompts=(5, 7), batches=(2,))
    assert [call.kernels for call in found.calls] == [("o_dv",), (), ("one_step",)]
    assert triton.knobs.runtime.jit_post_compile_hook is None


def test_a_hook_that_is_set_is_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    recorded: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **given: recorded.append(given["repr"]))
    with compiled_kernels() as found:
        triton.knobs.runtime.jit_post_compile_hook(repr="a[1]")
    triton.knobs.runtime.jit_post_compile_hook(repr="b[1]")
    assert found == ["a"]
    assert recorded == ["a[1]", "b[1]"]


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="prompts: got int, expected a sequence of ints"):
        warmup(build(), prompts=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batches: got 0, expected at least 1"):
        warmup(build(), batches=(0,))
    with pytest.raises(ValueError, match="pool: got 0, expected at least 1"):
        warmup(build(), pool=0)
    with pytest.raises(ValueError, match="capacity: got 0, expected at least 1"):
        warmup(build(), capacity=0)
    with pytest.raises(TypeError, match="model: got int, expected a LanguageModel"):
        warmup(3)  # type: ignore[arg-type]


def test_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    build().save_pretrained(tmp_path)
    assert main(["warmup", "--checkpoint", str(tmp_path), "--device", "cpu", "--batches", "1", "8"]) == 0
    assert capsys.readouterr().out == "cpu: there is nothing to compile\n"
    assert main(["warmup", "--checkpoint", str(tmp_path / "none"), "--device", "cpu"]) == 1
    assert "error: " in capsys.readouterr().err
    assert main(["warmup", "--checkpoint", str(tmp_path), "--device", "cpu", "--prompts", "0"]) == 1
    assert "prompts: got 0, expected at least 1" in capsys.readouterr().err
