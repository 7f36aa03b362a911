"""The per-sequence view of a call: which rows of which tensor make up each sequence, however it is stored.

Dense, packed and paged tensors, with or without seqused, all become `Rows`, which a tile reads and writes by
(sequences, positions, heads). Sequences of equal lengths are processed together, as `Span`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...problem import AttentionInputs

Tensor = torch.Tensor

#: Elements of one tile of scores, over all sequences and heads of a span. Large enough that the cost of a Python call
#: is small beside the arithmetic, small enough to stay in a last-level cache of a few MiB per core.
TILE_ELEMENTS = 2**20

#: Rows of a tile of scores (queries times the heads of a group) and its columns; fewer rows get more columns.
TILE_ROWS, TILE_COLUMNS, FEW_ROWS, WIDE_COLUMNS = 256, 512, 64, 4096


@dataclass(frozen=True)
class Span:
    """Sequences of equal lengths and a range of heads, processed as one batch.

    Attributes:
        sequences: their batch indices; a range where they are consecutive.
        heads, heads_kv: slices of the query heads and of the K/V heads that those share.
        len_q, len_k: rows that count, of each sequence.
        tile_q, tile_k: rows and keys of a tile.
    """

    sequences: Sequence[int]
    heads: slice
    heads_kv: slice
    len_q: int
    len_k: int
    tile_q: int
    tile_k: int

    @property
    def offset(self) -> int:
        """How far the diagonal is shifted: queries are aligned to the end of the keys."""
        return self.len_k - self.len_q


class Rows:
    """Rows of a tensor by sequence and position.

    Args:
        storage: (B, S, heads, dim), or packed (total, heads, dim) with `starts`, or paged
            (pages, page_size, heads, dim) with `pages`.
        starts: first row of each sequence, if packed.
        pages: (B, max_pages) page table, if paged.
    """

    def __init__(self, storage: Tensor, starts: Sequence[int] | None = None, pages: Tensor | None = None) -> None:
        self.storage, self.starts, self.pages = storage, starts, pages

    def read(self, span: Span, rows: slice | Tensor, heads: slice) -> Tensor:
        """Return (sequences, rows, heads, dim): a view where the rows lie evenly, else a copy."""
        view = self._view(span, rows, heads)
        return self.storage[..., heads, :][self._index(span, rows)] if view is None else view

    def write(self, span: Span, rows: slice | Tensor, heads: slice, values: Tensor) -> None:
        """Set rows to `values` (sequences, rows, heads, dim)."""
        view = self._view(span, rows, heads)
        if view is None:
            self.storage[..., heads, :][self._index(span, rows)] = values.to(self.storage.dtype)
        else:
            view.copy_(values)

    def add(self, span: Span, rows: slice | Tensor, heads: slice, values: Tensor) -> None:
        """Add `values` to rows, one after another where sequences share a page. The storage must be contiguous."""
        view = self._view(span, rows, heads)
        if view is not None:
            view.add_(values)
            return
        index = self._index(span, rows)
        flat = index[0] if len(index) == 1 else index[0] * self.storage.shape[1] + index[1]
        target = self.storage.flatten(0, -3)[:, heads]
        target.index_add_(0, flat.expand(values.shape[:2]).reshape(-1), values.flatten(0, 1))

    def _view(self, span: Span, rows: slice | Tensor, heads: slice) -> Tensor | None:
        if not isinstance(rows, slice) or self.pages is not None:
            return None
        if self.starts is None:
            if not isinstance(span.sequences, range):
                return None
            return self.storage[span.sequences.start : span.sequences.stop, rows, heads]
        if len(span.sequences) > 1:
            return None
        start = self.starts[span.sequences[0]]
        return self.storage[None, start + rows.start : start + rows.stop, heads]

    def _index(self, span: Span, rows: slice | Tensor) -> tuple[Tensor, ...]:
        position = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        sequences = torch.tensor(span.sequences, dtype=torch.int64)[:, None]
        if self.starts is not None:
            return (torch.tensor([self.starts[b] for b in span.sequences])[:, None] + position,)
        if self.pages is not None:
            size = self.storage.shape[1]
            return self.pages[sequences, position // size].long(), (position % size).expand(len(sequences), -1)
        return sequences, position


class Sequences:
    """All sequences of one call: their lengths, their rows, and the spans they are processed in."""

    def __init__(self, x: AttentionInputs) -> None:
        self.inputs = x
        self.starts_q, self.len_q = _lengths(x.cu_seqlens_q, x.seqused_q, x.batch, x.capacity_q)
        self.starts_k, self.len_k = _lengths(x.cu_seqlens_k, x.seqused_k, x.batch, x.capacity_k)

    def rows_q(self, t: Tensor) -> Rows:
        """Return the rows of a tensor laid out like q (..., heads, dim)."""
        return Rows(t, self.starts_q)

    def rows_k(self, t: Tensor) -> Rows:
        """Return the rows of a tensor laid out like k (..., heads, dim)."""
        return Rows(t, self.starts_k, self.inputs.page_table)

    def rows_lse(self, t: Tensor) -> Rows:
        """Return the rows of a tensor laid out like lse, (B, H, Sq) or (H, total): dim is 1."""
        return Rows(t.transpose(-1, -2)[..., None], self.starts_q)

    def spans(self) -> Iterator[Span]:
        """Yield every sequence with queries and every head once."""
        x = self.inputs
        lists = x.block_sparse
        apart = lists is not None and lists.mask_block_cnt.shape[0] > 1
        apart_heads = lists is not None and lists.mask_block_cnt.shape[1] > 1
        alike: dict[tuple[int, int, int], list[int]] = {}
        for b, lengths in enumerate(zip(self.len_q, self.len_k, strict=True)):
            if lengths[0]:
                alike.setdefault((*lengths, b if apart else 0), []).append(b)
        group = 1 if apart_heads else x.group
        for (len_q, len_k, _), members in alike.items():
            tile_q = min(len_q, max(TILE_ROWS // group, 1))
            tile_k = min(len_k, TILE_COLUMNS if tile_q * group > FEW_ROWS else WIDE_COLUMNS)
            together = max(1, TILE_ELEMENTS // (max(tile_q * group, x.head_dim) * max(tile_k, 1)))
            many = max(1, min(together, x.heads // group))
            for heads, heads_kv in self._heads(1 if apart_heads else many, apart_heads):
                for sequences in _chunks(members, max(1, together // many)):
                    yield Span(sequences, heads, heads_kv, len_q, len_k, tile_q, tile_k)

    def _heads(self, many: int, apart: bool) -> Iterator[tuple[slice, slice]]:
        """Yield ranges of (query heads, K/V heads): `many` K/V heads with their groups, or each query head alone."""
        group = self.inputs.group
        if apart:
            for h in range(self.inputs.heads):
                yield slice(h, h + 1), slice(h // group, h // group + 1)
            return
        for h in range(0, self.inputs.heads_kv, many):
            stop = min(h + many, self.inputs.heads_kv)
            yield slice(h * group, stop * group), slice(h, stop)


def _lengths(
    cu_seqlens: Tensor | None, used: Tensor | None, batch: int, capacity: int
) -> tuple[list[int] | None, list[int]]:
    """Return the first row of each sequence, if packed, and how many of its rows count."""
    starts = None
    lengths = [capacity] * batch
    if cu_seqlens is not None:
        edges = cu_seqlens.tolist()
        starts = edges[:-1]
        lengths = [stop - start for start, stop in zip(starts, edges[1:], strict=True)]
    if used is not None:
        lengths = used.tolist()
    return starts, lengths


def _chunks(members: list[int], size: int) -> Iterator[Sequence[int]]:
    """Yield pieces of at most `size`; as a range where consecutive."""
    for c in range(0, len(members), size):
        piece = members[c : c + size]
        consecutive = piece[-1] - piece[0] + 1 == len(piece)
        yield range(piece[0], piece[-1] + 1) if consecutive else piece
