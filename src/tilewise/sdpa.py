"""PyTorch's `scaled_dot_product_attention`: its layout (B, H, S, D), its top-left causal alignment, its masks."""

from __future__ import annotations

import math

import torch

from . import ops, validation
from .errors import UnsupportedError, wrong_value
from .mods.trace import trace
from .problem import AttentionInputs

Tensor = torch.Tensor


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """Exact attention with the semantics of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: (B, H, Sq, D). key: (B, Hk, Sk, D). value: (B, Hk, Sk, Dv). Any D and Dv up to 256.
        attn_mask: broadcastable to (B, H, Sq, Sk): bool, True where visible; or floating, added to the scores.
        is_causal: query i sees keys up to i, aligned to the start of the keys.
        enable_gqa: H may be a multiple of Hk.

    Returns:
        (B, H, Sq, Dv).

    Raises:
        UnsupportedError: dropout_p above 0.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        validation.check_tensor(name, t, 4, "(B, H, S, D)", None if name == "query" else query)
    validation.check_number("dropout_p", dropout_p, 0.0)
    validation.check_flag("is_causal", is_causal)
    validation.check_flag("enable_gqa", enable_gqa)
    if dropout_p > 0:
        raise UnsupportedError(
            f"dropout_p: expected 0, got {dropout_p}: no backend drops weights; drop the output instead"
        )
    if attn_mask is not None and is_causal:
        raise wrong_value("attn_mask", "None with is_causal", "both")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise wrong_value("key", f"{query.shape[1]} heads as in query, or enable_gqa=True", f"{key.shape[1]}")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    validation.check_number("scale", scale)
    dim_v = value.shape[-1]
    q, k, v = (_padded(t).transpose(1, 2) for t in (query, key, value))
    validation.check_qkv(q, k, v, False, False, False)
    sq, sk = q.shape[1], k.shape[1]
    # Ours aligns to the end of the keys: key j <= i + (sk - sq) + right.
    x = AttentionInputs(q=q, k=k, v=v, softmax_scale=scale, window_right=sq - sk if is_causal else None)
    if attn_mask is not None:
        x = _with_mask(x, attn_mask)
    out, _ = ops.attention(x, backend)
    return out[..., :dim_v].transpose(1, 2)


def _padded(t: Tensor) -> Tensor:
    """Return `t` with its head dim filled with zeros up to a multiple of 8, which changes no score."""
    missing = -t.shape[-1] % 8
    return torch.nn.functional.pad(t, (0, missing)) if missing else t


def _with_mask(x: AttentionInputs, mask: Tensor) -> AttentionInputs:
    """Return the call with `attn_mask` as a mask_mod or a score_mod, through which its gradient flows."""
    full = (x.batch, x.heads, x.q.shape[1], x.k.shape[1])
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"attn_mask: expected a bool or floating tensor, got {getattr(mask, 'dtype', type(mask))}")
    if mask.device != x.q.device:
        raise wrong_value("attn_mask", f"device {x.q.device} as query", f"{mask.device}")
    if mask.dim() > 4 or any(n not in (1, m) for n, m in zip(mask.shape[::-1], full[::-1], strict=False)):
        raise wrong_value("attn_mask", f"a shape that broadcasts to {full}", f"{tuple(mask.shape)}")
    table = mask.expand(full)
    score_dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    if mask.dtype == torch.bool:

        def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return table[b, h, q_idx, kv_idx]

        modifier, captures = trace(visible, "mask", None, score_dtype, x.q.device)
        return x.replace(mask_mod=modifier, mask_captures=captures)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[b, h, q_idx, kv_idx]

    modifier, captures = trace(biased, "score", None, score_dtype, x.q.device)
    return x.replace(score_mod=modifier, score_captures=captures)
