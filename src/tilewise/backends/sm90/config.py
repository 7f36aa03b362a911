"""How the Hopper forward runs a problem: tiles, stages, schedule. Pure: reads no tensor, no device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...problem import AttentionProblem, Extents

#: Shared memory one block can have on sm_90, in bytes.
SMEM_LIMIT = 232448

HEAD_DIM_TILES = (64, 96, 128, 192, 256)


def padded(head_dim: int) -> int:
    """Return the narrowest tile that holds `head_dim` columns."""
    return next(t for t in HEAD_DIM_TILES if t >= head_dim)


@dataclass(frozen=True)
class ForwardConfig:
    """One way to run the forward.

    Attributes:
        warpgroups: consumer warpgroups, 64 rows of queries each.
        tile_n: keys of a block.
        stages: K and V blocks in flight, each.
        own_o: the output tile has its own shared memory (else it takes Q's place, and Q's next load waits).
        schedule: "single": one tile a block of threads, in launch order; "static": one block of threads per
            multiprocessor, tiles dealt in turn; "dynamic": likewise, but each takes the next tile when it is free.
        pingpong: the warpgroups take turns on the tensor cores.
        late_turn: the turn passes on when S has arrived, not when its multiply is issued: softmaxes are staggered.
        lazy: the output is rescaled only where the maximum grew by more than 2^8, by a vote of the warp.
        cluster: adjacent query tiles that fetch K and V once for all (1: none).
        pack: query heads packed into the rows of a tile (1: none).
        direct: the output goes from registers to global memory; shared memory holds no output tile.
        section_mib: K and V of the heads whose tiles are dealt out together, longest first (0: head by head).
    """

    warpgroups: int = 2
    tile_n: int = 128
    stages: int = 2
    own_o: bool = True
    schedule: str = "single"
    pingpong: bool = False
    late_turn: bool = False
    lazy: bool = False
    cluster: int = 1
    pack: int = 1
    direct: bool = False
    section_mib: int = 0

    @property
    def tile_m(self) -> int:
        """Rows of a query tile."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one producer warpgroup."""
        return 128 * (self.warpgroups + 1)

    @property
    def frees_q(self) -> bool:
        """Whether Q's buffer is free once the tile's last S is done, and not only when its output has left."""
        return self.own_o or self.direct

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer and of a consumer thread."""
        return {1: (56, 240), 2: (40, 232), 3: (32, 160)}[self.warpgroups]

    def smem_bytes(self, problem: AttentionProblem) -> int:
        """Return the shared memory of a block, barriers and alignment included."""
        d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
        q = self.tile_m * d
        o = 0 if self.direct else self.tile_m * dv
        kv = self.stages * self.tile_n * (d + dv)
        return 2 * ((q + o if self.own_o else max(q, o)) + kv) + 2048


# fmt: off
# (padded D, padded Dv) -> (no bound, some bound). Measured: docs/tuning/sm90_forward.md.
TUNED: dict[tuple[int, int], tuple[ForwardConfig, ForwardConfig]] = {
    (64, 64): (ForwardConfig(3, 128, 3, schedule="static", lazy=True),
               ForwardConfig(3, 128, 3, schedule="dynamic", pingpong=True)),
    (96, 96): (ForwardConfig(3, 112, 2, schedule="static", pingpong=True),
               ForwardConfig(3, 112, 2, schedule="dynamic", pingpong=True)),
    (128, 128): (ForwardConfig(2, 128, 2, schedule="static", pingpong=True, cluster=2),
                 ForwardConfig(2, 128, 2, schedule="dynamic")),
    (192, 128): (ForwardConfig(2, 128, 2, own_o=False, schedule="static", pingpong=True, cluster=2),
                 ForwardConfig(2, 128, 2, own_o=False, pingpong=True)),
    (256, 256): (ForwardConfig(2, 80, 2, own_o=False, pingpong=True, cluster=2),
                 ForwardConfig(2, 80, 2, own_o=False, pingpong=True)),
}
# fmt: on


def tuned(problem: AttentionProblem) -> ForwardConfig:
    """Return the measured configuration, or for other head dims that of the nearest larger pair."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    banded = problem.right or problem.left
    if (d, dv) in TUNED:
        return TUNED[d, dv][banded]
    if max(d, dv) <= 128:
        return ForwardConfig(2, 128, 2, own_o=False, schedule="dynamic")
    return ForwardConfig(2, 80 if dv > 128 else 96, 2, own_o=False, schedule="dynamic")


def narrow(extents: Extents, tile_m: int) -> bool:
    """Say whether the window spans so few keys that the edges of a query tile are most of its work."""
    if extents.window_left is None or extents.window_right is None:
        return False
    return extents.window_left + extents.window_right + 1 <= 4 * tile_m


def packs(problem: AttentionProblem, extents: Extents, config: ForwardConfig) -> bool:
    """Say whether to put a group's query heads into one tile: as asked, or where it saves tiles or key blocks."""
    group = extents.heads // max(extents.heads_kv, 1)
    if group < 2 or 64 % group:
        return False
    if problem.pack_gqa is not None:
        return problem.pack_gqa
    m, rows = config.tile_m, extents.max_seqlen_q
    fewer_tiles = -(-rows * group // m) <= 0.75 * group * -(-rows // m)
    return fewer_tiles or narrow(extents, m)


def choose(problem: AttentionProblem, extents: Extents) -> ForwardConfig:
    """Return the configuration for `problem` at these sizes."""
    config = tuned(problem)
    if packs(problem, extents, config):
        config = replace(config, pack=extents.heads // extents.heads_kv)
        if max(problem.head_dim, problem.head_dim_v) <= 64 and narrow(extents, config.tile_m):
            config = replace(config, tile_n=80, pingpong=False, schedule="static")
    if extents.max_seqlen_q * config.pack <= 64:
        return replace(config, warpgroups=1, tile_n=64, stages=2, own_o=True, schedule="dynamic", pingpong=False, cluster=1)
    if problem.packed_q and config.schedule == "static":
        config = replace(config, schedule="dynamic")
    if problem.packed_q or extents.max_seqlen_q < 1024 or config.pack > 1:
        config = replace(config, cluster=1)
    if (padded(problem.head_dim), padded(problem.head_dim_v)) == (128, 128) and extents.max_seqlen_k > 8192:
        if config.cluster > 1:
            config = replace(config, tile_n=160, pingpong=False)
        elif problem.right and not problem.left:
            config = replace(config, schedule="single")
    return config
