"""The functional entry points, without autograd, and the names that users of FlashAttention's interface import."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import ops, validation
from .api import flash_attn_combine, flash_attn_func, flash_attn_varlen_func
from .errors import wrong_value
from .mods.block_mask import BlockSparseTensors
from .normalise import Options, sequences
from .ops import AttentionFunction

Tensor = torch.Tensor

FlashAttnFunc = AttentionFunction
FlashAttnVarlenFunc = AttentionFunction
BlockSparseTensorsTorch = BlockSparseTensors

__all__ = [
    "BlockSparseTensorsTorch",
    "FlashAttnFunc",
    "FlashAttnVarlenFunc",
    "_flash_attn_bwd",
    "_flash_attn_fwd",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
]


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    block_sparse_tensors: BlockSparseTensors | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    *,
    m_block_size: int | None = None,
    n_block_size: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (out, lse), written into `out` and `lse` where given; arguments as in `flash_attn_varlen_func`.

    lse is None unless `return_lse`, or `lse` is given, or an input requires grad. The block sizes are overrides of the
    plan; the CPU's plan has no such tiles and its results do not depend on them.
    """
    for name, size in (("m_block_size", m_block_size), ("n_block_size", n_block_size)):
        if size is not None:
            validation.check_count(name, size, 1)
    validation.check_flag("return_lse", return_lse)
    x = sequences(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        page_table,
    )
    if out is not None:
        validation.check_buffer("out", out, x.out_shape, q.dtype, q)
    if lse is not None:
        validation.check_buffer("lse", lse, x.lse_shape, x.lse_dtype, q)
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        learnable_sink=learnable_sink,
        softcap=0.0 if softcap is None else softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        block_sparse=block_sparse_tensors,
    )
    x = options.apply(x)
    wants_lse = return_lse or lse is not None or any(t.requires_grad for t in (q, k, v))
    with torch.no_grad():
        if out is None and lse is None:
            result, stats = ops.attention(x, backend)
        else:
            result = q.new_empty(x.out_shape) if out is None else out
            stats = q.new_empty(x.lse_shape, dtype=x.lse_dtype) if lse is None else lse
            ops.attention_forward_out(x, result, stats, backend)
    return result, stats if wants_lse else None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    score_mod_bwd: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: BlockSparseTensors | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), written into the buffers where given; `out` and `lse` as `_flash_attn_fwd` returned them."""
    x = sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    for name, t, shape, dtype in (
        ("out", out, x.out_shape, q.dtype),
        ("dout", dout, x.out_shape, q.dtype),
        ("lse", lse, x.lse_shape, x.lse_dtype),
    ):
        validation.check_tensor(name, t, len(shape), str(shape), q)
        if t.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, got {t.dtype}")
        if tuple(t.shape) != tuple(shape):
            raise wrong_value(name, f"shape {shape}", f"{tuple(t.shape)}")
    buffers = (("dq", dq, q), ("dk", dk, k), ("dv", dv, v))
    for name, buffer, like in buffers:
        if buffer is not None:
            validation.check_buffer(name, buffer, tuple(like.shape), like.dtype, q)
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        deterministic=deterministic,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        block_sparse=block_sparse_tensors,
        score_mod_bwd=score_mod_bwd,
    )
    x = options.apply(x)
    with torch.no_grad():
        found = ops.attention_backward(x, dout, out, lse, backend)
        results = [g if b is None else b.copy_(g) for g, (_, b, _) in zip(found, buffers, strict=True)]
    return results[0], results[1], results[2]
