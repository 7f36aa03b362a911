"""Which keys a tile of queries reads, and which pairs of the tile are visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...problem import AttentionInputs
from .sequences import Span

Tensor = torch.Tensor


class KeyTile(NamedTuple):
    """Keys that some query of a tile sees.

    Attributes:
        rows: their positions within the sequence: a slice, or int64 (N,).
        visible: bool, broadcastable to (sequences, heads, M, N); None where every pair is visible.
    """

    rows: slice | Tensor
    visible: Tensor | None

    @property
    def positions(self) -> Tensor:
        """Positions as a tensor, int64 (N,)."""
        return torch.arange(self.rows.start, self.rows.stop) if isinstance(self.rows, slice) else self.rows


class Visibility:
    """The mask of one call, asked tile by tile."""

    def __init__(self, x: AttentionInputs) -> None:
        self.inputs = x
        self._blocks: dict[tuple[int, int], list[list[tuple[int, bool]]]] = {}

    def query_tiles(self, span: Span) -> Iterator[slice]:
        """Yield ranges of query rows, none of which crosses a block of the block lists."""
        lists = self.inputs.block_sparse
        block = span.len_q if lists is None else lists.block_size[0]
        for start in range(0, span.len_q, block):
            stop = min(start + block, span.len_q)
            for first in range(start, stop, span.tile_q):
                yield slice(first, min(first + span.tile_q, stop))

    def key_tiles(self, span: Span, rows: slice, keys: slice) -> Iterator[KeyTile]:
        """Yield the tiles of `keys` that hold a visible key for the query rows `rows`; no other key is ever read."""
        x = self.inputs
        first, last = keys.start, keys.stop
        if x.window_left is not None:
            first = max(first, rows.start + span.offset - x.window_left)
        if x.window_right is not None:
            last = min(last, rows.stop + span.offset + x.window_right)
        if first >= last:
            return
        if x.block_sparse is not None:
            yield from self._listed_tiles(span, rows, slice(first, last))
            return
        for start in range(first, last, span.tile_k):
            yield from self._seen(span, rows, slice(start, min(start + span.tile_k, last)), None)

    def _listed_tiles(self, span: Span, rows: slice, keys: slice) -> Iterator[KeyTile]:
        """Yield tiles gathered from the listed blocks only."""
        lists = self.inputs.block_sparse
        assert lists is not None, "only called with block lists"
        m, n = lists.block_size
        which = (span.sequences[0], span.heads.start)
        blocks = self._blocks.get(which)
        if blocks is None:
            blocks = self._blocks.setdefault(which, lists.visible_blocks(*which))
        listed = blocks[rows.start // m] if rows.start // m < len(blocks) else []
        if not listed:
            return
        start = torch.tensor([block * n for block, _ in listed])
        positions = (start[:, None] + torch.arange(n)).flatten()
        full = torch.tensor([whole for _, whole in listed]).repeat_interleave(n)
        inside = (positions >= keys.start) & (positions < keys.stop)
        positions, full = positions[inside], full[inside]
        for c in range(0, positions.shape[0], span.tile_k):
            piece = positions[c : c + span.tile_k]
            low, high = int(piece[0]), int(piece[-1]) + 1
            gap = high - low != piece.shape[0]
            yield from self._seen(span, rows, piece if gap else slice(low, high), full[c : c + span.tile_k])

    def _seen(self, span: Span, rows: slice, keys: slice | Tensor, full: Tensor | None) -> Iterator[KeyTile]:
        """Yield the tile with its mask, unless no pair is visible. `full` says which keys are exempt from mask_mod."""
        x = self.inputs
        tile = KeyTile(keys, None)
        masks = self._band(span, rows, tile)
        if x.mask_mod is not None and (full is None or not bool(full.all())):
            index = indices(span, rows, tile)
            chosen = x.mask_mod.apply_mask(*index, x.mask_captures)
            masks.append(chosen if full is None else chosen | full)
        if not masks:
            yield tile
            return
        visible = masks[0]
        for mask in masks[1:]:
            visible = visible & mask
        if bool(visible.any()):
            yield KeyTile(keys, visible)

    def _band(self, span: Span, rows: slice, tile: KeyTile) -> list[Tensor]:
        """Return the bounds of the window that cut this tile, as masks (M, N)."""
        x = self.inputs
        low, high = (
            (tile.rows.start, tile.rows.stop - 1)
            if isinstance(tile.rows, slice)
            else (int(tile.rows[0]), int(tile.rows[-1]))
        )
        bounds: list[tuple[Callable[[Tensor, Tensor], Tensor], int]] = []
        if x.window_left is not None and low < rows.stop - 1 + span.offset - x.window_left:
            bounds.append((torch.ge, span.offset - x.window_left))
        if x.window_right is not None and high > rows.start + span.offset + x.window_right:
            bounds.append((torch.le, span.offset + x.window_right))
        if not bounds:
            return []
        query, key = torch.arange(rows.start, rows.stop)[:, None], tile.positions
        return [inside(key, query + shift) for inside, shift in bounds]


def indices(span: Span, rows: slice, tile: KeyTile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (b, h, q_idx, kv_idx) of a tile, as modifiers take them."""
    return (
        torch.tensor(span.sequences, dtype=torch.int64),
        torch.arange(span.heads.start, span.heads.stop),
        torch.arange(rows.start, rows.stop),
        tile.positions,
    )
