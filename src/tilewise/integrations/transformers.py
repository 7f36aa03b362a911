"""tilewise as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from ..sdpa import scaled_dot_product_attention

Tensor = torch.Tensor


def register(name: str = "tilewise") -> str:
    """Register tilewise with transformers; use it with `attn_implementation=name`.

    The model's masks are made as for PyTorch's SDPA: None, or broadcastable to (B, H, Sq, Sk), bool or additive.

    Returns:
        `name`.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature of a transformers attention function.

    Args:
        query: (B, H, Sq, D). key, value: (B, Hk, Sk, D).
        attention_mask: bool or additive, broadcastable to (B, H, Sq, Sk); it holds causality too where there is any.

    Returns:
        out (B, Sq, H, D), and None for the weights, which are never formed.

    Raises:
        UnsupportedError: dropout while training, softcap or sinks beside this interface's mask.
    """
    if dropout > 0.0 and module.training:
        raise UnsupportedError(
            f"dropout: expected 0 while training, got {dropout}; set attention_dropout=0 in the config"
        )
    for option in ("softcap", "s_aux"):
        if kwargs.get(option) is not None:
            raise UnsupportedError(f"{option}: not supported by tilewise's transformers integration; use 'eager'")
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[-2]:
        attention_mask = attention_mask[..., : key.shape[-2]]
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal and attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2), None
