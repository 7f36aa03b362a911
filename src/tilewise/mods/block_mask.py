"""Block sparsity: which blocks of keys each block of queries sees, as lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import describe, wrong_type, wrong_value
from .interval import Interval, mask_bounds
from .trace import trace

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Tensor = torch.Tensor

#: Values of a block map.
ABSENT, PARTIAL, FULL, _UNDECIDED = 0, 1, 2, 3


class BlockSparseTensors(NamedTuple):
    """Lists of key blocks per block of queries. `nQ`, `nK` are the numbers of blocks of queries and keys.

    Row (b, h, n): the first `mask_block_cnt[b, h, n]` entries of `mask_block_idx[b, h, n]` are key blocks on which
    mask_mod is evaluated, the first `full_block_cnt[b, h, n]` of `full_block_idx[b, h, n]` are wholly visible. All
    other blocks are invisible: never read. Entries beyond the count are ignored. Order does not matter. A block in
    both lists is wholly visible.

    Attributes:
        mask_block_cnt: int32 (B or 1, H or 1, nQ).
        mask_block_idx: int32 (B or 1, H or 1, nQ, nK).
        full_block_cnt, full_block_idx: likewise, or both None.
        block_size: (queries, keys) per block.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] = (128, 128)

    @classmethod
    def from_map(cls, block_map: Tensor, block_size: tuple[int, int] = (128, 128)) -> BlockSparseTensors:
        """Return the lists, in ascending order, of a block map as `dense` returns it: (B, H, nQ, nK)."""
        return cls(*_lists(block_map == PARTIAL), *_lists(block_map == FULL), block_size=block_size)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by field name."""
        return {k: t for k, t in zip(self._fields, self, strict=True) if isinstance(t, Tensor)}

    def dense(self) -> Tensor:
        """Return the block map: int8 (B or 1, H or 1, nQ, nK) with 0 absent, 1 partial, 2 full."""
        block_map = _marked(self.mask_block_cnt, self.mask_block_idx) * PARTIAL
        if self.full_block_cnt is not None and self.full_block_idx is not None:
            block_map = torch.maximum(block_map, _marked(self.full_block_cnt, self.full_block_idx) * FULL)
        return block_map

    def transpose(self) -> BlockSparseTensors:
        """Return the lists per key block of the query blocks that see it, as the backward reads them.

        Shapes (B or 1, H or 1, nK) and (B or 1, H or 1, nK, nQ); made on the device, without a synchronisation.
        `block_size` becomes (keys, queries), so that transposing twice gives the same blocks back.
        """
        queries, keys = self.block_size
        return BlockSparseTensors.from_map(self.dense().transpose(-1, -2), (keys, queries))

    def visible_blocks(self, b: int, h: int) -> list[list[tuple[int, bool]]]:
        """Return for each block of queries of batch `b`, head `h` its (key block, wholly visible) in ascending order.

        Reads the lists on the host: for the CPU.
        """

        def one(t: Tensor) -> Tensor:
            return t[b if t.shape[0] > 1 else 0, h if t.shape[1] > 1 else 0]

        own: dict[str, Any] = {name: one(t) for name, t in self.tensors().items()}
        rows = BlockSparseTensors(**own).dense().tolist()
        return [[(n, state == FULL) for n, state in enumerate(row) if state != ABSENT] for row in rows]

    def to_block_mask(
        self, mask_mod: Callable[..., Tensor] | None = None, seq_lengths: tuple[int, int] | None = None
    ) -> BlockMask:
        """Return the same lists as PyTorch's BlockMask, for `flex_attention`.

        Args:
            mask_mod: evaluated by flex_attention on the partial blocks.
            seq_lengths: (Sq, Sk); by default whole blocks.
        """
        from torch.nn.attention.flex_attention import BlockMask

        return BlockMask.from_kv_blocks(
            self.mask_block_cnt,
            self.mask_block_idx,
            self.full_block_cnt,
            self.full_block_idx,
            BLOCK_SIZE=self.block_size,
            mask_mod=mask_mod,
            seq_lengths=seq_lengths,
        )


def from_block_mask(block_mask: BlockMask) -> BlockSparseTensors:
    """Return the lists of a `torch.nn.attention.flex_attention.BlockMask`.

    Its mask_mod is not part of the lists: pass `block_mask.mask_mod` as `mask_mod` beside them.

    Raises:
        TypeError: not a BlockMask.
    """
    if not hasattr(block_mask, "kv_num_blocks"):
        raise wrong_type("block_mask", "a torch.nn.attention.flex_attention.BlockMask", block_mask)
    queries, keys = block_mask.BLOCK_SIZE
    return BlockSparseTensors(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        (queries, keys),
    )


def _marked(count: Tensor, index: Tensor) -> Tensor:
    """Return int8 (..., nQ, nK): 1 at the first `count` entries of `index`."""
    blocks = index.shape[-1]
    listed = torch.arange(blocks, device=index.device) < count.unsqueeze(-1)
    # What is not listed may hold anything: it is sent to one column more, which is dropped.
    target = torch.where(listed, index, blocks).long()
    marks = torch.zeros((*index.shape[:-1], blocks + 1), dtype=torch.int8, device=index.device)
    return marks.scatter_(-1, target, 1)[..., :blocks]


def _lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts and indices, ascending, of the chosen blocks of each row."""
    count = chosen.sum(-1, dtype=torch.int32)
    index = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return count, index.to(torch.int32)


# ---- from a mask_mod
#: Pairs looked at in one piece: bounds the memory of `create_block_sparse`.
_PIECE = 2**24


def create_block_sparse(
    mask_mod: Any,
    B: int,
    H: int,
    Sq: int,
    Sk: int,
    block_size: tuple[int, int] = (128, 128),
    device: torch.device | str = "cpu",
    aux_tensors: Sequence[Tensor] | None = None,
) -> BlockSparseTensors:
    """Return the block lists of `mask_mod` over B batches, H heads, Sq queries and Sk keys.

    A block is full if every pair in it that lies within the sequences is visible (the lengths always hold), partial
    if some are. Axes B and H of the lists have size 1 where the mask does not depend on them. Never makes an Sq x Sk
    tensor: blocks are settled by bounds on their indices where that can be (`interval`), else looked at piece by piece.

    Args:
        mask_mod: function of (b, h, q_idx, kv_idx), or a traced one.
        block_size: (queries, keys) per block, each at least 1.
        aux_tensors: passed to `mask_mod` as one trailing list, if not None.

    Raises:
        TypeError, ValueError, UnsupportedError: as `tilewise.mods.trace.trace`; sizes that are not integers >= 0.
    """
    for name, size in (("B", B), ("H", H), ("Sq", Sq), ("Sk", Sk), ("block_size", min(block_size))):
        if not isinstance(size, int) or isinstance(size, bool):
            raise wrong_type(name, "an int", size)
        if size < (name == "block_size"):
            raise wrong_value(name, "a size of at least 1" if name == "block_size" else "a size >= 0", describe(size))
    device = torch.device(device)
    modifier, captures = trace(mask_mod, "mask", aux_tensors, device=device)
    bq, bk = block_size
    nq, nk = -(-Sq // bq), -(-Sk // bk)
    if 0 in (B, H, nq, nk):
        return BlockSparseTensors.from_map(torch.zeros(B, H, nq, nk, dtype=torch.int8, device=device), (bq, bk))
    first_q = (torch.arange(nq, device=device) * bq).view(1, 1, -1, 1)
    first_k = (torch.arange(nk, device=device) * bk).view(1, 1, 1, -1)
    b = torch.arange(B, device=device).view(-1, 1, 1, 1)
    h = torch.arange(H, device=device).view(1, -1, 1, 1)
    bounds = mask_bounds(
        modifier,
        b,
        h,
        Interval(first_q, (first_q + bq - 1).clamp_max(Sq - 1)),
        Interval(first_k, (first_k + bk - 1).clamp_max(Sk - 1)),
        captures,
    )
    varies = modifier.tile(b, h, first_q[:, :, :1], first_k[..., :1], *captures).shape[:2]
    block_map = torch.full((*varies, nq, nk), _UNDECIDED, dtype=torch.int8, device=device)
    if bounds is not None:
        block_map[bounds.lo.expand_as(block_map)] = FULL
        block_map[~bounds.hi.expand_as(block_map)] = ABSENT
    rows, columns = torch.arange(bq, device=device).view(1, 1, -1, 1), torch.arange(bk, device=device)
    undecided, step = (block_map == _UNDECIDED).nonzero(), max(1, _PIECE // (bq * bk))
    for first in range(0, undecided.shape[0], step):
        piece = undecided[first : first + step]
        at = piece.view(-1, 4, 1, 1, 1).unbind(1)
        # Rows and columns beyond the sequence repeat its last one: they change neither "any" nor "all" of a block.
        q, kv = (at[2] * bq + rows).clamp_max(Sq - 1), (at[3] * bk + columns).clamp_max(Sk - 1)
        visible = modifier.tile(at[0], at[1], q, kv, *captures).flatten(1)
        block_map[piece.unbind(1)] = (visible.any(1).to(torch.int8) + visible.all(1)).to(torch.int8)
    return BlockSparseTensors.from_map(block_map, (bq, bk))
