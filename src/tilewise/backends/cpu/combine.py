"""Merging partial results over disjoint sets of keys: softmax is associative, given each part's log-sum-exp."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def merge(out_partial: Tensor, lse_partial: Tensor, out: Tensor, lse: Tensor, lengths: Tensor | None = None) -> None:
    """Merge (S, ..., Dv) partial outputs and (S, ...) log-sum-exps into `out` (..., Dv) and `lse` (...).

    A part whose lse is -inf contributes nothing, whatever its out holds; rows with no part left get out 0, lse -inf.

    Args:
        lengths: for (B, Sq, H) results, (B,): rows at or past the length count as having no part.
            Or a bool tensor that broadcasts to (...): which rows count.
    """
    if lengths is not None:
        counted = lengths
        if lengths.dtype != torch.bool:
            position = torch.arange(lse.shape[1], device=lse.device)
            counted = (position < lengths[:, None])[:, :, None]
        lse_partial = lse_partial.masked_fill(~counted, -torch.inf)
    if lse_partial.shape[0] == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    top = lse_partial.amax(0)
    shift = torch.where(top == -torch.inf, 0, top)
    weights = torch.exp(lse_partial - shift)
    total = weights.sum(0)
    share = weights / torch.where(total == 0, 1, total)
    merged = torch.zeros(out.shape, dtype=out_partial.dtype, device=out.device)
    for part_out, part_lse, part_share in zip(out_partial, lse_partial, share, strict=True):
        alive = (part_lse != -torch.inf)[..., None]
        merged += torch.where(alive, part_out * part_share[..., None], 0)
    out.copy_(merged)
    lse.copy_(torch.where(total == 0, -torch.inf, shift + torch.log(total)))
