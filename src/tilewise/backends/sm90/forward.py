"""FlashAttention forward for Hopper: warp-specialised, TMA in and out, wgmma, everything between in registers.

Roles (one block of threads)
    producer     warp 0 of warpgroup 0: Q of the tile, then K and V blocks from the last to the first, by TMA
    consumers    `warpgroups` warpgroups of 64 query rows: S = Q K^T, online softmax, O += P V, then the store

Buffers
    sQ  one query tile, held while its tile lasts      sK, sV  rings of `stages` blocks
    sO  the output tile: its own, or in Q's place once the tile's last S is done, or none (`direct`)

Order within a consumer: while softmax runs on block n, P V of block n + 1 is still in flight; P stays in registers as
operand A. Key blocks are walked from the right end so that blocks that need a mask come first: edge, right-masked,
free, left-masked, each in its own loop.

Lengths, windows and scales are run-time values; their presence is what compiles. Rows that do not count or see no key
are written as 0 with LSE -inf. Packed queries: tiles come from slots (see scheduler.py), and a tile that ends inside
a warpgroup's rows is stored row by row, never into the next sequence.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ...compile import fakes
from ...cute import block_range, mask, mma_sm90, scheduler, seqlen, softmax
from ...cute.pack_gqa import packed_view
from ...problem import AttentionProblem
from .config import ForwardConfig, padded


class ForwardKernel:
    """out, lse = attention(q, k, v). Tensors arrive with four dimensions; packed ones with a leading 1."""

    def __init__(self, problem: AttentionProblem, config: ForwardConfig):
        self.problem, self.config = problem, config
        self.dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[problem.dtype]
        self.tile_d, self.tile_dv = padded(problem.head_dim), padded(problem.head_dim_v)
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.pack = config.pack
        # V rows past the counting keys are someone else's (or poison), and 0 * NaN is NaN.
        self.foreign_v = problem.packed_k or problem.seqused_k
        # A row may have seen no key after its first block.
        self.sparse_rows = problem.right or problem.left or problem.packed_q or problem.packed_k or problem.seqused_k

    @staticmethod
    def fake_arguments(problem: AttentionProblem, config: ForwardConfig) -> tuple:
        """Return what `__call__` is compiled with: tensors of open sizes, None for what is absent."""
        d, dv, kind = problem.head_dim, problem.head_dim_v, problem.dtype
        wide = [fakes.tensor(kind, (None, None, None, n), 16) for n in (d, d, dv, dv)]
        lse = fakes.tensor("float32", (None, None, None), 4)

        def vector(present, dtype="int32"):
            return fakes.tensor(dtype, (None,), 2 if dtype == "bfloat16" else 4) if present else None

        p = problem
        vectors = [vector(x) for x in (p.packed_q, p.packed_k, p.seqused_q, p.seqused_k)]
        sink = vector(p.sink is not None, p.sink or "float32")
        counter = vector(config.schedule == "dynamic")
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return (*wide, lse, *vectors, sink, counter, Float32(1.0), Float32(1.0), *(Int32(1) for _ in range(4)), stream)

    # ------------------------------------------------------------------------------------------------------ host
    @cute.jit
    def __call__(
        self, mQ, mK, mV, mO, mLSE, cu_q, cu_k, used_q, used_k, sink, counter, scale: Float32, cap: Float32,
        left: Int32, right: Int32, batch: Int32, multiprocessors: Int32, stream,
    ):  # fmt: skip
        def view(t, modes):
            return cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))

        mQ, mK, mO = [view(t, [1, 3, 2, 0]) for t in (mQ, mK, mO)]  # (S, D, H, B)
        mV = view(mV, [3, 1, 2, 0])  # (D, S, H, B)
        mLSE = view(mLSE, [2, 1, 0])  # (S, H, B)
        rows = mQ.shape[0]
        group = mQ.shape[2] // mK.shape[2]
        if const_expr(self.pack > 1):
            tma_q_src, tma_o_dst = packed_view(mQ, self.pack), packed_view(mO, self.pack)
            group = Int32(1)
        else:
            tma_q_src, tma_o_dst = mQ, mO

        row, col = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR

        def smem(major, extent, shape, order):
            atom = warpgroup.make_smem_layout_atom(sm90.get_smem_layout_atom(major, self.dtype, extent), self.dtype)
            return cute.tile_to_shape(atom, shape, order=order)

        c, d, dv, n = self.config, self.tile_d, self.tile_dv, self.tile_n
        sQ_l = smem(row, d, (64, d, c.warpgroups), (0, 1, 2))
        sK_l = smem(row, d, (n, d, c.stages), (0, 1, 2))
        sV_l = smem(col, dv, (dv, n, c.stages), (1, 0, 2))
        sO_l = smem(row, dv, (64, dv, c.warpgroups), (0, 1, 2))

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_kv = cpasync.CopyBulkTensorTileG2SMulticastOp() if const_expr(c.cluster > 1) else load
        one_stage = [cute.select(s, mode=[0, 1]) for s in (sQ_l, sK_l, sV_l, sO_l)]
        tma_q, tQ = cpasync.make_tiled_tma_atom(load, tma_q_src, one_stage[0], (64, d))
        tma_k, tK = cpasync.make_tiled_tma_atom(load_kv, mK, one_stage[1], (n, d), num_multicast=c.cluster)
        tma_v, tV = cpasync.make_tiled_tma_atom(load_kv, mV, one_stage[2], (dv, n), num_multicast=c.cluster)
        tma_o, tO = cpasync.make_tiled_tma_atom(store, tma_o_dst, one_stage[3], (64, dv))

        if const_expr(cu_q is not None):
            tiles_m = scheduler.packed_slots(rows * self.pack, batch, self.tile_m)
            tiles = tiles_m * mQ.shape[2] // self.pack
        else:
            tiles_m = cute.round_up(cute.ceil_div(rows * self.pack, self.tile_m), c.cluster)
            tiles = tiles_m * (mQ.shape[2] // self.pack) * mQ.shape[3]
        grid = tiles
        if const_expr(c.schedule != "single"):
            grid = cutlass.min(tiles, multiprocessors // c.cluster * c.cluster)
        # Pairs of key head and sequence whose tiles are dealt out together.
        outer = mK.shape[2] if const_expr(cu_q is not None) else mK.shape[2] * mQ.shape[3]
        keys = mK.shape[0] if const_expr(cu_k is None) else cute.ceil_div(mK.shape[0], batch)
        section = (c.section_mib << 20) // (2 * (d + dv)) // cutlass.max(keys, 1)
        section = cutlass.min(cutlass.max(section, 1), outer)
        left = left if const_expr(self.problem.left) else None
        right = right if const_expr(self.problem.right) else None
        self.kernel(
            tma_q, tQ, tma_k, tK, tma_v, tV, tma_o, tO, mO, mLSE, cu_q, cu_k, used_q, used_k, sink, counter,
            scale, cap, left, right, batch, rows, group, tiles_m, tiles, section, sQ_l, sK_l, sV_l, sO_l,
        ).launch(
            grid=(grid, 1, 1), block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=1,
            cluster=(c.cluster, 1, 1) if const_expr(c.cluster > 1) else None,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def kernel(
        self, tma_q: cute.CopyAtom, tQ: cute.Tensor, tma_k: cute.CopyAtom, tK: cute.Tensor, tma_v: cute.CopyAtom,
        tV: cute.Tensor, tma_o: cute.CopyAtom, tO: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor, cu_q, cu_k,
        used_q, used_k, sink, counter, scale: Float32, cap: Float32, left, right, batch: Int32, rows: Int32, group: Int32,
        tiles_m: Int32, tiles: Int32, section: Int32, sQ_l: cute.ComposedLayout, sK_l: cute.ComposedLayout,
        sV_l: cute.ComposedLayout, sO_l: cute.ComposedLayout,
    ):  # fmt: skip
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            bar_q: cute.struct.MemRange[cutlass.Int64, 2]
            bar_k: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            bar_v: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            bar_tile: cute.struct.MemRange[cutlass.Int64, 2]
            next_tile: cute.struct.MemRange[Int32, 2]
            sQ: cute.struct.Align[
                cute.struct.MemRange[
                    self.dtype, cute.cosize(sQ_l) if c.frees_q else max(cute.cosize(sQ_l), cute.cosize(sO_l))
                ],
                1024,
            ]
            sO: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sO_l) if c.own_o else 0], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sK_l)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sV_l)], 1024]

        storage = SmemAllocator().allocate(Storage)
        sQ = storage.sQ.get_tensor(sQ_l.outer, swizzle=sQ_l.inner)  # (64, D, warpgroup)
        if const_expr(c.own_o):
            sO = storage.sO.get_tensor(sO_l.outer, swizzle=sO_l.inner)
        else:
            sO = cute.make_tensor(cute.recast_ptr(sQ.iterator, sO_l.inner), sO_l.outer)
        sK = storage.sK.get_tensor(sK_l.outer, swizzle=sK_l.inner)  # (N, D, stage)
        sV = storage.sV.get_tensor(sV_l.outer, swizzle=sV_l.inner)  # (Dv, N, stage)

        def ring(stages, arrivals, layout, barriers, **multicast):
            threads = pipeline.Agent.Thread
            return pipeline.PipelineTmaAsync.create(
                num_stages=stages,
                producer_group=pipeline.CooperativeGroup(threads, 1),
                consumer_group=pipeline.CooperativeGroup(threads, arrivals),
                tx_count=cute.size_in_bytes(self.dtype, layout),
                barrier_storage=barriers.data_ptr(),
                defer_sync=True,
                **multicast,
            )

        shared = {}
        if const_expr(c.cluster > 1):
            shared = {"cta_layout_vmnk": cute.make_layout((1, c.cluster, 1, 1)), "mcast_mode_mn": (0, 1)}
        # Q is released by every warp after its last S, or by one warp a warpgroup once O has left Q's place.
        pipe_q = ring(1, c.warpgroups * (4 if c.frees_q else 1), sQ_l, storage.bar_q)
        warps = 4 * c.warpgroups * c.cluster
        pipe_k = ring(c.stages, warps, cute.select(sK_l, mode=[0, 1]), storage.bar_k, **shared)
        pipe_v = ring(c.stages, warps, cute.select(sV_l, mode=[0, 1]), storage.bar_v, **shared)
        handoff = (storage.bar_tile.data_ptr(), storage.next_tile.get_tensor(cute.make_layout(2)))
        if const_expr(c.schedule == "dynamic"):
            scheduler.initialize_handoff(handoff[0], 4 * c.warpgroups, warp)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        lengths = (cu_q, cu_k, used_q, used_k, batch, rows, tK.shape[0], group, tiles_m, section)
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 0:
                for atom in (tma_q, tma_k, tma_v, tma_o):
                    cpasync.prefetch_descriptor(atom)
                self.produce(handoff, counter, tiles, lengths, left, right, pipe_q, pipe_k, pipe_v, sQ, sK, sV,
                             tma_q, tQ, tma_k, tK, tma_v, tV)  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(tidx, warp, handoff, tiles, lengths, left, right, scale, cap, sink, pipe_q, pipe_k, pipe_v,
                         sQ, sK, sV, sO, tma_o, tO, mO, mLSE)  # fmt: skip
        if const_expr(c.cluster > 1):
            # A block must not leave while its partner may still write into its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def locate(self, tile: Int32, heads: Int32, lengths, left, right):
        """Return (live, m, h, hk, batch coordinates, offsets, row counts, key block range) of a tile number."""
        cu_q, cu_k, used_q, used_k, batch, size_q, size_k, group, tiles_m, section = lengths
        heads_kv = heads // group
        if const_expr(self.config.section_mib > 0 and self.config.cluster == 1):
            outer = heads_kv if const_expr(cu_q is not None) else heads_kv * batch
            g, m, hk_b = scheduler.tile_of_section(tile, group, tiles_m, section, outer)
        elif const_expr(cu_q is not None or self.config.cluster == 1):
            # The heads of a group are neighbours.
            rest = tile // group
            g = tile - rest * group
            outer = rest // tiles_m
            m = rest - outer * tiles_m
            hk_b = outer
        else:
            rest = tile // tiles_m
            m = tile - rest * tiles_m
            hk_b = rest // group
            g = rest - hk_b * group
        if const_expr(cu_q is not None):
            hk = hk_b
            b, first = scheduler.sequence_of_slot(cu_q, m, batch, self.pack, self.tile_m)
            m = m - first
        else:
            b = hk_b // heads_kv
            hk = hk_b - b * heads_kv
        offset_q, rows, sq = seqlen.locate(cu_q, used_q, b, batch, size_q)
        offset_k, _, sk = seqlen.locate(cu_k, used_k, b, batch, size_k)
        if const_expr(cu_q is not None or self.problem.right):
            # Longest first: the right bound gives late queries the most keys.
            tiles_here = tiles_m
            if const_expr(cu_q is not None):
                tiles_here = cute.ceil_div(rows * self.pack, self.tile_m)
            m = tiles_here - 1 - m
        first = m * self.tile_m // self.pack + sk - sq
        last = (m * self.tile_m + self.tile_m - 1) // self.pack + sk - sq
        blocks = block_range.key_blocks(first, last, sk, left, right, self.tile_n)
        live = m >= 0
        h = hk * group + g
        dense_b = cutlass.min(b, batch - 1)
        bq = Int32(0) if const_expr(cu_q is not None) else dense_b
        bk = Int32(0) if const_expr(cu_k is not None) else dense_b
        return live, m, h, hk, bq, bk, offset_q, rows, sq, offset_k, sk, blocks

    @cute.jit
    def row_offset(self, offset: Int32):
        """Return the coordinate that moves a query tensor to a sequence's first row."""
        return ((0, offset), 0) if const_expr(self.pack > 1) else (offset, 0)

    @cute.jit
    def produce(
        self, handoff, counter, tiles, lengths, left, right, pipe_q, pipe_k, pipe_v, sQ, sK, sV, tma_q, tQ, tma_k, tK, tma_v, tV
    ):
        c = self.config
        producer = pipeline.PipelineUserType.Producer
        q_at = pipeline.make_pipeline_state(producer, 1)
        k_at = pipeline.make_pipeline_state(producer, c.stages)
        v_at = pipeline.make_pipeline_state(producer, c.stages)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(c.cluster > 1) else 0
        multicast = {"mcast_mask": cutlass.Int16((1 << c.cluster) - 1)} if const_expr(c.cluster > 1) else {}

        def partition(atom, s, g, r, n):
            return cpasync.tma_partition(
                atom, r, cute.make_layout(n), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
            )

        tile, phase = cute.arch.block_idx()[0], Int32(0)
        while tile < tiles:
            ticket = scheduler.draw(counter)
            live, m, h, hk, bq, bk, offset_q, _, _, offset_k, _, blocks = self.locate(
                tile, tQ.shape[2], lengths, left, right
            )
            begin, _, _, end = blocks
            gQ = cute.local_tile(
                cute.domain_offset(self.row_offset(offset_q), tQ[None, None, h, bq]), (64, self.tile_d), (None, 0)
            )
            gK = cute.local_tile(
                cute.domain_offset((offset_k, 0), tK[None, None, hk, bk]), (self.tile_n, self.tile_d), (None, 0)
            )
            gV = cute.local_tile(
                cute.domain_offset((0, offset_k), tV[None, None, hk, bk]), (self.tile_dv, self.tile_n), (0, None)
            )
            qs, qg = partition(tma_q, sQ, gQ, 0, 1)
            ks, kg = partition(tma_k, sK, gK, rank, c.cluster)
            vs, vg = partition(tma_v, sV, gV, rank, c.cluster)
            if live:
                pipe_q.producer_acquire(q_at)
                for w in cutlass.range_constexpr(c.warpgroups):
                    cute.copy(tma_q, qg[None, m * c.warpgroups + w], qs[None, w],
                              tma_bar_ptr=pipe_q.producer_get_barrier(q_at))  # fmt: skip
                q_at.advance()
                pipe_k.producer_acquire(k_at)
                cute.copy(tma_k, kg[None, end - 1], ks[None, k_at.index],
                          tma_bar_ptr=pipe_k.producer_get_barrier(k_at), **multicast)  # fmt: skip
                k_at.advance()
                # V lags K by one block, as its use does.
                for i in cutlass.range(1, end - begin, unroll=1):
                    n = end - 1 - i
                    pipe_k.producer_acquire(k_at)
                    cute.copy(tma_k, kg[None, n], ks[None, k_at.index],
                              tma_bar_ptr=pipe_k.producer_get_barrier(k_at), **multicast)  # fmt: skip
                    k_at.advance()
                    pipe_v.producer_acquire(v_at)
                    cute.copy(tma_v, vg[None, n + 1], vs[None, v_at.index],
                              tma_bar_ptr=pipe_v.producer_get_barrier(v_at), **multicast)  # fmt: skip
                    v_at.advance()
                pipe_v.producer_acquire(v_at)
                cute.copy(tma_v, vg[None, begin], vs[None, v_at.index],
                          tma_bar_ptr=pipe_v.producer_get_barrier(v_at), **multicast)  # fmt: skip
                v_at.advance()
            if const_expr(c.schedule == "dynamic"):
                tile = scheduler.publish(ticket, *handoff, phase)
            else:
                tile = scheduler.following(c.schedule, tile, tiles)
            phase = phase ^ 1

    @cute.jit
    def consume(
        self, tidx, warp, handoff, tiles, lengths, left, right, softmax_scale, cap, sink, pipe_q, pipe_k, pipe_v,
        sQ, sK, sV, sO, tma_o, tO, mO, mLSE,
    ):  # fmt: skip
        c = self.config
        wg = cute.arch.make_warp_uniform(warp // 4 - 1)
        tid = tidx % 128
        lane = tidx % 32
        smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        qk0, qk1 = mma_sm90.tiled_mmas(self.dtype, self.tile_n, OperandMajorMode.K, smem)
        pv0, pv1 = mma_sm90.tiled_mmas(self.dtype, self.tile_dv, OperandMajorMode.MN, registers)
        thread_qk, thread_pv = qk1.get_slice(tid), pv1.get_slice(tid)
        rQ = thread_qk.make_fragment_A(thread_qk.partition_A(sQ))[None, None, None, wg]
        rK = thread_qk.make_fragment_B(thread_qk.partition_B(sK))
        rV = thread_pv.make_fragment_B(thread_pv.partition_B(sV))

        acc_s = cute.make_rmem_tensor(thread_qk.partition_shape_C((64, self.tile_n)), Float32)
        acc_o = cute.make_rmem_tensor(thread_pv.partition_shape_C((64, self.tile_dv)), Float32)
        rP = cute.make_rmem_tensor_like(acc_s, self.dtype)
        tP = mma_sm90.as_operand_a(rP)
        s_rc, o_rc = mma_sm90.rows_and_columns(acc_s), mma_sm90.rows_and_columns(acc_o)
        rows_here = cute.size(s_rc, mode=[0])
        row_max = cute.make_rmem_tensor(rows_here, Float32)
        row_sum = cute.make_rmem_tensor(rows_here, Float32)
        rescale = cute.make_rmem_tensor(rows_here, Float32)
        if const_expr(self.problem.softcap):
            # Capped scores are tanh values: the exponent is softcap * log2 e times them.
            score_scale = softmax_scale / cap
            scale_log2 = cap * softmax.LOG2_E
        else:
            score_scale = softmax_scale
            scale_log2 = softmax_scale * softmax.LOG2_E

        row0 = (tid // 32) * 16 + lane // 4
        col0 = (lane % 4) * 2
        consumer = pipeline.PipelineUserType.Consumer
        q_at = pipeline.make_pipeline_state(consumer, 1)
        k_at = pipeline.make_pipeline_state(consumer, c.stages)
        v_at = pipeline.make_pipeline_state(consumer, c.stages)
        rO = cute.make_rmem_tensor_like(acc_o, self.dtype)

        if const_expr(c.pingpong):
            if wg == c.warpgroups - 1:
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=256)

        tile, phase = cute.arch.block_idx()[0], Int32(0)
        while tile < tiles:
            live, m, h, hk, bq, _, offset_q, rows, sq, _, sk, blocks = self.locate(
                tile, tO.shape[2], lengths, left, right
            )
            begin, free_begin, free_end, end = blocks
            if live:
                row_base = m * self.tile_m + wg * 64 + row0
                loop = (wg, pipe_k, pipe_v, qk0, qk1, pv1, acc_s, acc_o, rQ, rK, rV, tP, rP, s_rc, o_rc, row_max,
                        row_sum, rescale, scale_log2, score_scale, row_base, col0, sq, sk, left, right)  # fmt: skip
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                acc_o.fill(0.0)

                # The last block: nothing to overlap with yet.
                pipe_q.consumer_wait(q_at)
                pipe_k.consumer_wait(k_at)
                self.take_turn(wg)
                mma_sm90.issue(qk0, qk1, acc_s, rQ, rK[None, None, None, k_at.index], True)
                self.pass_turn(wg, False)
                warpgroup.wait_group(0)
                self.pass_turn(wg, True)
                pipe_k.consumer_release(k_at)
                k_at.advance()
                if const_expr(self.problem.softcap):
                    softmax.cap(acc_s, score_scale)
                self.hide(s_rc, end - 1, row_base, col0, sq, sk, left, right, True)
                softmax.step(s_rc, row_max, row_sum, rescale, scale_log2, True, True)
                mma_sm90.pack(rP, acc_s)
                if const_expr(self.foreign_v):
                    valid = sk - (end - 1) * self.tile_n
                    if valid < self.tile_n:
                        pipe_v.consumer_wait(v_at)
                        self.clear_rows(sV, v_at.index, cutlass.max(valid, 0), tid)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.barrier(barrier_id=4 + wg, number_of_threads=128)

                if const_expr(right is not None):
                    for i in cutlass.range(end - 1 - free_end, unroll=1):
                        self.step(end - 2 - i, k_at, v_at, True, left is not None, loop)
                        k_at.advance()
                        v_at.advance()
                for i in cutlass.range(free_end - free_begin, unroll=1):
                    self.step(free_end - 1 - i, k_at, v_at, False, False, loop)
                    k_at.advance()
                    v_at.advance()
                if const_expr(left is not None):
                    for i in cutlass.range(free_begin - begin, unroll=1):
                        self.step(free_begin - 1 - i, k_at, v_at, False, True, loop)
                        k_at.advance()
                        v_at.advance()
                if const_expr(c.frees_q):
                    pipe_q.consumer_release(q_at)

                pipe_v.consumer_wait(v_at)
                mma_sm90.issue(pv0, pv1, acc_o, tP, rV[None, None, None, v_at.index], False)
                lse = cute.make_rmem_tensor(rows_here, Float32)
                empty = cute.make_rmem_tensor(rows_here, Int32)
                for r in cutlass.range_constexpr(rows_here):
                    row = row_base + 8 * r
                    position = row // self.pack
                    sink_log2 = None
                    if const_expr(sink is not None):
                        head = h * self.pack + (row - position * self.pack)
                        sink_log2 = Float32(sink[head]) * Float32(softmax.LOG2_E)
                    rescale[r], lse[r], nothing = softmax.finalize(
                        row_max[r], row_sum[r], scale_log2, sink_log2, position < sq
                    )
                    empty[r] = Int32(nothing)
                warpgroup.wait_group(0)
                pipe_v.consumer_release(v_at)
                v_at.advance()
                for r in cutlass.range_constexpr(rows_here):
                    for j in cutlass.range_constexpr(cute.size(o_rc, mode=[1])):
                        x = o_rc[r, j] * rescale[r]
                        o_rc[r, j] = Float32(cutlass.select_(empty[r] != 0, Float32(0.0), x))
                rO.store(acc_o.load().to(self.dtype))
                for r in cutlass.range_constexpr(rows_here):
                    row = row_base + 8 * r
                    position = row // self.pack
                    if (lane % 4 == 0) & (position < rows):
                        mLSE[offset_q + position, h * self.pack + (row - position * self.pack), bq] = lse[r]
                if const_expr(c.direct):
                    self.store_rows(rO, mO, row_base, h, bq, offset_q, rows, lane)
                else:
                    self.store(rO, pv1, sO, tma_o, tO, mO, m * c.warpgroups + wg, wg, tid, warp, h, bq, offset_q, rows)
                if const_expr(not c.frees_q):
                    if warp % 4 == 0:
                        pipe_q.consumer_release(q_at)
                q_at.advance()
            if const_expr(c.schedule == "dynamic"):
                tile = scheduler.receive(*handoff, phase)
            else:
                tile = scheduler.following(c.schedule, tile, tiles)
            phase = phase ^ 1
        if const_expr(c.own_o):
            # Shared memory must outlive the last store's reads of it.
            if warp % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step(self, n, k_at, v_at, mask_right: cutlass.Constexpr[bool], mask_left: cutlass.Constexpr[bool], loop):
        """One key block: issue S of it and P V of the one before, then softmax while P V runs."""
        (wg, pipe_k, pipe_v, qk0, qk1, pv1, acc_s, acc_o, rQ, rK, rV, tP, rP, s_rc, o_rc, row_max,
         row_sum, rescale, scale_log2, score_scale, row_base, col0, sq, sk, left, right) = loop  # fmt: skip
        pipe_k.consumer_wait(k_at)
        self.take_turn(wg)
        mma_sm90.issue(qk0, qk1, acc_s, rQ, rK[None, None, None, k_at.index], True)
        pipe_v.consumer_wait(v_at)
        mma_sm90.issue(pv1, pv1, acc_o, tP, rV[None, None, None, v_at.index], False)
        self.pass_turn(wg, False)
        warpgroup.wait_group(1)
        self.pass_turn(wg, True)
        pipe_k.consumer_release(k_at)
        if const_expr(self.problem.softcap):
            softmax.cap(acc_s, score_scale)
        if const_expr(mask_left or mask_right):
            self.hide(
                s_rc, n, row_base, col0, sq, sk,
                left if const_expr(mask_left) else None, right if const_expr(mask_right) else None, False,
            )  # fmt: skip
        softmax.step(s_rc, row_max, row_sum, rescale, scale_log2, False, self.sparse_rows, self.config.lazy)
        warpgroup.wait_group(0)
        pipe_v.consumer_release(v_at)
        if const_expr(self.config.lazy):
            grown = rescale[0] != Float32(1.0)
            for r in cutlass.range_constexpr(1, cute.size(rescale)):
                grown = grown | (rescale[r] != Float32(1.0))
            if cute.arch.vote_any_sync(grown):
                softmax.rescale_rows(o_rc, rescale)
        else:
            softmax.rescale_rows(o_rc, rescale)
        mma_sm90.pack(rP, acc_s)

    @cute.jit
    def hide(self, s_rc, n, row_base, col0, sq, sk, left, right, edge: cutlass.Constexpr[bool]):
        """Mask block `n`: the band where bounded, and the end of the keys in the last block (`edge`)."""
        low, high = None, None
        column = n * self.tile_n + col0
        positions = [(row_base + 8 * r) // self.pack + sk - sq for r in range(cute.size(s_rc, mode=[0]))]
        if const_expr(left is not None):
            low = [p - left - column for p in positions]
        if const_expr(right is not None):
            high = [p + right + 1 - column for p in positions]
        if const_expr(edge):
            end = sk - column
            high = [cutlass.min(x, end) for x in high] if const_expr(right is not None) else [end for _ in positions]
        mask.apply_band(s_rc, low, high)

    @cute.jit
    def clear_rows(self, sV, stage, valid, tid):
        """Zero the V rows of a stage from `valid` on. Every warpgroup does so for itself, with the same result."""
        chunks = self.tile_dv // 8
        zero = cute.make_rmem_tensor(8, self.dtype)
        zero.fill(0.0)
        for i in cutlass.range(valid * chunks + tid, self.tile_n * chunks, 128, unroll=1):
            row = i // chunks
            cute.autovec_copy(zero, cute.local_tile(sV[None, row, stage], (8,), (i - row * chunks,)))

    @cute.jit
    def store(self, rO, pv, sO, tma_o, tO, mO, slab, wg, tid, warp, h, bq, offset_q, rows):
        """Write a warpgroup's 64 rows: by TMA, or row by row where packed queries end inside them."""
        c = self.config
        atom = sm90.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        copy = cute.make_tiled_copy_C(atom, pv)
        thread = copy.get_slice(tid)
        if const_expr(c.own_o):
            if warp % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        # The buffer is free: the last store has read it, or all four warps have read the Q it replaces.
        cute.arch.barrier(barrier_id=4 + wg, number_of_threads=128)
        cute.copy(copy, thread.retile(rO), thread.partition_D(sO[None, None, wg]))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=4 + wg, number_of_threads=128)
        left_over = rows * self.pack - slab * 64
        by_row = Int32(0)
        if const_expr(self.problem.packed_q):
            by_row = Int32(left_over < 64)
        if by_row == 0:
            if warp % 4 == 0:
                gO = cute.local_tile(
                    cute.domain_offset(self.row_offset(offset_q), tO[None, None, h, bq]), (64, self.tile_dv), (None, 0)
                )
                os, og = cpasync.tma_partition(
                    tma_o, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
                )
                cute.copy(tma_o, os[None, wg], og[None, slab])
                cute.arch.cp_async_bulk_commit_group()
                if const_expr(not c.own_o):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(self.problem.packed_q):
            if by_row != 0:
                chunks = self.problem.head_dim_v // 8
                held = cute.make_rmem_tensor(8, self.dtype)
                for i in cutlass.range(tid, cutlass.max(left_over, 0) * chunks, 128, unroll=1):
                    row = i // chunks
                    at = i - row * chunks
                    position = (slab * 64 + row) // self.pack
                    head = h * self.pack + (slab * 64 + row - position * self.pack)
                    cute.autovec_copy(cute.local_tile(sO[row, None, wg], (8,), (at,)), held)
                    cute.autovec_copy(
                        held, cute.local_tile(mO[offset_q + position, None, head, bq], (8,), (at,))
                    )
                if const_expr(not c.own_o):
                    cute.arch.barrier(barrier_id=4 + wg, number_of_threads=128)

    @cute.jit
    def store_rows(self, rO, mO, row_base, h, bq, offset_q, rows, lane):
        """Write this thread's rows from registers, 8 bytes at a time, whole 32-byte sectors a row.

        Lanes of a pair trade column pairs of two neighbouring blocks of eight, so that each holds four columns in a row.
        """
        pairs = cute.recast_tensor(rO, Int32)
        odd = lane % 2
        blocks = cute.ceil_div(self.problem.head_dim_v, 8)
        for r in cutlass.range_constexpr(2):
            held = cute.make_rmem_tensor((2, (blocks + 1) // 2), Int32)
            for i in cutlass.range_constexpr((blocks + 1) // 2):
                a, b = pairs[r + 4 * i], pairs[r + 4 * i + 2]
                traded = cute.arch.shuffle_sync_bfly(Int32(cutlass.select_(odd != 0, a, b)), 1)
                held[0, i] = Int32(cutlass.select_(odd != 0, traded, a))
                held[1, i] = Int32(cutlass.select_(odd != 0, b, traded))
            row = row_base + 8 * r
            position = row // self.pack
            if position < rows:
                line = mO[offset_q + position, None, h * self.pack + (row - position * self.pack), bq]
                for i in cutlass.range_constexpr((blocks + 1) // 2):
                    at = 4 * i + (lane % 4) // 2 + 2 * odd
                    values = cute.recast_tensor(held[None, i], self.dtype)
                    if const_expr(2 * i + 2 <= blocks):
                        cute.autovec_copy(values, cute.local_tile(line, (4,), (at,)))
                    else:
                        if odd == 0:
                            cute.autovec_copy(values, cute.local_tile(line, (4,), (at,)))

    @cute.jit
    def take_turn(self, wg):
        if const_expr(self.config.pingpong):
            cute.arch.barrier(barrier_id=1 + wg, number_of_threads=256)

    @cute.jit
    def pass_turn(self, wg, arrived: cutlass.Constexpr[bool]):
        """Let the next warpgroup multiply: before or after this one's S has arrived, as configured."""
        if const_expr(self.config.pingpong and self.config.late_turn == arrived):
            cute.arch.barrier_arrive(barrier_id=1 + (wg + 1) % self.config.warpgroups, number_of_threads=256)
