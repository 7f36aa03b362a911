"""The public functions: normalise, validate, call the operator.

Mixed dtypes are a TypeError. Under autocast, q, k and v are cast to the autocast dtype first, as torch's own
attention does; that is the one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import ops, validation
from .compile import memo
from .errors import wrong_type, wrong_value
from .mods.block_mask import BlockSparseTensors
from .normalise import Options, Window, autocast, block_lists, sequences

Tensor = torch.Tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    mask_mod: Callable[..., Tensor] | None = None,
    full_block_cnt: Tensor | None = None,
    full_block_idx: Tensor | None = None,
    mask_block_cnt: Tensor | None = None,
    mask_block_idx: Tensor | None = None,
    *,
    score_mod: Callable[..., Tensor] | None = None,
    score_mod_bwd: Callable[..., Tensor] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: BlockSparseTensors | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention of dense tensors.

    Args:
        q: (B, Sq, H, D), fp16 or bf16; on the CPU also fp32 and fp64.
        k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv), dtype of q. H is a multiple of Hk; D and Dv multiples of 8 up to 256.
        softmax_scale: factor of the scores; 1/sqrt(D) if None.
        causal: row i sees keys up to i + Sk - Sq: queries are aligned to the end of the keys.
        window_size: (left, right), both ends inclusive; None and -1 are unbounded. The last W keys: (W - 1, 0).
        learnable_sink: (H,), one more logit per row that takes weight and gives no value.
        softcap: if not 0, scores become softcap * tanh(score / softcap).
        num_splits: partial results over the keys that are then merged; 0 leaves the number to the backend.
        mask_mod: (b, h, q_idx, kv_idx) -> visible; then causal and window_size are ignored.
        score_mod: (score, b, h, q_idx, kv_idx) -> score; excludes softcap.
        aux_tensors: passed to the mods as a trailing list.
        block_sparse_tensors: key blocks to visit per query block; or the four tensors by name.
        backend: run on this backend or fail; never another.

    Returns:
        out (B, Sq, H, Dv), dtype of q, and lse (B, H, Sq), natural logarithm, fp32 (fp64 for fp64 inputs).
        A row that sees no key has out 0 and lse -inf (the sink's value with a sink).

    Raises:
        TypeError, ValueError: wrong arguments. UnsupportedError: no backend, or not the one named, runs this.
    """
    key = None
    plain = learnable_sink is None and mask_mod is None and score_mod is None and score_mod_bwd is None
    lists = block_sparse_tensors is not None or full_block_cnt is not None or full_block_idx is not None
    lists = lists or mask_block_cnt is not None or mask_block_idx is not None
    if plain and not lists and aux_tensors is None and not torch.compiler.is_compiling():
        key = memo.signature(
            q, k, v, softmax_scale, causal, window_size, softcap, num_splits, pack_gqa, deterministic, backend
        )
        if key is not None and (found := memo.find(key)) is not None:
            return ops.ready_attention(*found, q, k, v)
    x = sequences(*autocast(q, k, v))
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        block_sparse=block_lists(block_sparse_tensors, mask_block_cnt, mask_block_idx, full_block_cnt, full_block_idx),
        score_mod_bwd=score_mod_bwd,
    )
    x = options.apply(x)
    if key is not None and (made := ops.ready(x, backend)) is not None:
        memo.keep(key, *made)
        return ops.ready_attention(*made, q, k, v)
    return ops.attention(x, backend)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Tensor] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    *,
    mask_mod: Callable[..., Tensor] | None = None,
    score_mod_bwd: Callable[..., Tensor] | None = None,
    block_sparse_tensors: BlockSparseTensors | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention of packed sequences; any of q and k may be dense instead. Options as in `flash_attn_func`.

    Args:
        q: (total_q, H, D) with cu_seqlens_q, else (B, Sq, H, D).
        k, v: (total_k, Hk, D or Dv) with cu_seqlens_k; (num_pages, page_size, Hk, D or Dv) with page_table; else dense.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, first 0, non-decreasing.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; a tensor is ignored, since reading it synchronises.
        seqused_q, seqused_k: (B,) int32: only the first so many rows of each sequence count.
        page_table: (B, max_pages) int32, with seqused_k.

    Returns:
        out, shape of q with Dv, and lse (H, total_q), or (B, H, Sq) for dense q.
    """
    x = sequences(
        *autocast(q, k, v),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        page_table,
    )
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        block_sparse=block_sparse_tensors,
        score_mod_bwd=score_mod_bwd,
    )
    return ops.attention(options.apply(x), backend)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    return_lse: bool = True,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merge partial results over disjoint sets of keys.

    Args:
        out_partial: (S, B, Sq, H, Dv) or (S, total, H, Dv), fp32. lse_partial: the same without Dv, fp32.
        out: buffer for the result. out_dtype: its dtype; fp32 if neither is given.
        cu_seqlens: (B + 1,) int32 for packed rows. seqused: (B,) int32: rows past it get out 0, lse -inf.

    Returns:
        out (B, Sq, H, Dv) or (total, H, Dv), and lse (B, Sq, H) or (total, H), or None without `return_lse`.
        A split whose lse is -inf contributes nothing, NaN in its out included.
    """
    from .dispatch import backend as find

    if not isinstance(out_partial, Tensor):
        raise wrong_type("out_partial", "a tensor", out_partial)
    if out_partial.dim() not in (4, 5):
        raise wrong_value(
            "out_partial", "shape (S, B, Sq, H, Dv) or (S, total, H, Dv)", f"shape {tuple(out_partial.shape)}"
        )
    validation.check_tensor(
        "lse_partial", lse_partial, out_partial.dim() - 1, "that of out_partial without Dv", out_partial
    )
    for name, t in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if t.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name}: expected float32, got {t.dtype}")
    if lse_partial.shape != out_partial.shape[:-1]:
        raise wrong_value("lse_partial", f"shape {tuple(out_partial.shape[:-1])}", f"{tuple(lse_partial.shape)}")
    if out_dtype is not None and out_dtype not in validation.DTYPES:
        raise wrong_type("out_dtype", "a floating dtype", out_dtype)
    validation.check_flag("return_lse", return_lse)
    shape = tuple(out_partial.shape[1:])
    dtype = out_dtype or (torch.float32 if out is None else out.dtype)
    if out is not None:
        validation.check_buffer("out", out, shape, dtype, out_partial)
    packed = out_partial.dim() == 4
    if cu_seqlens is not None and not packed:
        raise wrong_value("cu_seqlens", "packed partial results (S, total, H, Dv)", f"shape {tuple(out_partial.shape)}")
    if packed and cu_seqlens is None and seqused is not None:
        raise wrong_value("seqused", "cu_seqlens beside it for packed results", "none")
    if cu_seqlens is not None:
        validation.check_index("cu_seqlens", cu_seqlens, (-1,), "(B + 1,)", out_partial)
    if seqused is not None:
        batch = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        validation.check_index("seqused", seqused, (batch,), "(B,)", out_partial)
    lengths = seqused
    if seqused is not None and cu_seqlens is not None:
        rows = torch.arange(shape[0], device=out_partial.device)
        owner = torch.searchsorted(cu_seqlens, rows, right=True) - 1
        inside = owner.clamp(0, max(seqused.shape[0] - 1, 0))
        lengths = ((owner < seqused.shape[0]) & (rows - cu_seqlens[inside] < seqused[inside]))[:, None]
    merged = out_partial.new_empty(shape, dtype=dtype) if out is None else out
    lse = lse_partial.new_empty(lse_partial.shape[1:])
    name = backend or ("cpu" if out_partial.device.type == "cpu" else "sm90")
    with torch.no_grad():
        find(name).combine(out_partial, lse_partial, merged, lse, lengths)
    return merged, lse if return_lse else None
