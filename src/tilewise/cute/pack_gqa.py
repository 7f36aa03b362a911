"""Packed GQA: the query heads of one key head become rows of one tile."""

from __future__ import annotations

import cutlass.cute as cute


def packed_view(t: cute.Tensor, group: int) -> cute.Tensor:
    """View (S, D, H, B) as ((group, S), D, H // group, B): row r is position r // group of head r % group."""
    (s, d, h, b), (ss, sd, sh, sb) = t.layout.shape, t.layout.stride
    return cute.make_tensor(
        t.iterator, cute.make_layout(((group, s), d, h // group, b), stride=((sh, ss), sd, sh * group, sb))
    )
