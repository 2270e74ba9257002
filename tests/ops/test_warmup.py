"""`tfla.warmup` makes the calls of an operator that compile; on a CPU there is nothing to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import tfla
import tfla.nn.mixers.mlstm
import tfla.nn.mixers.passes
from tfla.cli import main
from tfla.nn import LanguageModel, ModelConfig, mixers
from tfla.ops import warmup as module
from tfla.ops.warmup import FORMS

SIZES = (2, 5, 4, 8, 16)
NAMES = (
    *("q", "k", "v", "i", "f", "input_gate", "log_f", "log_i", "scale", "beta", "normalize_qk", "beta_activation"),
    *("gate_activation", "A_log", "dt_bias"),
)  # of the arguments that decide which kernels are compiled


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on a CPU count as calls that compile."""
    monkeypatch.setattr(module, "compiles", lambda device: True)


def test_there_is_nothing_to_compile_on_a_cpu() -> None:
    found = tfla.warmup(*SIZES, device="cpu")
    assert found.calls == ()
    assert str(found) == "cpu: there is nothing to compile"


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize("Hq", [None, 2])
@pytest.mark.parametrize("form", FORMS)
def test_each_call_is_made_twice(monkeypatch: pytest.MonkeyPatch, form: Any, Hq: int | None) -> None:
    """The shapes are those of the arguments, gradients belong to the second call alone, and results are finite."""
    made: list[tuple[torch.Size, torch.Size, bool, bool]] = []

    def watched(operator: Any) -> Any:
        def call(**given: Any) -> Any:
            h = operator(**given)
            first = h[0] if isinstance(h, tuple) else h
            assert first.isfinite().all()
            made.append((given["q"].shape, first.shape, first.requires_grad, isinstance(h, tuple)))
            return h

        return call

    for name in ("mlstm", "linear_attention", "delta_rule"):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
        monkeypatch.setattr(module, f"{name}_step", watched(getattr(module, f"{name}_step")))
    found = tfla.warmup(*SIZES, form=form, Hq=Hq, dtype=torch.float32, device="cpu", chunk_size=16)
    q, h = (2, 5, Hq or 4, 8), (2, 5, 4, 16)
    assert made == [
        *[(q, h, False, True)] * 2, *[(q, h, True, False)] * 2,
        *[((2, *q[2:]), (2, *h[2:]), False, True)] * 2,
    ]  # fmt: skip
    names = ["a forward of 2 x 5 steps", "a forward and a backward of 2 x 5 steps", "a step of 2 sequences"]
    assert [call.name for call in found.calls] == names
    assert all(call.seconds > 0 and call.again > 0 for call in found.calls)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_those_of_a_model_of_that_dtype(monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    """A kernel is compiled for the dtypes of all of its arguments, so that another dtype is another kernel."""

    def described(given: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: x.dtype if isinstance(x, torch.Tensor) else x for name, x in given.items() if x is not None}
        return {name: x for name, x in found.items() if name in NAMES}

    def watch(target: Any, name: str) -> None:
        original = getattr(target, name)

        def call(*args: Any, **given: Any) -> Any:
            made.append(described(dict(zip("qkvif", args, strict=False)) | given))
            return original(*args, **given)

        monkeypatch.setattr(target, name, call)

    made: list[dict[str, Any]] = []
    for name in ("mlstm", "linear_attention", "delta_rule"):
        for each in (name, f"{name}_step"):
            watch(mixers.mlstm if name == "mlstm" else mixers.passes, each)
    config = ModelConfig(d_model=32, num_blocks=1, num_heads=2, vocab_size=23, layers=(form,))
    model, ids = LanguageModel(config).bfloat16(), torch.zeros(1, 4, dtype=torch.int64)
    _, state = model(ids, return_state=True)
    model.step(ids[:, 0], state)
    dtypes = torch.bfloat16, torch.bfloat16
    ours = [module.arguments_of(form, leading, (2, 2, 16, 16), *dtypes, ids.device)[1] for leading in ((1, 4), (1,))]
    assert made == [described(given) for given in ours]


@pytest.mark.usefixtures("pretend")
def test_calls_can_be_left_out() -> None:
    found = tfla.warmup(*SIZES, device="cpu", dtype=torch.float32, backward=False, step=False)
    assert [call.name for call in found.calls] == ["a forward of 2 x 5 steps"]


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize("options", [{"return_state": True}, {"return_state": False}, {"states_every": 2}])
def test_options_about_states(options: dict[str, Any]) -> None:
    found = tfla.warmup(*SIZES, form="gla", device="cpu", dtype=torch.float32, **options)
    assert len(found.calls) == 3


def test_errors() -> None:
    with pytest.raises(ValueError, match="form: got 'rwkv', expected one of mlstm_exp, "):
        tfla.warmup(*SIZES, form="rwkv")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="T: got 0, expected at least 1"):
        tfla.warmup(1, 0, 1, 8, 8)
    with pytest.raises(TypeError, match="Hq: got float, expected an int"):
        tfla.warmup(*SIZES, Hq=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype: got 'bfloat16', expected a torch.dtype"),
        ({"param_dtype": 3}, "param_dtype: got 3, expected a torch.dtype"),
        ({"dtype": torch.float8_e4m3fn}, "q: got dtype torch.float8_e4m3fn, expected a float dtype"),
        ({"device": "gpu"}, "device: got 'gpu', expected 'cpu'"),
        ({"Hq": 3}, "v: got 4 heads, expected a multiple of the 3 heads"),
        ({"backward": "no"}, "backward: got 'no', expected True or False"),
        ({"backend": "cuda"}, "backend: got 'cuda', allowed are None and "),
        ({"chunk_size": 0}, "chunk_size: got 0, expected at least 1"),
        ({"chunksize": 64}, "unexpected keyword argument 'chunksize'"),
    ],
)
def test_arguments_are_checked_where_there_is_nothing_to_compile(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tfla.warmup(*SIZES, **{"device": "cpu"} | options)


def test_the_command_takes_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--shape", "1", "64", "2", "16", "32", "--form", "kda", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "cpu: there is nothing to compile\n"
    assert main(["warmup"]) == 1
    assert "checkpoint, shape: got both or neither, expected one of them" in capsys.readouterr().err
    for name, value in (("prompts", "9"), ("batches", "64"), ("states-every", "4"), ("capacity", "7")):
        assert main(["warmup", "--shape", "1", "64", "2", "16", "32", f"--{name}", value, "--device", "cpu"]) == 1
        message = f"{name.replace('-', '_')}: got it, expected it with checkpoint alone"
        assert message in capsys.readouterr().err
    assert main(["warmup", "--checkpoint", "nowhere", "--form", "kda"]) == 1
    assert "form: got it, expected it with shape alone" in capsys.readouterr().err
