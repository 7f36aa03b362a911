"""Attention over a key/value cache: append in place, rotate, attend."""

from __future__ import annotations

from typing import Any

import torch

from . import ops, validation
from .errors import wrong_value
from .normalise import Options, Window, length_bound, values_are_readable
from .problem import AttentionInputs

Tensor = torch.Tensor

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define("append_kv(Tensor(a!) cache, Tensor new, Tensor start, Tensor? page_table) -> ()")


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_interleaved: bool = True,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Append k and v to the cache in place, then attend from q to the whole of it. No gradient.

    Args:
        q: (B, Sq, H, D), or (total_q, H, D) with cu_seqlens_q.
        k_cache, v_cache: (B_cache, S_cache, Hk, D or Dv), or (num_pages, page_size, Hk, D or Dv) with page_table.
        k, v: (B, Snew, Hk, D or Dv), written at rows cache_seqlens[b] and on; they count as keys at once.
        rotary_cos, rotary_sin: (S, R / 2), R <= D even: k rows rotate by their position in the cache, and q rows
            by theirs with a causal mask or a window, else all by cache_seqlens[b].
        cache_seqlens: (B,) int32, or one int: rows in use before the append; the whole cache if None.
        cache_batch_idx: (B,) int32: which row of the cache belongs to each sequence.
        page_table: (B, max_pages) int32.
        rotary_interleaved: rotate dimensions (0, 1), (2, 3), ...; else (0, R / 2), (1, R / 2 + 1), ...

    Returns:
        out and lse, as `flash_attn_varlen_func`.

    Raises:
        TypeError, ValueError: wrong arguments; the cache is then unchanged.
    """
    paged, packed = page_table is not None, cu_seqlens_q is not None
    validation.check_tensor("q", q, 3 if packed else 4, "(total_q, H, D)" if packed else "(B, Sq, H, D)")
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        validation.check_tensor(name, t, 4, "(num_pages, page_size, Hk, D)" if paged else "(B, S, Hk, D)", q)
    # One cache row per sequence is checked below; here the rows may be more than the sequences.
    validation.check_qkv(q, k_cache, v_cache, packed, False, paged=True, names=("k_cache", "v_cache"))
    if cu_seqlens_q is not None:
        validation.check_index("cu_seqlens_q", cu_seqlens_q, (-1,), "(B + 1,)", q)
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    if cache_batch_idx is not None:
        if paged:
            raise wrong_value("cache_batch_idx", "None with page_table", "both")
        validation.check_index("cache_batch_idx", cache_batch_idx, (batch,), "(B,)", q)
    elif not paged and k_cache.shape[0] != batch:
        raise wrong_value("k_cache", f"batch {batch} as in q, or cache_batch_idx", f"{k_cache.shape[0]}")
    if page_table is not None:
        validation.check_index("page_table", page_table, (batch, -1), "(B, max_pages)", q)
        if cache_seqlens is None:
            raise wrong_value("cache_seqlens", "lengths beside page_table", "None")
    capacity = k_cache.shape[1] * (page_table.shape[1] if page_table is not None else 1)
    before = _lengths(cache_seqlens, batch, capacity, q)
    grown = 0
    if (k is None) != (v is None):
        raise wrong_value("k" if k is None else "v", "both k and v, or neither", "None")
    if k is not None and v is not None:
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            validation.check_tensor(name, new, 4, "(B, Snew, Hk, D)", q)
            if new.dtype != q.dtype:
                raise TypeError(f"{name}: expected dtype {q.dtype} as in q, got {new.dtype}")
            if new.shape[0] != batch or new.shape[2:] != cache.shape[2:]:
                rule = f"shape ({batch}, Snew, {cache.shape[2]}, {cache.shape[3]})"
                raise wrong_value(name, rule, f"{tuple(new.shape)}")
        if k.shape[1] != v.shape[1]:
            raise wrong_value("v", f"{k.shape[1]} rows as in k", f"{v.shape[1]}")
        if cache_seqlens is None:
            raise wrong_value("cache_seqlens", "lengths beside k and v", "None")
        grown = k.shape[1]
    _check_rotary(rotary_cos, rotary_sin, q, k)
    validation.check_flag("rotary_interleaved", rotary_interleaved)
    used = before + grown
    if values_are_readable(q):
        _check_values(before, grown, capacity, cache_batch_idx, k_cache.shape[0])
    if cache_batch_idx is not None:
        # The cache is one page per sequence, so that no row of it is copied.
        page_table = cache_batch_idx[:, None].contiguous()
    x = AttentionInputs(
        q=q,
        k=k_cache,
        v=v_cache,
        softmax_scale=0.0,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=length_bound("max_seqlen_q", max_seqlen_q),
        seqused_k=used,
        page_table=page_table,
    )
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
    )
    x = options.apply(x)
    local = causal or x.window_left is not None or x.window_right is not None
    if rotary_cos is not None and values_are_readable(q):
        _check_positions(x, before, grown, local, rotary_cos.shape[0])
    with torch.no_grad():
        if rotary_cos is not None and rotary_sin is not None and k is not None:
            tables = (rotary_cos, rotary_sin, rotary_interleaved)
            steps = torch.arange(grown, device=q.device)
            k = _rotate(k, before[:, None] + steps, *tables)
            x = x.replace(q=_rotate(q, _query_positions(x, before, local), *tables))
        if k is not None and v is not None:
            for cache, new in ((k_cache, k), (v_cache, v)):
                torch.ops.tilewise.append_kv(cache, new, before, page_table)
        return ops.attention(x, backend)


def _lengths(given: Any, batch: int, capacity: int, q: Tensor) -> Tensor:
    """Return the rows in use per sequence, int32 (B,)."""
    if isinstance(given, Tensor):
        validation.check_index("cache_seqlens", given, (batch,), "(B,)", q)
        return given
    if given is not None:
        validation.check_count("cache_seqlens", given)
    return torch.full((batch,), capacity if given is None else given, dtype=torch.int32, device=q.device)


def _check_rotary(cos: Any, sin: Any, q: Tensor, k: Any) -> None:
    """Check the rotary tables."""
    if (cos is None) != (sin is None):
        raise wrong_value("rotary_cos" if cos is None else "rotary_sin", "both tables, or neither", "None")
    if cos is None:
        return
    if k is None:
        raise wrong_value("rotary_cos", "k and v to append beside it", "None")
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        validation.check_tensor(name, t, 2, "(S, R / 2)", q)
        if not t.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {t.dtype}")
        if 2 * t.shape[1] > q.shape[-1]:
            raise wrong_value(name, f"at most {q.shape[-1] // 2} columns, half of head_dim", f"{t.shape[1]}")
    if cos.shape != sin.shape:
        raise wrong_value("rotary_sin", f"shape {tuple(cos.shape)} as rotary_cos", f"{tuple(sin.shape)}")


def _check_values(before: Tensor, grown: int, capacity: int, rows: Tensor | None, n_rows: int) -> None:
    """Read the lengths and the cache rows and check them, before anything is written."""
    for n in before.tolist():
        if n < 0:
            raise wrong_value("cache_seqlens", "lengths of at least 0", f"{n}")
        if n + grown > capacity:
            rule = f"lengths up to {capacity}, the room of a sequence, after the append"
            raise wrong_value("cache_seqlens", rule, f"{n} + {grown}")
    for row in [] if rows is None else rows.tolist():
        if not 0 <= row < n_rows:
            raise wrong_value("cache_batch_idx", f"rows from 0 to {n_rows - 1}", f"{row}")


def _check_positions(x: AttentionInputs, before: Tensor, grown: int, local: bool, rows: int) -> None:
    """Read the positions that q and the new keys rotate by and check that the rotary tables have them."""
    if x.cu_seqlens_q is not None:
        counts = x.cu_seqlens_q.diff().tolist()
    else:
        counts = [x.q.shape[1]] * x.q.shape[0]
    for start, count in zip(before.tolist(), counts, strict=True):
        last = start + max(grown, count if local else min(count, 1)) - 1
        if last >= rows and last >= start:
            raise wrong_value("rotary_cos", f"at least {last + 1} rows, one per position", f"{rows}")


def _query_positions(x: AttentionInputs, before: Tensor, local: bool) -> Tensor:
    """Return the position of each query row: (B, Sq), or (total_q,) for packed q."""
    if x.cu_seqlens_q is None:
        steps = torch.arange(x.q.shape[1], device=x.q.device)
        return before[:, None] + (steps if local else torch.zeros_like(steps))
    rows = torch.arange(x.q.shape[0], device=x.q.device)
    owner = (torch.searchsorted(x.cu_seqlens_q, rows, right=True) - 1).clamp(max=before.shape[0] - 1)
    return before[owner] + (rows - x.cu_seqlens_q[owner] if local else 0)


def _rotate(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (..., H, D) rotated by its rows' positions (...); Su et al., RoFormer, 2021, equation 34."""
    half = cos.shape[1]
    # Rows past the table are padding of packed queries, whose result is never used, or were refused where values can
    # be read; a clamp keeps the gather inside the table on a GPU, whose values are not read.
    position = position.clamp(max=max(cos.shape[0] - 1, 0)).long()
    compute = torch.promote_types(torch.float32, x.dtype)
    c, s = (t[position].unsqueeze(-2).to(compute) for t in (cos, sin))
    head = x[..., : 2 * half].to(compute)
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    first, second = a * c - b * s, b * c + a * s
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def _append(cache: Tensor, new: Tensor, start: Tensor, page_table: Tensor | None) -> None:
    """Write new[b, i] at position start[b] + i of sequence b."""
    batch, count = new.shape[:2]
    position = start[:, None].long() + torch.arange(count, device=new.device)
    if page_table is None:
        row = torch.arange(batch, device=new.device)[:, None].expand(-1, count)
    else:
        row = page_table.long().gather(1, position // cache.shape[1])
        position = position % cache.shape[1]
    cache[row, position] = new


for _device in ("CPU", "CUDA"):
    _library.impl("append_kv", _append, _device)
torch.library.register_fake("tilewise::append_kv", lambda *_: None, lib=_library)
