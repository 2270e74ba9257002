"""The cost of one training step in a layout: seconds by what they are spent on, and bytes of a GPU.

What one GPU computes takes the FLOPs of its tokens at the rate that one GPU reaches in a measured step. What GPUs send
each other takes a latency and a bandwidth for each kind of link. Three things are sent:

- FSDP gathers the weights of a block before its forward and before its backward, and scatters its gradients. This
  overlaps with the computation of the block before, so that only what takes longer than that counts. What it copies
  between parameters and the buffers that are sent does not overlap: the copies are in the stream of the computation.
- Context parallelism gathers one state for each sequence, head and layer, forward and backward, and with a normalizer
  a smaller message before or after it. It does not overlap.
- Tensor parallelism sums the residual stream twice in each block, forward and backward. It does not overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tfla.nn import LanguageModel, ModelConfig
from tfla.ops.context_parallel.spans import row_width
from tfla.ops.flops import TILE, backward_flops, forward_flops
from tfla.train.memory import FLOAT32, Sharing, needed

BFLOAT16 = 2  # bytes of an activation
FLOAT64 = 8
READ_AND_WRITE = 2  # passes over memory of a copy
ADAMW_PASSES = 8  # weights, gradient and moments read, weights and moments written, the gradient read for its norm


@dataclass(frozen=True)
class Link:
    """A link between GPUs."""

    seconds: float
    """The latency of one message."""
    bytes_per_second: float
    """The bandwidth of one GPU, in each direction."""


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes."""

    name: str
    flops: float
    """FLOP/s of one GPU in a training step."""
    memory_rate: float
    """Byte/s of its memory."""
    memory_bytes: int
    inside: Link
    """The link between GPUs of a node."""
    between: Link
    """The link between nodes; each GPU has one."""
    per_node: int = 8

    def all_gather_seconds(self, whole: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all_gather; a reduce_scatter takes as long, an all_reduce twice as long.

        Args:
            whole: the bytes that every GPU has at the end.
            size: the number of GPUs of a group.
            stride: the distance of their numbers; a node has consecutive ones.
        """
        if size == 1:
            return 0.0
        near = max(1, min(size, self.per_node // stride))  # GPUs of the group in a node
        nodes = math.ceil(size / near)
        # All GPUs of a group in a node send at the same time what leaves the node.
        far = min(self.inside.bytes_per_second, near * self.between.bytes_per_second)
        rate = self.inside.bytes_per_second if nodes == 1 else far
        latency = self.inside.seconds * math.log2(near) + self.between.seconds * math.log2(nodes)
        return latency + whole * (size - 1) / size / rate


def exchanged(dqk: int, dhv: int, normalize: bool, backward: bool) -> tuple[int, ...]:
    """Return the bytes that a GPU sends for a head and sequence in each collective of context parallelism.

    Args:
        dqk, dhv: the sizes of a head.
        normalize: whether there is a normalizer, as the exponential gate has. Two max states in float64 then come
            before the states, and the cotangents of n, of size dqk, after those of C.
        backward: whether cotangents are sent, and not states.
    """
    if not normalize:
        return (FLOAT32 * row_width(dqk, dhv, False),)
    if backward:  # rows of cotangents have a max state, too
        return tuple(FLOAT32 * (row_width(dqk, columns, False) + 1) for columns in (dhv, 1))
    return 2 * FLOAT64, FLOAT32 * row_width(dqk, dhv, True)


@dataclass(frozen=True)
class Layout:
    """The distribution of a step over GPUs, in the order of a mesh's dimensions."""

    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    passes: int = 1
    """Passes in which the batch is computed (`--accumulate`)."""
    checkpointing: bool = False

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.dp_shard * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Return the number of GPUs that share the parameters by FSDP."""
        return self.dp_shard * self.cp


@dataclass(frozen=True)
class Work:
    """A batch of sequences for a model."""

    config: ModelConfig
    T: int
    """Steps of a sequence."""
    sequences: int

    @property
    def tokens(self) -> int:
        """Return the tokens of the batch."""
        return self.T * self.sequences

    @cached_property
    def parameters(self) -> tuple[int, int]:
        """The numbers of parameters of a block, and of embedding and unembedding."""
        with torch.device("meta"):
            model = LanguageModel(replace(self.config, num_blocks=1))
        block = sum(p.numel() for p in model.blocks[0].parameters())
        return block, model.num_parameters() - block

    @property
    def model_bytes(self) -> int:
        """Return the bytes of all weights."""
        block, ends = self.parameters
        return FLOAT32 * (self.config.num_blocks * block + ends)

    def flops(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the FLOPs of a token, forward and backward: of a block, and of the logits."""
        c = self.config
        heads = (c.num_heads, c.qk_head_dim, c.head_dim)
        block, logits = 2.0 * self.parameters[0], 2.0 * c.d_model * c.vocab_size
        operator = [f(TILE, *heads) / TILE for f in (forward_flops, backward_flops)]
        return (block + operator[0], 2 * block + operator[1]), (logits, 2 * logits)

    def exchanged(self, backward: bool) -> list[int]:
        """Return the bytes that a GPU sends for a layer and sequence in each collective of context parallelism."""
        c = self.config
        every = exchanged(c.qk_head_dim, c.head_dim, c.mixer == "mlstm_exp", backward)
        return [c.num_heads * x for x in every]


@dataclass(frozen=True)
class Cost:
    """The seconds of a step by what they are spent on, and the bytes of a GPU."""

    compute: float
    optimizer: float
    fsdp: float
    """The part of FSDP's communication that does not overlap, and its copies."""
    cp: float
    tp: float
    memory: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the step."""
        return self.compute + self.optimizer + self.fsdp + self.cp + self.tp


def step_cost(work: Work, layout: Layout, cluster: Cluster) -> Cost:
    """Return the cost of a step.

    Args:
        work: the batch; its sequences are a multiple of dp_shard times passes.
        layout: the layout.
        cluster: the GPUs.
    """
    blocks, again = work.config.num_blocks, int(layout.checkpointing)
    sequences = work.sequences / (layout.dp_shard * layout.passes)  # of a GPU in a pass
    tokens = sequences * work.T / layout.cp
    (forward, backward), (logits, logits_backward) = (
        [tokens * x / (layout.tp * cluster.flops) for x in part] for part in work.flops()
    )
    backward += again * forward
    compute = blocks * (forward + backward) + logits + logits_backward + again * logits

    block_bytes, end_bytes = (FLOAT32 * x / layout.tp for x in work.parameters)
    gather, ends = (cluster.all_gather_seconds(x, layout.shards, stride=layout.tp) for x in (block_bytes, end_bytes))
    # The weights of the first block and of the ends, and the gradients of the last ones, overlap with nothing.
    fsdp = 2 * (gather + ends) + blocks * (max(0.0, gather - forward) + max(0.0, 2 * gather - backward))
    if layout.shards > 1:
        # Gathered weights are copied out of a buffer, those of blocks twice, and gradients into one, once.
        fsdp += READ_AND_WRITE * (3 * blocks * block_bytes + 2 * end_bytes) / cluster.memory_rate

    states, cotangents = (
        sum(
            cluster.all_gather_seconds(layout.cp * sequences * x / layout.tp, layout.cp, stride=layout.tp)
            for x in work.exchanged(direction)
        )
        for direction in (False, True)
    )
    stream = 2 * cluster.all_gather_seconds(BFLOAT16 * tokens * work.config.d_model, layout.tp)
    gathered_logits = cluster.all_gather_seconds(BFLOAT16 * tokens * work.config.vocab_size, layout.tp)

    share = work.model_bytes / (layout.shards * layout.tp)
    sharing = Sharing(layout.shards * layout.tp, layout.tp)
    need = needed(work.config, math.ceil(tokens), True, sharing, layout.checkpointing, loss_kernels=True)
    at_once = 2 * (2 * block_bytes + end_bytes) if layout.shards > 1 else 0.0  # weights and gradients of two blocks
    return Cost(
        compute=layout.passes * compute,
        optimizer=ADAMW_PASSES * share / cluster.memory_rate,
        fsdp=layout.passes * fsdp,
        cp=layout.passes * blocks * ((1 + again) * states + cotangents),
        tp=layout.passes * (blocks * 2 * (2 + again) * stream + gathered_logits) if layout.tp > 1 else 0.0,
        memory=need.state + need.activations + at_once,
    )


def best_layout(work: Work, gpus: int, cluster: Cluster, spare: float = 0.9) -> tuple[Layout, Cost] | None:
    """Return the fastest layout that fits into the memory of the GPUs, and its cost; None if none does.

    Args:
        work: the batch.
        gpus: the number of GPUs, a power of two.
        cluster: the GPUs.
        spare: the share of the memory that a step may need.
    """
    found: list[tuple[Layout, Cost]] = []
    tp = 1
    while tp <= min(gpus, cluster.per_node) and work.config.num_heads % tp == 0:
        cp = 1
        while cp * tp <= gpus and work.T // cp >= TILE:
            dp = gpus // (cp * tp)
            for checkpointing in (False, True):
                passes = 1
                while dp * passes <= work.sequences:
                    layout = Layout(dp, cp, tp, passes, checkpointing)
                    cost = step_cost(work, layout, cluster)
                    if cost.memory <= spare * cluster.memory_bytes:
                        found.append((layout, cost))
                        break
                    passes *= 2
            cp *= 2
        tp *= 2
    return min(found, key=lambda pair: pair[1].seconds, default=None)
