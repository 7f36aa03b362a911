"""Plain dense attention through torch's own fused CPU kernel, where its answer is ours.

`torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` takes (B, H, S, D) of any outer strides, fewer K/V heads
than query heads in the forward only, one head dim for all, and aligns its causal mask to the first key. It divides by
zero where a size is 0, and in fp16 and bf16 it can lose a nan or an inf of its inputs: neither is ever handed to it.
"""

from __future__ import annotations

import math

import torch

from ...problem import AttentionInputs, Gradients

Tensor = torch.Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_or_none(x: AttentionInputs) -> bool | None:
    """Return the kernel's `is_causal` for this call, or None where the kernel does not compute it."""
    absent = (x.cu_seqlens_q, x.cu_seqlens_k, x.seqused_q, x.seqused_k, x.page_table)
    modified = (x.sink, x.score_mod, x.mask_mod, x.block_sparse)
    if any(t is not None for t in (*absent, *modified)) or x.softcap or x.num_splits > 1:
        return None
    if x.head_dim != x.head_dim_v or x.heads != x.heads_kv or not x.q.numel() or not x.k.numel():
        return None
    if any(t.stride(-1) != 1 for t in (x.q, x.k, x.v)):
        return None
    len_q, len_k = x.q.shape[1], x.k.shape[1]
    if x.window_left is not None and x.window_left < len_k - 1:
        return None
    if x.window_right is None or x.window_right >= len_q - 1:
        return False
    return True if x.window_right == 0 and len_q == len_k else None


def forward(x: AttentionInputs, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return (out, lse), in the buffers where given, or None where the kernel does not compute this call."""
    causal = causal_or_none(x)
    if causal is None or not _finite(x.q, x.k, x.v):
        return None
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    found_out, found_lse = _FORWARD(q, k, v, 0.0, causal, scale=x.softmax_scale)
    if not _finite(found_out, found_lse):
        return None
    found_out = found_out.transpose(1, 2)
    out = found_out.contiguous() if out is None else out.copy_(found_out)
    return out, found_lse.contiguous() if lse is None else lse.copy_(found_lse)


def backward(
    x: AttentionInputs, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> Gradients | None:
    """Return the gradients of q, k and v, or None where the kernel does not compute this call."""
    causal = causal_or_none(x)
    if causal is None or dlse is not None or dout is None or not _finite(x.q, x.k, x.v, dout, out, lse):
        return None
    q, k, v, o, do = (t.transpose(1, 2) for t in (x.q, x.k, x.v, out, dout.contiguous()))
    found = _BACKWARD(do, q, k, v, o, lse.mT.contiguous().mT, 0.0, causal, scale=x.softmax_scale)
    if not _finite(*found):
        return None
    dq, dk, dv = (g.transpose(1, 2).contiguous() if need else None for g, need in zip(found, needs, strict=False))
    return Gradients(q=dq, k=dk, v=dv, score_captures=())


def _finite(*tensors: Tensor) -> bool:
    """Return whether all elements are finite, by a sum; one that overflows only costs the faster way."""
    return all(
        math.isfinite(t.sum(dtype=torch.float64 if t.dtype == torch.float64 else torch.float32)) for t in tensors
    )
