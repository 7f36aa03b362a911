"""Modifications of attention, written once as PyTorch functions: score_mod, mask_mod, and block sparsity.

    from tilewise import flash_attn_func, mods

    packed = mods.and_masks(mods.causal(), mods.document(ids))
    out, lse = flash_attn_func(q, k, v, score_mod=mods.alibi(slopes), mask_mod=packed)

Any pointwise function does as well: `library` has the common ones, `trace` says what such a function may do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .block_mask import BlockSparseTensors, create_block_sparse, from_block_mask
from .library import (
    alibi,
    alibi_slopes,
    and_masks,
    causal,
    dilated,
    document,
    not_masks,
    or_masks,
    prefix_lm,
    relative_bias,
    sliding_window,
    softcap,
)
from .show import show
from .trace import Modifier, TracedMod
from .trace import trace as _trace

__all__ = [
    "BlockSparseTensors",
    "Modifier",
    "TracedMod",
    "alibi",
    "alibi_slopes",
    "and_masks",
    "causal",
    "create_block_sparse",
    "dilated",
    "document",
    "from_block_mask",
    "mask_mod",
    "not_masks",
    "or_masks",
    "prefix_lm",
    "relative_bias",
    "score_mod",
    "show",
    "sliding_window",
    "softcap",
]


def score_mod(fn: Callable[..., Any], aux_tensors: Sequence[torch.Tensor] | None = None) -> TracedMod:
    """Trace a score_mod once, for use wherever the function is accepted, `torch.compile` included.

    Args:
        fn: pointwise function of (score, b, h, q_idx, kv_idx) and, if `aux_tensors` are given, their list.

    Raises:
        TypeError, ValueError, UnsupportedError: as `tilewise.mods.trace.trace`.
    """
    return TracedMod(*_trace(fn, "score", aux_tensors))


def mask_mod(fn: Callable[..., Any], aux_tensors: Sequence[torch.Tensor] | None = None) -> TracedMod:
    """Trace a mask_mod once, for use wherever the function is accepted, `torch.compile` included.

    Args:
        fn: pointwise function of (b, h, q_idx, kv_idx) and, if `aux_tensors` are given, their list.

    Raises:
        TypeError, ValueError, UnsupportedError: as `tilewise.mods.trace.trace`.
    """
    return TracedMod(*_trace(fn, "mask", aux_tensors))
