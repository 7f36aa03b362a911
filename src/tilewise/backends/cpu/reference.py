"""The specification: attention with materialised scores, in plain differentiable torch operations.

It is the oracle of every test, in fp64, on any device; nothing optimised imports it. Read it from top to bottom:
lay sequences out in rows, say which pairs are visible, take a softmax over the visible ones, put rows back.
`torch.autograd.grad` through it is the oracle of every gradient.
"""

from __future__ import annotations

import torch

from ...problem import AttentionInputs, AttentionProblem, Gradients
from .combine import merge

Tensor = torch.Tensor


def attention(x: AttentionInputs, pairwise: bool = False) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one call, computed in fp32, or in fp64 for fp64 inputs.

    `pairwise` multiplies pair by pair, at the price of memory: in a matrix product the weight 0 of an invisible pair
    makes nan of an inf or a nan. It is always so where q, k or v are not finite; gradients may not be, too.

    Shapes and dtypes as in `AttentionInputs.out_shape` and `AttentionInputs.lse_shape`.
    A row that sees no key has out 0 and lse -inf (or its sink). Nothing of an unused slot
    reaches a result or a gradient.
    """
    rows_q, len_q = _rows(x.q, x.cu_seqlens_q, x.seqused_q)
    rows_k, len_k = _rows(x.k, x.cu_seqlens_k, x.seqused_k, x.page_table)
    q = _take(x.q, rows_q, x).transpose(1, 2)  # (B, H, M, D)
    k = _take(x.k, rows_k, x).transpose(1, 2).repeat_interleave(x.group, dim=1)  # (B, H, N, D)
    v = _take(x.v, rows_k, x).transpose(1, 2).repeat_interleave(x.group, dim=1)  # (B, H, N, Dv)
    b, h, i, j = (torch.arange(n, device=q.device) for n in (x.batch, x.heads, q.shape[2], k.shape[2]))

    visible = _visible(x, len_q, len_k, (b, h, i, j)).expand(x.batch, x.heads, q.shape[2], k.shape[2])
    pairwise = pairwise or not _finite(q, k, v)
    if pairwise:
        pairs = visible[..., None]
        scores = (torch.where(pairs, q[..., :, None, :], 0) * torch.where(pairs, k[..., None, :, :], 0)).sum(-1)
    else:
        scores = q @ k.transpose(-1, -2)
    scores = scores * x.softmax_scale
    if x.softcap:
        scores = x.softcap * torch.tanh(scores / x.softcap)
    if x.score_mod is not None:
        scores = x.score_mod.apply_score(torch.where(visible, scores, 0), b, h, i, j, x.score_captures)

    none = scores.new_full((x.heads,), -torch.inf)
    sink = none if x.sink is None else x.sink.to(scores.dtype)
    column = sink[None, :, None, None].expand(*scores.shape[:3], 1)  # a key without a value
    scores = torch.cat([torch.where(visible, scores, -torch.inf), column], dim=-1)
    shift = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(shift == -torch.inf, 0, shift))
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -torch.inf, torch.where(empty, 0, shift) + torch.log(total))[..., 0]
    p = torch.where(visible, weights[..., :-1] / total, 0)
    out = (p[..., None] * torch.where(pairs, v[..., None, :, :], 0)).sum(-2) if pairwise else p @ v

    out = _put(out.transpose(1, 2), rows_q, x.q.shape[:-2], 0.0).to(x.q.dtype)
    lse = _put(lse.transpose(1, 2), rows_q, x.q.shape[:-2], -torch.inf)
    return out, lse.transpose(-1, -2)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def _rows(
    t: Tensor, cu_seqlens: Tensor | None, used: Tensor | None, pages: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return where row i of sequence b lies in `t` flattened to (rows, heads, dim), (B, longest), and lengths (B,).

    Slots past the length point at the row after the last: one that `_take` fills with zeros and `_put` drops.
    """
    if cu_seqlens is not None:
        total, start = t.shape[0], cu_seqlens[:-1].long()
        available = cu_seqlens[1:].long() - start
    else:
        per_sequence = t.shape[1] if pages is None else pages.shape[1] * t.shape[1]
        batch = t.shape[0] if pages is None else pages.shape[0]
        total = t.shape[0] * t.shape[1]
        start = torch.arange(batch, device=t.device) * per_sequence
        available = torch.full_like(start, per_sequence)
    lengths = available if used is None else used.long()
    position = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=t.device)
    if pages is None:
        rows = start[:, None] + position
    else:
        rows = pages[:, position // t.shape[1]].long() * t.shape[1] + position % t.shape[1]
    return torch.where(position < lengths[:, None], rows, total), lengths


def _take(t: Tensor, rows: Tensor, x: AttentionInputs) -> Tensor:
    """Return the rows (B, longest, heads, dim) of `t`, zeros in unused slots."""
    flat = t.to(x.lse_dtype).reshape(-1, *t.shape[-2:])
    return torch.cat([flat, flat.new_zeros(1, *t.shape[-2:])])[rows]


def _put(values: Tensor, rows: Tensor, shape: torch.Size, fill: float) -> Tensor:
    """Return `values` (B, longest, ...) at their rows in a tensor of leading `shape`, `fill` elsewhere."""
    flat = values.new_full((shape.numel() + 1, *values.shape[2:]), fill)
    return flat.index_put((rows,), values)[:-1].reshape(*shape, *values.shape[2:])


def _visible(x: AttentionInputs, len_q: Tensor, len_k: Tensor, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Return which pairs are visible, broadcastable to (B, H, M, N). Queries are aligned to the end of the keys."""
    b, h, i, j = index
    len_q, len_k = len_q[:, None, None, None], len_k[:, None, None, None]
    visible = (i[:, None] < len_q) & (j < len_k)
    diagonal = i[:, None] + len_k - len_q
    if x.window_left is not None:
        visible = visible & (j >= diagonal - x.window_left)
    if x.window_right is not None:
        visible = visible & (j <= diagonal + x.window_right)
    chosen = visible.new_ones(1, 1, 1, 1)
    if x.mask_mod is not None:
        chosen = x.mask_mod.apply_mask(b, h, i, j, x.mask_captures)
    if (lists := x.block_sparse) is not None:
        m, n = lists.block_size
        chosen = chosen & _listed(lists.mask_block_cnt, lists.mask_block_idx, i // m, j // n)
        if lists.full_block_cnt is not None and lists.full_block_idx is not None:
            chosen = chosen | _listed(lists.full_block_cnt, lists.full_block_idx, i // m, j // n)
    return visible & chosen


def _listed(count: Tensor, index: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return (B|1, H|1, M, N): is j's block of keys among the first `count` listed for i's block of queries?"""
    blocks = torch.arange(index.shape[-1], device=index.device)
    wanted = torch.arange(int(j.max()) + 1 if j.numel() else 0, device=index.device)
    hit = (index[..., None] == wanted) & (blocks < count[..., None])[..., None]
    return hit.any(-2)[:, :, i][..., j]


class ReferenceBackend:
    """The specification as a backend: any device, every feature, memory for every score."""

    name = "reference"
    runs_on = "any device, by name only: every score in memory"

    def unavailable(self, device: torch.device) -> list[str]:
        """Refuse tensors without values."""
        return ["q is on meta"] if device.type == "meta" else []

    def unsupported(self, problem: AttentionProblem) -> list[str]:
        """Refuse nothing."""
        return []

    def forward(
        self, inputs: AttentionInputs, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse), written into the buffers where given."""
        with torch.no_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            results = attention(inputs)
        return (
            results[0] if out is None else out.copy_(results[0]),
            results[1] if lse is None else lse.copy_(results[1]),
        )

    def backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor | None,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        needs: tuple[bool, ...],
    ) -> Gradients:
        """Return the gradients by automatic differentiation of `attention`."""
        sources = [inputs.q, inputs.k, inputs.v, inputs.sink, *inputs.score_captures]
        wanted = [t is not None and need for t, need in zip(sources, needs, strict=True)]
        leaves = [
            t.detach().requires_grad_() if w and t is not None else t for t, w in zip(sources, wanted, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            q, k, v, sink, *captures = leaves
            call = inputs.replace(q=q, k=k, v=v, sink=sink, score_captures=tuple(captures))
            results = attention(call, pairwise=not _finite(*(g for g in (dout, dlse) if g is not None)))
            pairs = [(r, g) for r, g in zip(results, (dout, dlse), strict=True) if g is not None and r.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [r for r, _ in pairs],
                    [t for t, w in zip(leaves, wanted, strict=True) if w and t is not None],
                    [g.to(r.dtype) for r, g in pairs],
                    materialize_grads=True,
                )
                if pairs
                else [torch.zeros_like(t) for t, w in zip(leaves, wanted, strict=True) if w and t is not None]
            )
        grads = [next(found) if w else None for w in wanted]
        dq, dk, dv, dsink, *dcaptures = grads
        return Gradients(dq, dk, dv, dsink, tuple(dcaptures))

    def combine(
        self, out_partial: Tensor, lse_partial: Tensor, out: Tensor, lse: Tensor, lengths: Tensor | None
    ) -> None:
        """Merge partial results along dimension 0 into `out` and `lse`."""
        merge(out_partial, lse_partial, out, lse, lengths)
