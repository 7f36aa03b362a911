"""Attention over tiles of keys: never a score matrix, invisible tiles never read, forward and backward.

The forward keeps a running maximum, sum and output per query row (online softmax, Milakov and Gimelshein 2018); the
backward recomputes each tile of probabilities from the log-sum-exp (Dao et al. 2022). Both walk the same tiles: spans
of sequences and heads, then tiles of queries, then tiles of keys. Tiles are (n, M, N): n runs over sequences and K/V
heads, M over the query heads that share a K/V head and over query rows, so K and V are never expanded. Arithmetic is
in fp32, or in fp64 for fp64 inputs. Every sum has a fixed order, so equal calls give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...problem import AttentionInputs, Gradients
from .combine import merge
from .sequences import Rows, Sequences, Span
from .visibility import KeyTile, Visibility, indices

Tensor = torch.Tensor


def forward(x: AttentionInputs, out: Tensor, lse: Tensor) -> None:
    """Write attention into `out` (`x.out_shape`) and `lse` (`x.lse_shape`); unused rows get 0 and -inf."""
    out.zero_()
    lse.fill_(-torch.inf)
    call = _Call(x)
    rows_out, rows_lse = call.sequences.rows_q(out), call.sequences.rows_lse(lse)
    for span in call.sequences.spans():
        for rows in call.visibility.query_tiles(span):
            q = call.read_q(call.q, span, rows)
            ranges = _split(span.len_k, x.num_splits)
            parts = [_attend(call, span, rows, q, keys, sink=s == 0) for s, keys in enumerate(ranges)]
            tile_out, tile_lse = parts[0]
            if len(parts) > 1:
                partial = [torch.stack(t) for t in zip(*parts, strict=True)]
                merge(partial[0], partial[1], tile_out, tile_lse)
            rows_out.write(span, rows, span.heads, call.rows_first(tile_out, span, rows))
            rows_lse.write(span, rows, span.heads, call.rows_first(tile_lse[..., None], span, rows))


def backward(
    x: AttentionInputs, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> Gradients:
    """Return the gradients that `needs` asks for, of q, k, v, sink and then each score capture."""
    call = _Call(x)
    grads = _Accumulators(call, needs)
    rows_out, rows_lse = call.sequences.rows_q(out), call.sequences.rows_lse(lse)
    rows_dout = None if dout is None else call.sequences.rows_q(dout)
    rows_dlse = None if dlse is None else call.sequences.rows_lse(dlse)
    for span in call.sequences.spans():
        for rows in call.visibility.query_tiles(span):
            q = call.read_q(call.q, span, rows)
            tile_lse = call.read_q(rows_lse, span, rows)
            if rows_dout is None:
                do = None
                delta = q.new_zeros(*q.shape[:2], 1)
            else:
                do = call.read_q(rows_dout, span, rows)
                delta = (do * call.read_q(rows_out, span, rows)).sum(-1, keepdim=True)
            if rows_dlse is not None:
                delta = delta - call.read_q(rows_dlse, span, rows)
            if grads.sink is not None:
                grads.add_sink(span, rows, tile_lse, delta)
            _attend_backward(call, grads, span, rows, _QueryTile(q, do, delta, tile_lse))
    return grads.results()


class _Call:
    """The tensors of one call as rows, and its mask."""

    def __init__(self, x: AttentionInputs) -> None:
        self.inputs = x
        self.dtype = x.lse_dtype
        self.sequences = Sequences(x)
        self.visibility = Visibility(x)
        self.q = self.sequences.rows_q(x.q)
        self.k = self.sequences.rows_k(x.k)
        self.v = self.sequences.rows_k(x.v)

    def read_q(self, source: Rows, span: Span, rows: slice) -> Tensor:
        """Return query rows as (n, M, dim)."""
        tile = source.read(span, rows, span.heads).to(self.dtype).transpose(1, 2)
        return tile.reshape(self._count(span), -1, tile.shape[-1])

    def read_k(self, source: Rows, span: Span, rows: slice | Tensor) -> Tensor:
        """Return key rows as (n, N, dim)."""
        tile = source.read(span, rows, span.heads_kv).to(self.dtype).transpose(1, 2)
        return tile.reshape(self._count(span), -1, tile.shape[-1])

    def rows_first(self, tile: Tensor, span: Span, rows: slice) -> Tensor:
        """Return a tile (n, M, dim) of query rows as (sequences, rows, heads, dim)."""
        heads = span.heads.stop - span.heads.start
        return tile.view(len(span.sequences), heads, rows.stop - rows.start, tile.shape[-1]).transpose(1, 2)

    def keys_first(self, tile: Tensor, span: Span) -> Tensor:
        """Return a tile (n, N, dim) of key rows as (sequences, rows, K/V heads, dim)."""
        return tile.view(len(span.sequences), -1, *tile.shape[1:]).transpose(1, 2)

    def by_head(self, tile: Tensor, span: Span, rows: slice) -> Tensor:
        """Return a tile of scores (n, M, N) as (sequences, heads, rows, N)."""
        return tile.view(len(span.sequences), -1, rows.stop - rows.start, tile.shape[-1])

    @staticmethod
    def _count(span: Span) -> int:
        heads: int = span.heads_kv.stop - span.heads_kv.start
        return len(span.sequences) * heads


def _split(len_k: int, num_splits: int) -> list[slice]:
    """Return the ranges of keys of each partial result. 0 is one pass: nothing idles on a CPU for want of splits."""
    size = -(-len_k // max(num_splits, 1))
    return [slice(min(s * size, len_k), min((s + 1) * size, len_k)) for s in range(max(num_splits, 1))]


def _attend(call: _Call, span: Span, rows: slice, q: Tensor, keys: slice, sink: bool) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a tile of queries over a range of keys: (n, M, Dv) and (n, M). One range has the sink."""
    x = call.inputs
    top = q.new_full((*q.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(top)
    out = q.new_zeros(*q.shape[:2], x.head_dim_v)
    if x.sink is not None and sink:  # a key without a value, seen by every row
        column = x.sink[span.heads].to(call.dtype)[None, :, None, None]
        call.by_head(top, span, rows).copy_(column)
        total = torch.exp(top - _finite_shift(top))
    for tile in call.visibility.key_tiles(span, rows, keys):
        k, v = call.read_k(call.k, span, tile.rows), call.read_k(call.v, span, tile.rows)
        scores = _scores(call, span, rows, tile, q, k)
        # The true maximum is kept: a shift of 0 for rows that saw nothing yet must not outlive this tile.
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shift = _finite_shift(new_top)
        p = scores.sub_(shift).exp_()
        fade = torch.exp(top - shift)
        total = total * fade + p.sum(-1, keepdim=True)
        out = _product(p, v, _as_tile(tile.visible, p, call, span, rows), out.mul_(fade))
        top = new_top
    empty = total == 0
    out = out.div_(torch.where(empty, 1, total))
    lse = torch.where(empty, -torch.inf, _finite_shift(top) + torch.log(total))
    return out, lse[..., 0]


@dataclass(frozen=True)
class _QueryTile:
    """What the backward knows of a tile of queries: (n, M, D), (n, M, Dv) or None for zeros, (n, M, 1), (n, M, 1)."""

    q: Tensor
    dout: Tensor | None
    delta: Tensor
    lse: Tensor


def _attend_backward(call: _Call, grads: _Accumulators, span: Span, rows: slice, of: _QueryTile) -> None:
    """Add the gradients of a tile of queries: `delta` is <dout, out> - dlse per row."""
    x = call.inputs
    dq = torch.zeros_like(of.q)
    for tile in call.visibility.key_tiles(span, rows, slice(0, span.len_k)):
        k, v = call.read_k(call.k, span, tile.rows), call.read_k(call.v, span, tile.rows)
        raw = _raw_scores(x, of.q, k)
        if x.score_mod is None:
            scores = _soften(x, raw)
            pull = None
        else:
            scores, pull = _modify_with_gradient(call, grads, span, rows, tile, raw)
        visible = tile.visible
        p = torch.exp(scores - _finite_shift(of.lse))
        if visible is not None:  # of the result: a row whose lse is nan must not hand it to keys that it does not see
            call.by_head(p, span, rows).masked_fill_(~visible, 0)
        within = _as_tile(visible, p, call, span, rows)
        turned = None if within is None else within.transpose(1, 2)
        if grads.v is not None and of.dout is not None:
            grads.v.add(
                span, tile.rows, span.heads_kv, call.keys_first(_product(p.transpose(1, 2), of.dout, turned), span)
            )
        if not grads.scores:
            continue
        dp = torch.zeros_like(p) if of.dout is None else torch.bmm(of.dout, v.transpose(1, 2))
        ds = dp.sub_(of.delta).mul_(p)
        if x.softcap:
            ds.mul_(1 - (scores / x.softcap).square())
        if visible is not None:  # before the modifier, whose captures must get nothing from there ...
            call.by_head(ds, span, rows).masked_fill_(~visible, 0)
        if pull is not None:
            ds = pull(ds)
            if visible is not None:  # ... and after, since its derivative may be infinite there
                call.by_head(ds, span, rows).masked_fill_(~visible, 0)
        ds.mul_(x.softmax_scale)
        if grads.k is not None:
            grads.k.add(
                span, tile.rows, span.heads_kv, call.keys_first(_product(ds.transpose(1, 2), of.q, turned), span)
            )
        if grads.q is not None:
            dq = _product(ds, k, within, dq)
    if grads.q is not None:
        grads.q.write(span, rows, span.heads, call.rows_first(dq, span, rows))


class _Accumulators:
    """Gradients under construction, in the dtype of the arithmetic; None where not asked for."""

    def __init__(self, call: _Call, needs: tuple[bool, ...]) -> None:
        x = call.inputs
        self.call = call
        self.dq = torch.zeros(x.q.shape, dtype=x.q.dtype) if needs[0] else None
        self.dk = torch.zeros(x.k.shape, dtype=call.dtype) if needs[1] else None
        self.dv = torch.zeros(x.v.shape, dtype=call.dtype) if needs[2] else None
        self.q = None if self.dq is None else call.sequences.rows_q(self.dq)
        self.k = None if self.dk is None else call.sequences.rows_k(self.dk)
        self.v = None if self.dv is None else call.sequences.rows_k(self.dv)
        self.sink = torch.zeros(x.heads, dtype=torch.float64) if needs[3] and x.sink is not None else None
        self.captures = [
            torch.zeros(t.shape, dtype=self.capture_dtype(i)) if need and t.is_floating_point() else None
            for i, (t, need) in enumerate(zip(x.score_captures, needs[4:], strict=True))
        ]
        #: whether anything that flows through the scores is asked for
        self.scores = needs[0] or needs[1] or any(c is not None for c in self.captures)

    def capture_dtype(self, i: int) -> torch.dtype:
        """Return the dtype in which the gradient of a score capture is summed."""
        return torch.promote_types(self.call.dtype, self.call.inputs.score_captures[i].dtype)

    def add_sink(self, span: Span, rows: slice, lse: Tensor, delta: Tensor) -> None:
        """Subtract P_sink * delta, summed over rows and sequences. An empty row has lse = sink: P_sink is 1."""
        assert self.sink is not None and self.call.inputs.sink is not None, "only called with a sink"
        column = self.call.inputs.sink[span.heads].to(lse.dtype)[None, :, None, None]
        lse, delta = self.call.by_head(lse, span, rows), self.call.by_head(delta, span, rows)
        p = torch.exp(column - _finite_shift(lse))
        self.sink[span.heads] -= (p * delta).sum((0, 2, 3), dtype=torch.float64)

    def add_capture(self, i: int, grad: Tensor) -> None:
        """Add to the gradient of a score capture."""
        total = self.captures[i]
        assert total is not None, "only called for captures that want a gradient"
        total += grad

    def results(self) -> Gradients:
        """Return the gradients in the dtypes of their tensors."""
        x = self.call.inputs
        return Gradients(
            q=self.dq,
            k=None if self.dk is None else self.dk.to(x.k.dtype),
            v=None if self.dv is None else self.dv.to(x.v.dtype),
            sink=None if self.sink is None or x.sink is None else self.sink.to(x.sink.dtype),
            score_captures=tuple(
                None if g is None else g.to(t.dtype) for g, t in zip(self.captures, x.score_captures, strict=True)
            ),
        )


# ---- one tile of scores


def _raw_scores(x: AttentionInputs, q: Tensor, k: Tensor) -> Tensor:
    """Return softmax_scale * q k^T, (n, M, N)."""
    return torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=x.softmax_scale)


def _soften(x: AttentionInputs, raw: Tensor) -> Tensor:
    return raw.div_(x.softcap).tanh_().mul_(x.softcap) if x.softcap else raw


def _scores(call: _Call, span: Span, rows: slice, tile: KeyTile, q: Tensor, k: Tensor) -> Tensor:
    """Return the scores of a tile as they enter the softmax, -inf where invisible."""
    x = call.inputs
    scores = _soften(x, _raw_scores(x, q, k))
    if x.score_mod is not None:
        by_head = call.by_head(scores, span, rows)
        modified = x.score_mod.apply_score(by_head, *indices(span, rows, tile), x.score_captures)
        scores = modified.to(scores.dtype).clone(memory_format=torch.contiguous_format).view(scores.shape)
    if tile.visible is not None:
        call.by_head(scores, span, rows).masked_fill_(~tile.visible, -torch.inf)
    return scores


def _modify_with_gradient(
    call: _Call, grads: _Accumulators, span: Span, rows: slice, tile: KeyTile, raw: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the modified scores, and the map of their gradient to that of the raw ones.

    The map also adds the gradients of the captured tensors. Invisible scores enter as 0, so that whatever an invisible
    key holds cannot reach a captured tensor.
    """
    x = call.inputs
    modifier = x.score_mod
    assert modifier is not None, "only called with a score_mod"
    by_head = call.by_head(raw, span, rows)
    if tile.visible is not None:
        by_head.masked_fill_(~tile.visible, 0)
    wanted = [i for i, grad in enumerate(grads.captures) if grad is not None]
    index = indices(span, rows, tile)

    def apply(score: Tensor, *some: Tensor) -> Tensor:
        captures = list(x.score_captures)
        for i, capture in zip(wanted, some, strict=True):
            captures[i] = capture
        return modifier.apply_score(score, *index, tuple(captures)).to(score.dtype)

    # Captures enter in the dtype of their accumulators, so that what one of them gathers is not summed in fp16 or bf16.
    leaves = [x.score_captures[i].to(grads.capture_dtype(i)) for i in wanted]
    pair: Any = torch.func.vjp(apply, by_head, *leaves)
    modified, pullback = pair

    def pull(ds: Tensor) -> Tensor:
        with _ordered_sums():
            d_raw, *d_captures = pullback(call.by_head(ds, span, rows))
        for i, grad in zip(wanted, d_captures, strict=True):
            grads.add_capture(i, grad)
        return d_raw.contiguous().view(raw.shape)  # type: ignore[no-any-return]

    return modified.clone(memory_format=torch.contiguous_format).view(raw.shape), pull


@contextmanager
def _ordered_sums() -> Iterator[None]:
    """Make torch add into indexed tensors in a fixed order: by default its threads do so in any order."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _finite_shift(t: Tensor) -> Tensor:
    """Return `t` with -inf, the maximum of nothing, as 0, so that exp(-inf - shift) is 0 and not nan."""
    return torch.where(t == -torch.inf, 0, t)


def _as_tile(visible: Tensor | None, like: Tensor, call: _Call, span: Span, rows: slice) -> Tensor | None:
    """Return the mask as a view or copy that lies like a tile (n, M, N)."""
    if visible is None:
        return None
    shape = call.by_head(like, span, rows).shape
    return visible.expand(shape).reshape(like.shape)


def _product(weights: Tensor, values: Tensor, visible: Tensor | None, onto: Tensor | None = None) -> Tensor:
    """Return weights @ values (+ onto). Invisible pairs, of weight 0, stay out even where a value is not finite."""
    if visible is None or math.isfinite(values.sum()):
        return torch.bmm(weights, values) if onto is None else torch.baddbmm(onto, weights, values)
    finite = values.isfinite()
    total = torch.bmm(weights, torch.where(finite, values, 0))
    for j in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        special = torch.where(finite[:, None, j], 0, values[:, None, j])
        total += torch.where(visible[:, :, j, None], weights[:, :, j, None] * special, 0)
    return total if onto is None else total.add_(onto)
