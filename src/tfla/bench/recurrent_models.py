"""The benchmark of models of Hugging Face transformers, with tfla's operators and with their own implementations."""

from __future__ import annotations

from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tfla.bench.replay import Replay
from tfla.integrations.transformers import accelerate
from tfla.integrations.transformers.rebind import with_functions
from tfla.integrations.transformers.recurrences import LAYERS
from tfla.measure.problem import Problem, Work

Path = Literal["tfla", "packages", "pytorch"]

# By name: the class of a model, that of its config, and the fields of a config of medium size.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2ForCausalLM", "Mamba2Config",
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_heads": 64, "head_dim": 64, "state_size": 128,
         "n_groups": 8},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {"hidden_size": 2048, "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4},
    ),
}  # fmt: skip


def build(problem: Problem, name: str, path: Path, **fields: Any) -> Any:
    """Return a model with random weights.

    Args:
        problem: its dtype and device.
        name: a key of MODELS.
        path: what computes its recurrences: "tfla"; "packages", the ones that transformers calls where they are
            installed; or "pytorch", the functions that it calls without them.
        fields: changes of the fields of its config.
    """
    import transformers

    model_class, config_class, sizes = MODELS[name]
    config = getattr(transformers, config_class)(**{"vocab_size": 50_304, "pad_token_id": 0} | sizes | fields)
    with torch.device(problem.device):
        model = getattr(transformers, model_class)(config)
    model = model.to(getattr(torch, problem.dtype)).train()
    if path == "tfla":
        accelerate(model)
    elif path == "pytorch":
        use_pytorch(model)
    return model


def use_pytorch(model: Any) -> None:
    """Make the model's recurrent layers call transformers' functions in PyTorch, also where packages are installed."""
    for layer in model.modules():
        recurrence = LAYERS.get(type(layer).__name__)
        if recurrence is not None and recurrence.functions:
            # transformers wraps these functions in one that calls a package.
            unwrapped = dict.fromkeys(recurrence.functions, lambda function: function.__wrapped__)
            layer.forward = MethodType(with_functions(type(layer).forward, unwrapped), layer)


def model(problem: Problem, name: str, path: Path, **fields: Any) -> Work:
    """Return a call of a model: with gradients its loss, without gradients a prefill into a new cache.

    The arguments are those of :func:`build`; the problem also has the number of sequences B and their length T.
    """
    built = build(problem, name, path, **fields)
    ids = torch.randint(1, built.config.vocab_size, (problem.B, problem.T), device=problem.device)

    def run(*_: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return built(ids, labels=ids, use_cache=False).loss
        return built(ids, use_cache=True, logits_to_keep=1).logits

    return Work(run, list(built.parameters()))


def step(problem: Problem, name: str, path: Path, graph: bool = False, **fields: Any) -> Work:
    """Return a call that decodes one token of each of B sequences, after a prompt of T tokens.

    Attention does not use cuDNN, which plans for 20 ms at each new length. The other arguments are those of
    :func:`build`.

    Args:
        problem: its dtype and device, and B and T.
        name: a key of MODELS.
        path: what computes the model's recurrences.
        graph: replay the call from a CUDA graph, so that the host's time does not count. Without a graph the cache of
            attention layers grows by a token in each call, with it every replay reads the same one.
        fields: changes of the fields of its config.
    """
    built = build(problem, name, path, **fields).eval()
    ids = torch.randint(1, built.config.vocab_size, (problem.B, problem.T), device=problem.device)
    cache = "cache_params" if name == "mamba2" else "past_key_values"
    with torch.no_grad():
        inputs = {cache: built(ids, use_cache=True, logits_to_keep=1)[cache]}
    read: list[list[Tensor]] = []

    @torch.no_grad()
    def run() -> Tensor:
        if graph:  # attention replaces the tensors of its cache, and replays read those that it had in the capture
            read.append([x for layer in inputs[cache].layers for x in vars(layer).values() if isinstance(x, Tensor)])
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return built(ids[:, :1], use_cache=True, **inputs).logits

    return Work(Replay(run, ids.device) if graph else run, [])
