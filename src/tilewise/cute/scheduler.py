"""Which tile a block of threads works on next, and the search of cu_seqlens that turns a slot into a sequence."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


def packed_slots(total: Int32, batch: Int32, tile_m: int) -> Int32:
    """Return the number of tile slots of packed queries, an upper bound on the tiles that needs no cu_seqlens.

    Sequence b owns the slots [cu[b] // tile_m + b, cu[b + 1] // tile_m + b + 1), at least as many as it has tiles;
    the rows after the last sequence count as one more.
    """
    return total // tile_m + batch + 1


@cute.jit
def sequence_of_slot(
    cu: cute.Tensor, slot: Int32, batch: Int32, group: cutlass.Constexpr[int], tile_m: cutlass.Constexpr[int]
):
    """Return (b, first slot of b) by a 32-way search over the first slots; all lanes of the warp take part."""
    lane = cute.arch.lane_idx()
    low, span = Int32(0), batch + 1  # the answer lies in [low, low + span)
    while span > 1:
        step = cute.ceil_div(span, 32)
        probe = low + lane * step
        at_most = cutlass.Boolean(False)
        if (probe < low + span) & (probe <= batch):
            at_most = cu[probe] * group // tile_m + probe <= slot
        hits = cute.arch.popc(cute.arch.vote_ballot_sync(at_most))
        low = low + (hits - 1) * step
        span = cutlass.min(step, batch + 1 - low)
    return low, cu[low] * group // tile_m + low


@cute.jit
def tile_of_section(tile: Int32, group: Int32, tiles_m: Int32, section: Int32, outer: Int32):
    """Return (head in its group, row of tiles, pair of key head and sequence) of a tile number.

    The `outer` pairs are dealt out in sections of `section`, whose K and V stay in L2 together. Within a section the
    row of tiles is the slow index: where long rows come first, only short ones are left at the end of the grid. (Head
    by head, the last head's longest row starts when little else is left to run beside it.)
    """
    whole = section * tiles_m * group
    at = tile // whole
    inside = tile - at * whole
    here = cutlass.min(section, outer - at * section)
    rest = inside // group
    m = rest // here
    return inside - rest * group, m, at * section + rest - m * here


# Where the next tile comes from; a number of `tiles` or more ends a block's work.
#   "single"   none                          "static"   the grid size on
#   "dynamic"  the producer draws from a counter in global memory, zero at launch, and hands the number to the consumers
#              through one slot in shared memory with two barriers (full, empty). Drawn at the start of a tile's loads
#              and published at their end, the number's latency is hidden.


@cute.jit
def initialize_handoff(bars, consumer_warps: cutlass.Constexpr[int], warp):
    """Initialise the barriers of the slot; a fence and a barrier of all threads are to follow."""
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(bars, 1)
            cute.arch.mbarrier_init(bars + 1, consumer_warps)


@cute.jit
def draw(counter):
    """Start to fetch the number of the next tile (producer warp); nothing unless there is a counter."""
    ticket = Int32(0)
    if const_expr(counter is not None):
        if cute.arch.lane_idx() == 0:
            ticket = Int32(cute.arch.atomic_add(counter.iterator, Int32(1)))
    return ticket


@cute.jit
def following(schedule: cutlass.Constexpr[str], tile: Int32, tiles: Int32):
    """Return the next tile where no counter is needed."""
    if const_expr(schedule == "single"):
        return tiles
    return tile + cute.arch.grid_dim()[0]


@cute.jit
def publish(ticket: Int32, bars, slot: cute.Tensor, phase: Int32):
    """Return the next tile and tell the consumers (producer warp)."""
    tile = cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(ticket, 0)
    cute.arch.mbarrier_wait(bars + 1, phase ^ 1)
    if cute.arch.lane_idx() == 0:
        slot[0] = tile
        cute.arch.mbarrier_arrive(bars)
    return tile


@cute.jit
def receive(bars, slot: cute.Tensor, phase: Int32):
    """Return the next tile (consumer warps)."""
    cute.arch.mbarrier_wait(bars, phase)
    tile = cute.arch.make_warp_uniform(slot[0])
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(bars + 1)
    return tile
