"""FLOPs of the operators for `torch.utils.flop_counter.FlopCounterMode`: visible pairs are what counts."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .ops import _inputs
from .problem import AttentionInputs


def visible_pairs(x: AttentionInputs) -> int:
    """Return how many (query, key) pairs are visible, summed over sequences and query heads.

    Windows are counted exactly; block-sparse lists by whole blocks, since a mask inside a block saves no work.
    Reads the lengths of packed sequences.
    """
    if x.block_sparse is not None:
        bm, bn = x.block_sparse.block_size
        queries = _block_sizes(x.capacity_q, bm, x.block_sparse.mask_block_cnt.shape[-1])
        keys = _block_sizes(x.capacity_k, bn, x.block_sparse.mask_block_idx.shape[-1])
        present = x.block_sparse.dense().cpu() > 0
        present = present.expand(x.batch, x.heads, -1, -1)
        return int((present * queries[:, None] * keys).sum())
    return x.heads * sum(_band_pairs(sq, sk, x.window_left, x.window_right) for sq, sk in _lengths(x))


def _block_sizes(total: int, size: int, count: int) -> torch.Tensor:
    return (total - torch.arange(count) * size).clamp(0, size)


def _lengths(x: AttentionInputs) -> list[tuple[int, int]]:
    sides = []
    for cu, used, capacity in (
        (x.cu_seqlens_q, x.seqused_q, x.capacity_q),
        (x.cu_seqlens_k, x.seqused_k, x.capacity_k),
    ):
        if used is not None:
            sides.append(used.tolist())
        else:
            sides.append([capacity] * x.batch if cu is None else cu.diff().tolist())
    return list(zip(*sides, strict=True))


def _band_pairs(sq: int, sk: int, left: int | None, right: int | None) -> int:
    if left is None and right is None:
        return sq * sk
    center = torch.arange(sq) + (sk - sq)
    low = torch.zeros_like(center) if left is None else (center - left).clamp(0, sk)
    high = torch.full_like(center, sk) if right is None else (center + right + 1).clamp(0, sk)
    return int((high - low).clamp(min=0).sum())


@register_flop_formula(torch.ops.tilewise.forward, get_raw=True)
def _forward_flops(*args: Any, out_val: Any = None, **_: Any) -> int:
    """Two products of 2 FLOPs per pair and column."""
    x, _name = _inputs(args)
    return 2 * visible_pairs(x) * (x.head_dim + x.head_dim_v)


@register_flop_formula(torch.ops.tilewise.backward, get_raw=True)
def _backward_flops(*args: Any, out_val: Any = None, **_: Any) -> int:
    """S, dQ and dK over D columns, dP and dV over Dv."""
    x, _name = _inputs(args[:-5])
    return 2 * visible_pairs(x) * (3 * x.head_dim + 2 * x.head_dim_v)
