"""Inputs in float32 are computed without float64, which Apple's GPUs do not have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import FORMS, Problem, problem
from delta_cases import delta_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tfla
from tfla.backends import BACKENDS, DELTA_BACKENDS
from tfla.backends.base import Inputs, Spec
from tfla.nn import LanguageModel, ModelConfig, generate
from tfla.ops.gates import clamp, log_gates
from tfla.train.config import Optim
from tfla.train.evaluation import evaluate
from tfla.train.recipe import clipped_gradients, optimizer

PLAIN_PYTORCH = [(name, kernel) for name in ("chunkwise", "reference") for kernel in BACKENDS[name].kernels]


class WithoutFloat64(TorchDispatchMode):
    """A device that has no float64: no operator may take or return a tensor of that dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and x.dtype == torch.float64:
                raise TypeError(f"{func}: float64 is not supported")
        return out


def test_the_mode_sees_float64() -> None:
    for make in (lambda: torch.zeros(1).double(), lambda: torch.zeros(1, dtype=torch.float64)):
        with pytest.raises(TypeError, match="float64 is not supported"), WithoutFloat64():
            make()


@pytest.mark.parametrize("model", ["gdn", "kda", "gla", "comba"])
@pytest.mark.parametrize("gates", ["medium", "resets"])
def test_delta_rule(model: str, gates: str) -> None:
    p = delta_problem(model, gates=gates, T=100, B=1, dtype=torch.float32)
    for backend in ("chunkwise", "reference"):
        chosen = DELTA_BACKENDS[backend]
        with WithoutFloat64():
            out = chosen.forward(p.x, p.spec(chosen.kernels[0]))
            chosen.backward(p.x, out, p.dh, p.dC, p.spec(chosen.kernels[0]))


@pytest.mark.parametrize("lengths", [None, (25, 0, 15)], ids=["batch", "packed"])
@pytest.mark.parametrize("closed", [False, True], ids=["any gates", "closed gates"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("backend", "kernel"), PLAIN_PYTORCH)
def test_backends(backend: str, kernel: str, form: str, closed: bool, lengths: tuple[int, ...] | None) -> None:
    """Closed gates are not taken apart."""
    p: Problem = problem(form, T=40, lengths=lengths, dtype=torch.float32)
    f = torch.where(torch.arange(40)[:, None] % 9 == 5, -1e5, p.f) if closed else p.f
    assert p.state is not None
    assert p.i is not None
    with WithoutFloat64():
        if form in ("plain", "normalized"):
            log_i, log_f = clamp(p.i), clamp(f)
        else:
            log_i, log_f = log_gates(p.i, f, form)  # type: ignore[arg-type]
        x = Inputs(p.q, p.k, p.v, log_i, log_f, *p.state, p.cu_seqlens)
        spec = Spec(0.5, p.normalize, True, 16, kernel, True, True)
        out = BACKENDS[backend].forward(x, spec)
        grads = BACKENDS[backend].backward(x, out, p.dh, p.dstate.C, p.dstate.n, spec)
    assert all(t.dtype == torch.float32 for t in (*out, *grads))


def train(model: LanguageModel, ids: Tensor) -> None:
    def losses(windows: Tensor) -> Tensor:
        logits = model(windows[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")

    steps = optimizer(model, Optim())
    for _ in range(2):
        clipped_gradients(model, losses, [ids], 0.5)
        steps.step()


def decode(model: LanguageModel, ids: Tensor) -> None:
    list(generate(model, ids, 3))


@pytest.mark.parametrize("work", [train, decode])
@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig", "attention"])
def test_language_model(mixer: str, work: Callable[[LanguageModel, Tensor], None]) -> None:
    """All around the operator."""
    model = LanguageModel(ModelConfig(d_model=32, num_blocks=2, num_heads=2, vocab_size=23, mixer=mixer))  # type: ignore[arg-type]
    ids = torch.randint(0, 23, (2, 19))
    with WithoutFloat64():
        work(model, ids)


def test_evaluation() -> None:
    model = LanguageModel(ModelConfig(d_model=32, num_blocks=1, num_heads=2, vocab_size=23))
    heldout = np.arange(60) % 23
    tokens = SimpleNamespace(heldout=heldout, heldout_bytes=np.ones(60, int), tokenizer=SimpleNamespace(bos=0))
    with WithoutFloat64():
        assert evaluate(model, tokens, 19, batch_size=2).tokens == 59  # type: ignore[arg-type]


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_steps(input_gate: str) -> None:
    q, k, v = (torch.randn(2, 3, d) for d in (5, 5, 7))
    i, f = torch.randn(2, 2, 3)
    with WithoutFloat64():
        state = tfla.State.zeros(2, 3, 5, 7, normalize=input_gate == "exp")
        for _ in range(2):
            _, state = tfla.mlstm_step(q, k, v, i, f, state, input_gate=input_gate)  # type: ignore[arg-type]
