"""What the walks share: the partitions that fill shared memory, and the weighting of tiles.

Shared memory is a ring of stages. A stage has the tiles of one step of the walk, brought by the loader, and their gate
vectors, brought by a gater; its `full` barrier counts both, and the carrier (:mod:`.carrier`) and the clearer
(:mod:`.pairs`) where there is one, its `free` barrier both consumers. After its last tile every program gets one more
stage without data, because consumers make the weights P of a tile one tile ahead.

One gater takes about as long to make the gate vectors of a tile as consumers take for the tile, and takes turns of the
CUDA cores from them: how many there are is what was fastest.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from tfla.backends.hopper.order import BEGINS, CUT, ENDS, FIELDS, FIRST, SLOT, STEPS, TILE
from tfla.backends.hopper.vectors import ALL, gates_of, load_gates_of, stored_vectors, tile_vectors
from tfla.backends.triton.gates import VECTORS

# Named differently before Triton 3.7 and 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Registers of a thread of a consumer, and of the warps that fill shared memory. A program of three warpgroups starts
# with 168 for each thread, all that 65,536 give; what the last one, with few warps at work, leaves goes to consumers:
# 3 * 168 = 2 * 232 + 40.
CONSUMER = gl.constexpr(232)
FILLER = gl.constexpr(40)
# Of consumers that are short of them: with fewer ptxas serializes their MMAs. 3 * 168 = 2 * 240 + 24.
CONSUMER_MOST = gl.constexpr(240)
FILLER_LEAST = gl.constexpr(24)

# Arguments of the walks, beside tensors: numbers that one kernel serves whatever they are.
NUMBERS = [
    "T", "tiles_of_head", "H", "GROUP", "length", "pieces", "ib", "it", "ih", "fb", "ft", "fh", "scale", "log_scale"
]  # fmt: skip

# Rows of a stage's gate vectors.
READ = gl.constexpr(0)  # exponents of the gate matrix: P[read, update] is weighted by exp2(READ + WRITE)
WRITE = gl.constexpr(1)
OUT = gl.constexpr(2)  # weight of the state in an output
CARRY = gl.constexpr(3)  # decay of the state over the tile
GATES = gl.constexpr(4)


class Place(NamedTuple):
    """Of a tile."""

    s: Any  # its stage
    phase: Any  # of the barriers of the stage
    n: Any  # tiles before it


class Work(NamedTuple):
    """What there is to walk."""

    T: Any  # tokens of a batch row
    H: Any  # heads
    length: Any  # steps of a segment
    pieces: Any  # sequences, or segments of them, of a head each
    order: Any  # what :mod:`.order` wrote of packed sequences, or None


@gluon.jit
def anew(x):
    """x, read where it is used. What consumers need once a piece they have no register for: it is spilled, and memory
    that nobody has asked for during a piece is far. Two such words take 2,600 clocks, a tile 6,300."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_piece(index):
    """That a program takes after the index-th."""
    return index + anew(gl.num_programs(0))


@gluon.jit
def piece(index, work, L: gl.constexpr, SEGMENTED: gl.constexpr, ANEW: gl.constexpr = False):
    """The index-th piece of work: batch row, head, first step, how many steps, its first tile of those of a head.

    ANEW: of numbers that :func:`anew` has read.
    """
    T, H, length = work.T, work.H, work.length
    if ANEW:
        T, H, length = anew(T), anew(H), anew(length)
    slot = index // H
    if work.order is not None:
        row = work.order + slot * FIELDS
        start = gl.load(row + FIRST)
        return slot * 0, index % H, start, gl.load(row + STEPS), gl.load(row + TILE)
    elif SEGMENTED:
        count = (T + length - 1) // length
        start = slot % count * length
        tile0 = slot // count * ((T + L - 1) // L) + start // L
        return slot // count, index % H, start, gl.minimum(T - start, length), tile0
    else:
        return slot, index % H, 0, T, slot * ((T + L - 1) // L)


@gluon.jit
def state_of(index, work, inside=True):
    """Where the states of the index-th piece of work are among those of all."""
    if work.order is not None:
        H = work.H
        return gl.load(work.order + index // H * FIELDS + SLOT, mask=inside) * H + index % H
    else:
        return index


@gluon.jit
def tiles_of(index, start, steps, work, L: gl.constexpr, BACK: gl.constexpr, SKIP: gl.constexpr):
    """How many a walk takes of a piece; with SKIP none of the last of a sequence, what is behind which nobody wants."""
    tiles = (steps + L - 1) // L
    if not SKIP:
        return tiles
    elif work.order is not None:
        row = work.order + index // work.H * FIELDS
        return gl.where(gl.load(row + (BEGINS if BACK else ENDS)) != 0, 0, tiles)
    else:
        return gl.where(start == 0 if BACK else start + steps == work.T, 0, tiles)


@gluon.jit
def coordinates(b, h, t, column, end, work):
    """Of a tile in tensors as :func:`~tfla.backends.hopper.launch.described` has them. Of packed sequences no row from
    `end` on is read, which gives zeros, or written."""
    if work.order is not None:
        return CUT, end, h, CUT - end + t, column
    else:
        return b, h, t, column


@gluon.jit
def state_pointers(
    state, at, row, column, DX: gl.constexpr, DY: gl.constexpr, TRANSPOSED: gl.constexpr, layout: gl.constexpr,
    ROWS: gl.constexpr = 64, COLUMNS: gl.constexpr = 128,
):  # fmt: skip
    """Of some rows and columns of the at-th state (DX, DY), or in memory (DY, DX)."""
    r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    first = state + at.to(gl.int64) * (DX * DY)
    if TRANSPOSED:
        return first + (column + c) * DX + (row + r)
    else:
        # Elements of a thread are constants apart only before row and column come to them: addresses in no registers.
        return first + (row * DY + column) + (r * DY + c)


@gluon.constexpr_function
def of_product(columns):
    """Layout of a product of so many columns that one warpgroup computes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def as_left(x, columns: gl.constexpr):
    """x, in registers, as the left operand of such a product."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, of_product(columns), 2), assert_trivial=True)


@gluon.jit
def product(a, b):
    """Starts a b."""
    rows: gl.constexpr = a.shape[0]
    columns: gl.constexpr = b.shape[1]
    zero = gl.zeros([rows, columns], gl.float32, of_product(columns))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def ring_of(tensor, stages: gl.constexpr):
    """Shared memory for so many tiles of a tensor."""
    return gl.allocate_shared_memory(tensor.dtype, [stages] + tensor.block_type.shape, tensor.layout)  # noqa: RUF005


@gluon.jit
def vectors(dtype: gl.constexpr, count: gl.constexpr, size: gl.constexpr):
    """In shared memory, of the CUDA cores."""
    return gl.allocate_shared_memory(dtype, [count, size], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def matrices(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """In shared memory, as MMAs take them."""
    return gl.allocate_shared_memory(dtype, [count, rows, columns], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def barrier_of(arrivals: gl.constexpr):
    """One that waits for so many."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=arrivals)
    return bar


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def stage_barriers(STAGES: gl.constexpr, FULL: gl.constexpr, FREE: gl.constexpr):
    """`full` and `free` of a ring, and how many arrivals each waits for."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=FULL)
        mbarrier.init(free.index(s), count=FREE)
    return full, free


@gluon.jit
def place(n, STAGES: gl.constexpr):
    """Stage and phase of the n-th tile."""
    return n % STAGES, n // STAGES & 1


@gluon.jit
def next_stage(s, phase, STAGES: gl.constexpr):
    """As `place`, of the tile after that in stage s, without a division."""
    s += 1
    if s == STAGES:
        s = 0
        phase ^= 1
    return s, phase


@gluon.jit
def last_stage(n, full, free, STAGES: gl.constexpr, arrivals: gl.constexpr = 1):
    """Hands over the stage without data after n tiles."""
    s, phase = place(n, STAGES)
    mbarrier.wait(free.index(s), phase ^ 1)
    mbarrier.arrive(full.index(s), count=arrivals)


class GateRings(NamedTuple):
    """Of the heads of a program one after another, each in STAGES stages."""

    vectors: Any  # READ, WRITE, OUT and CARRY
    weights: Any  # of updates, as the sum of two of low precision
    extra: Any = None  # one more gate vector
    matrix: Any = None  # the weights also as the sum of three, rows of a right operand


class Gater(NamedTuple):
    """What the gaters of a walk are to do."""

    L: Any
    STAGES: Any
    BACK: Any
    SEGMENTED: Any
    EXTRA: Any = None  # which one is `extra`
    PIECES: Any = 1  # of programs that share columns of a state the first has the extra vector, the others zeros
    SKIP: Any = False  # as in `tiles_of`
    HEADS: Any = 1  # of a program, where a piece of work is one of that many heads
    GATERS: Any = 1  # that take turns; those that a kernel starts beyond them do nothing
    OUTPUTS: Any = True  # else the place of OUT has the weights of updates, in float32


@gluon.jit
def load_gates(turn: gl.constexpr, source, rings, full, free, work, tiles_of_head, gater):
    """A gater: one warp brings the gate vectors of a tile, of one head, when it is its turn."""
    L: gl.constexpr = gater.L
    HEADS: gl.constexpr = gater.HEADS
    GATERS: gl.constexpr = gater.GATERS
    layout: gl.constexpr = gl.BlockedLayout([L // 32], [32], [1], [0])
    r = gl.arange(0, L, layout)
    n = turn
    before = 0  # turns of pieces before
    pieces = work.pieces if turn < GATERS else 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, tile0 = piece(index, work, L, gater.SEGMENTED)
        tiles = tiles_of(index, start, steps, work, L, gater.BACK, gater.SKIP)
        first = n - before
        if source.MADE == ALL:
            i_gate, f_gate = gates_of_turn(first, b, h, start, steps, tiles, source, r, gater)
        for i in range(first, tiles * HEADS, GATERS):
            t = tile_of_turn(i, tiles, gater)
            head = i % HEADS
            tile = (h * HEADS + head).to(gl.int64) * tiles_of_head + tile0 + t
            if source.MADE == ALL:
                row, column, inter, update, carry = tile_vectors(
                    i_gate, f_gate, t * L + r < steps, source.scale, source.log_scale, source.INPUT_GATE,
                    source.SIGMOID_I, source.SIGMOID_F,
                )  # fmt: skip
                # Those of the next turn, on their way while this one waits for its stage. The compiler is not to know
                # that they follow those of this one: pointers that it moves along take registers.
                later = i + GATERS + (n >> 30)
                i_gate, f_gate = gates_of_turn(later, b, h, start, steps, tiles, source, r, gater)
            else:
                row, column, inter, update, carry = stored_vectors(source, tile, r)
            s, phase = place(n // HEADS, gater.STAGES)
            mbarrier.wait(free.index(s), phase ^ 1)
            at = head * gater.STAGES + s
            g = rings.vectors.index(at)
            g.slice(READ * L, L, 0).store(column if gater.BACK else row)
            g.slice(WRITE * L, L, 0).store(row if gater.BACK else column)
            g.slice(OUT * L, L, 0).store(update if gater.BACK == gater.OUTPUTS else inter)
            g.slice(CARRY * L, L, 0).store(carry)
            if gater.EXTRA is not None:
                has_extra = r * 0 + gl.program_id(1) % gater.PIECES == 0
                extra = source.vectors + tile * (VECTORS * L) + gater.EXTRA * L + r
                rings.extra.index(at).store(gl.load(extra, mask=has_extra, other=0.0))
            put_update_weights(inter if gater.BACK else update, rings, at, L)
            barrier()
            mbarrier.arrive(full.index(s), count=1)
            n += GATERS
        before += tiles * HEADS
    if n == before and turn < GATERS:
        last_stage(n // HEADS, full, free, gater.STAGES, HEADS)


@gluon.jit
def tile_of_turn(i, tiles, gater):
    """Where in its piece the tile of the i-th turn is."""
    return tiles - 1 - i // gater.HEADS if gater.BACK else i // gater.HEADS


@gluon.jit
def gates_of_turn(i, b, h, start, steps, tiles, source, r, gater):
    """Of the i-th turn of a piece, or where it has none zeros."""
    at_i, at_f = gates_of(source, b, h * gater.HEADS + i % gater.HEADS, start)
    return load_gates_of(at_i, at_f, tile_of_turn(i, tiles, gater) * gater.L, steps, r, source)


@gluon.jit
def in_three(x, dtype: gl.constexpr):
    """x as a sum of three of low precision, whose first two are off by 2^-17 of it in bfloat16."""
    high = x.to(dtype)
    rest = x - high.to(gl.float32)
    middle = rest.to(dtype)
    return high, middle, (rest - middle.to(gl.float32)).to(dtype)


@gluon.jit
def put_update_weights(update, rings, at, L: gl.constexpr):
    """As the sum of two of low precision. For n of three: where |d| is next to exp(-m), its last digits decide on the
    whole gradient of the denominator."""
    w = rings.weights.index(at)
    high, middle, low = in_three(update, w.dtype)
    w.slice(0, L, 0).store(high)
    w.slice(L, L, 0).store(middle)
    if rings.matrix is not None:
        layout: gl.constexpr = gl.BlockedLayout([8, L // 32], [1, 32], [1, 1], [1, 0])
        row = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
        high = gl.expand_dims(gl.convert_layout(high, gl.SliceLayout(0, layout)), 0)
        middle = gl.expand_dims(gl.convert_layout(middle, gl.SliceLayout(0, layout)), 0)
        low = gl.expand_dims(gl.convert_layout(low, gl.SliceLayout(0, layout)), 0)
        rows = gl.where(row == 0, high, gl.where(row == 1, middle, gl.where(row == 2, low, 0.0)))
        rings.matrix.index(at).store(rows.to(w.dtype))
        fence_async_shared()


@gluon.jit
def put_dot(x, y, to, part: gl.constexpr, L: gl.constexpr):
    """Sums over 64 rows of x (64, L), in registers, times y, in shared memory, as four parts: sums over 16 rows each,
    which are those of a warp, without an exchange between warps."""
    products = x.to(gl.float32) * y.load(x.type.layout).to(gl.float32)
    sums = gl.sum(gl.reshape(products, [4, 16, L]), 1)
    to.slice(part * 4 * L, 4 * L, 0).store(gl.reshape(sums, [4 * L]))


@gluon.jit
def weights(w, L: gl.constexpr, layout: gl.constexpr):
    """Of the updates of a tile, in float32."""
    return w.slice(0, L, 0).load(layout).to(gl.float32) + w.slice(L, L, 0).load(layout).to(gl.float32)


@gluon.jit
def scaled(tile, w, L: gl.constexpr, layout: gl.constexpr):
    """A tile in registers, (d, L), times the weights of its steps, rounded once: the left operand of an MMA."""
    high = gl.expand_dims(w.slice(0, L, 0).load(gl.SliceLayout(0, tile.type.layout)), 0)
    low = gl.expand_dims(w.slice(L, L, 0).load(gl.SliceLayout(0, tile.type.layout)), 0)
    tile, high = gl.broadcast(tile, high)
    tile, low = gl.broadcast(tile, low)
    if tile.dtype == gl.bfloat16:
        asm: gl.constexpr = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }"
    else:
        asm: gl.constexpr = "{ .reg .b32 t; mul.rn.f16x2 t, $1, $3; fma.rn.f16x2 $0, $1, $2, t; }"
    x = gl.inline_asm_elementwise(asm, "=r,r,r,r", [tile, high, low], dtype=tile.dtype, is_pure=True, pack=2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def gate_matrix(g, L: gl.constexpr, half: gl.constexpr, layout: gl.constexpr, PARTS: gl.constexpr = 2):
    """exp2(READ_i + WRITE_j) for one half of the updates j, or with one part for all, unmasked."""
    read = g.slice(READ * L, L, 0).load(gl.SliceLayout(1, layout))
    write = g.slice(WRITE * L + half * (L // PARTS), L // PARTS, 0).load(gl.SliceLayout(0, layout))
    return gl.exp2(gl.expand_dims(read, 1) + gl.expand_dims(write, 0))


@gluon.jit
def seen(S, D, i, j, half: gl.constexpr, BACK: gl.constexpr):
    """S * D where a step sees the update: i >= j, walking back i <= j.

    Each thread has i and j in a pattern (i: its own + 8, j: its own + 1 + 8 n), so that one difference of the thread
    against constants says it for all: plain i >= j holds sixteen registers more.
    """
    of_thread = gl.expand_dims(i & -9, 1) - gl.expand_dims(j & 6, 0)
    constant = gl.expand_dims(j & -7, 0) - gl.expand_dims(i & 8, 1) + half * 32
    if BACK:
        return gl.where(of_thread <= constant, S * D, 0.0)
    else:
        return gl.where(of_thread >= constant, S * D, 0.0)
