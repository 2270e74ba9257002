"""Training of an mLSTM language model in JAX, with the weights divided over all devices (FSDP).

    python examples/jax_train.py                  # the source of Python's standard library, byte by byte
    python examples/jax_train.py --out my-model   # saves what tfla.nn.LanguageModel.from_pretrained loads too

On a machine without accelerators, XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two devices of the CPU. Each
device holds a part of every weight and of its moments in Adam, and a part of each batch. XLA gathers a weight where a
layer needs it, and reduces its gradient to the device that holds it; the model itself says nothing about devices.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tfla.jax.nn import LanguageModel
from tfla.nn import ModelConfig

BOS = 256  # starts each file
BITS = float(np.log(2))


def corpus(folder: Path) -> np.ndarray:
    """Return the bytes of all Python files of a folder, each after a BOS, as tokens (N,)."""
    files = sorted(folder.glob("*.py"))
    parts = [np.concatenate([[BOS], np.frombuffer(path.read_bytes(), np.uint8)]) for path in files]
    return np.concatenate(parts).astype(np.int32)


def batches(tokens: np.ndarray, batch: int, context: int, seed: int) -> Iterator[np.ndarray]:
    """Yield random windows (batch, context + 1) of a stream of tokens."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - context, batch)
        yield np.stack([tokens[start : start + context + 1] for start in starts])


def spec(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Return how an array is divided: along its longest dim that the number of devices divides, if there is one."""
    sizes = [(size, -dim) for dim, size in enumerate(shape) if size % devices == 0 and size >= devices]
    dim = -max(sizes)[1] if sizes else None
    return PartitionSpec(*("fsdp" if dim == at else None for at in range(len(shape))))


def divide(module: nnx.Module | nnx.Optimizer, mesh: Mesh) -> None:
    """Divide all arrays of a model or of an optimizer over the devices of a mesh."""
    state = nnx.state(module)
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, spec(x.shape, mesh.size)), state)
    nnx.update(module, jax.device_put(state, shardings))


def loss(model: LanguageModel, window: Any) -> Any:
    """Return the mean loss in bits of the tokens of windows (B, T + 1), each given those before it in its file."""
    ids, targets = window[:, :-1], window[:, 1:]
    logits = model(ids, document_start=ids == BOS)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / BITS


@nnx.jit
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, window: Any) -> Any:
    """Update the model by one step and return the loss before it."""
    value, grads = nnx.value_and_grad(loss)(model, window)
    optimizer.update(model, grads)
    return value


def main(arguments: list[str] | None = None) -> tuple[LanguageModel, list[float]]:
    """Train a model, and return it with the loss of each step."""
    parser = argparse.ArgumentParser(description="Train an mLSTM language model in JAX.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step; the number of devices divides it")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    args = parser.parse_args(arguments)

    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    config = ModelConfig(d_model=args.d_model, num_blocks=2, num_heads=4, vocab_size=BOS + 1)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, args.steps // 20), args.steps, args.lr / 10)
    transform = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    divide(model, mesh)
    divide(optimizer, mesh)
    print(f"{model.num_parameters():,} parameters on {mesh.size} devices")

    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    data = batches(corpus(args.corpus), args.batch, args.context, seed=0)
    losses, started = [], time.perf_counter()
    for step in range(args.steps):
        losses.append(train_step(model, optimizer, jax.device_put(next(data), rows)))
        if step % max(1, args.steps // 20) == 0 or step == args.steps - 1:
            print(f"step {step:5}  {losses[-1]:.3f} bits a byte  {time.perf_counter() - started:5.0f} s", flush=True)
    if args.out is not None:
        model.save_pretrained(args.out)
        print(f"saved to {args.out}")
    return model, [float(x) for x in losses]


if __name__ == "__main__":
    main()
