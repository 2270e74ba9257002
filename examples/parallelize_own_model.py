"""A model of one's own with the mLSTM layer, trained on any number of processes, in the style of torchtitan.

    python examples/parallelize_own_model.py
    torchrun --nproc-per-node 8 examples/parallelize_own_model.py --dp-shard 2 --cp 2 --tp 2

The model is plain PyTorch. `tfla.distributed.parallelize` shards its mLSTM layers by heads, and its blocks by FSDP2.
The plan below says how tensor parallelism shards what is not a layer of tfla. The tokens of a row count upwards or
downwards. Every layout prints the same losses, up to rounding.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from tfla.distributed import parallelize
from tfla.nn import MLSTM, ModelConfig

VOCAB, WIDTH, BLOCKS, BATCH, CONTEXT = 64, 64, 2, 8, 32


class Block(nn.Module):
    """An mLSTM layer and a feed-forward network, each with a norm before it and a residual connection around it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlstm_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mlstm = MLSTM(ModelConfig(d_model=WIDTH, num_blocks=BLOCKS, num_heads=4, input_gate_bias=-1.0))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.mlstm(self.mlstm_norm(x))
        x = x + mixed
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """Embedding, blocks, norm and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def own_plan() -> dict[str, ParallelStyle]:
    """Return how tensor parallelism shards the layers that are not tfla's."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(BLOCKS):
        plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
    return plan


def batch(step: int) -> Tensor:
    """Return the tokens (B, T + 1) of a step, the same on every process."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    direction = 2 * torch.randint(2, (BATCH, 1), generator=generator) - 1
    return (first + direction * torch.arange(CONTEXT + 1)) % VOCAB


def own_part(tokens: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of this process: its rows and its steps of a batch."""
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    if mesh is not None:
        for name, dim in (("dp_shard", 0), ("cp", 1)):
            at, parts = mesh.get_local_rank(name), mesh[name].size()
            ids, targets = ids.chunk(parts, dim)[at], targets.chunk(parts, dim)[at]
    return ids, targets


def main(args: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (("dp-shard", "share rows and parameters"), ("cp", "share steps"), ("tp", "share heads")):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"processes that {text}")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(args)

    device, mesh = torch.device(options.device), None
    if "WORLD_SIZE" in os.environ:  # torchrun
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        sizes = (options.dp_shard, options.cp, options.tp)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp_shard", "cp", "tp"))

    torch.manual_seed(0)  # every process makes the same weights, of which it keeps its part
    model = Model().to(device)
    if mesh is not None:
        parallelize(model, mesh, tp_plan=own_plan())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for step in range(options.steps):
        ids, targets = own_part(batch(step).to(device), mesh)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if mesh is not None:  # as many tokens on every process, so that the mean of means is that of all tokens
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
        if mesh is None or dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    if mesh is not None:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
