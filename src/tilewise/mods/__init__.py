"""Modifications of attention, written once as PyTorch functions: score_mod, mask_mod, and block sparsity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .block_mask import BlockSparseTensors, create_block_sparse, from_block_mask
from .trace import Modifier, TracedMod
from .trace import trace as _trace

__all__ = [
    "BlockSparseTensors",
    "Modifier",
    "TracedMod",
    "create_block_sparse",
    "from_block_mask",
    "mask_mod",
    "score_mod",
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
