"""The block sizes of the paper's kernels, by head dims, dtype, chunk size and GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tfla.backends.base import Inputs
from tfla.backends.gpu.config import architecture, ceil_div, power_of_two


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The block sizes: B_Lhq and B_Lkv of the paper are `steps` for a program's tile, `inner_steps` for its loop."""

    steps: int  # L, steps of a tile, also of the gate vectors
    inner_steps: int
    max_contracted: int  # largest contracted dim that is one block; larger ones have blocks of 64
    max_output: int  # largest block of the head dim that is divided among programs
    state_rows: int  # rows of the state of one program
    state_columns: int  # columns of the state of one program
    num_warps: int
    stages: int

    def contracted_block(self, width: int) -> int:
        """Return the block size of a contracted dim of this width."""
        block = padded(width)
        return block if block <= self.max_contracted else min(64, self.max_contracted)

    def output_block(self, width: int) -> int:
        """Return the block size of an output of this width."""
        return min(self.max_output, padded(width))


def padded(width: int) -> int:
    """Return the padded head dim, at least 32.

    With operands of 16 columns the MMAs that Triton generates for Hopper read beyond shared memory.
    """
    return max(32, power_of_two(width))


FLOAT32 = BlockSizes(  # no MMAs
    steps=32, inner_steps=32, max_contracted=32, max_output=64, state_rows=32, state_columns=64, num_warps=4, stages=1
)  # fmt: skip
UNALIGNED = BlockSizes(  # rows are loaded through registers
    steps=64, inner_steps=32, max_contracted=64, max_output=64, state_rows=64, state_columns=64, num_warps=8, stages=2
)  # fmt: skip
# With MMAs of four warps, and of one.
FOUR_WARPS = BlockSizes(
    steps=128, inner_steps=64, max_contracted=128, max_output=128, state_rows=64, state_columns=128, num_warps=8,
    stages=3,
)  # fmt: skip
FOUR_WARPS_SMALL_CHUNKS = BlockSizes(
    steps=64, inner_steps=64, max_contracted=64, max_output=128, state_rows=64, state_columns=128, num_warps=4,
    stages=2,
)  # fmt: skip
ONE_WARP = BlockSizes(
    steps=128, inner_steps=32, max_contracted=64, max_output=128, state_rows=64, state_columns=128, num_warps=8,
    stages=2,
)  # fmt: skip
ONE_WARP_SMALL_CHUNKS = dataclasses.replace(ONE_WARP, steps=64)


def choose(x: Inputs, chunk_size: int) -> BlockSizes:
    """Return the block sizes that fit the registers; tiles have 64 steps in chunks of 64 (`limit_chunk`), else 128."""
    if x.q.element_size() == 4:
        return FLOAT32
    if x.q.shape[3] % 16 or x.v.shape[3] % 16:
        return UNALIGNED
    if architecture(x.q.device) in (90, 100):
        return FOUR_WARPS if chunk_size > 64 else FOUR_WARPS_SMALL_CHUNKS
    return ONE_WARP if chunk_size > 64 else ONE_WARP_SMALL_CHUNKS


def chunk_steps(x: Inputs, chunk_size: int) -> int:
    """Return the number of steps of a chunk: chunk_size rounded up to whole tiles."""
    L = choose(x, chunk_size).steps
    return ceil_div(chunk_size, L) * L


def details(x: Inputs, chunk_size: int) -> dict[str, object]:
    """Return what :func:`tfla.explain` shows: the block sizes for h under the paper's names."""
    sizes = choose(x, chunk_size)
    return {
        "chunk": chunk_steps(x, chunk_size),
        "B_Lhq": sizes.steps,
        "B_Lkv": sizes.inner_steps,
        "B_dqk": sizes.contracted_block(x.q.shape[3]),
        "B_dhv": sizes.output_block(x.v.shape[3]),
    }
