"""Ready-made modifications. Each function returns a score_mod or mask_mod for `flash_attn_func` and its kin.

Positions are those within the sequence. A mask_mod takes the place of `causal` and `window_size`, which align queries
to the end of the keys; a mask_mod sees positions only, not lengths. So these align query i with key i + offset: the
default 0 is right where both sequences are of one length, `offset = Sk - Sq` aligns their ends. An offset given as a
rank-0 integer tensor may change from call to call without another trace.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from ..errors import wrong_type, wrong_value

Tensor = torch.Tensor
Offset = int | Tensor
Mod = Callable[..., Tensor]


# ---- masks
def causal(offset: Offset = 0) -> Mod:
    """Return a mask_mod: keys up to the query's own position, j <= i + offset."""
    _check_offset(offset)

    def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + offset

    return causal_mask


def sliding_window(left: int | None, right: int | None = 0, offset: Offset = 0) -> Mod:
    """Return a mask_mod: i + offset - left <= j <= i + offset + right, both ends inclusive; None is unbounded.

    `sliding_window(W - 1)` keeps the last W keys, the query's own included.

    Raises:
        ValueError: left + right < 0, which leaves no key to any query.
    """
    _check_offset(offset)
    for name, bound in (("left", left), ("right", right)):
        if bound is not None:
            _check_int(name, bound)
    if left is not None and right is not None and left + right < 0:
        raise wrong_value("left, right", "left + right >= 0", f"{left} + {right}")

    def window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = kv_idx - (q_idx + offset)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            visible = visible & (distance >= -left)
        if right is not None:
            visible = visible & (distance <= right)
        return visible

    return window_mask


def prefix_lm(prefix_length: int | Tensor, offset: Offset = 0) -> Mod:
    """Return a mask_mod: every query sees the first `prefix_length` keys, and all up to its own position.

    Args:
        prefix_length: one length, or integer lengths per batch entry of shape (B,).
    """
    _check_offset(offset)
    if isinstance(prefix_length, Tensor):
        _check_integers("prefix_length", prefix_length, (0, 1))
    else:
        _check_int("prefix_length", prefix_length)

    def prefix_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        per_batch = isinstance(prefix_length, Tensor) and prefix_length.dim() == 1
        length = prefix_length[b] if per_batch else prefix_length  # type: ignore[index]
        return (kv_idx < length) | (kv_idx <= q_idx + offset)

    return prefix_mask


def document(ids: Tensor, ids_kv: Tensor | None = None) -> Mod:
    """Return a mask_mod: a query sees the keys of its own document.

    Args:
        ids: integer document of each query, (Sq,) or (B, Sq).
        ids_kv: integer document of each key, (Sk,) or (B, Sk); by default `ids`.
    """
    _check_integers("ids", ids, (1, 2))
    keys = ids if ids_kv is None else ids_kv
    _check_integers("ids_kv", keys, (1, 2))

    def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        of_query = ids[q_idx] if ids.dim() == 1 else ids[b, q_idx]
        return of_query == (keys[kv_idx] if keys.dim() == 1 else keys[b, kv_idx])

    return document_mask


def dilated(window: int, dilation: int, offset: Offset = 0) -> Mod:
    """Return a mask_mod: `window` keys `dilation` apart, going back from the query's own (which is the first).

    Source: I. Beltagy et al., "Longformer", 2020, section 3.1.

    Raises:
        ValueError: window or dilation below 1.
    """
    _check_offset(offset)
    for name, size in (("window", window), ("dilation", dilation)):
        _check_int(name, size)
        if size < 1:
            raise wrong_value(name, "at least 1", str(size))

    def dilated_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        back = q_idx + offset - kv_idx
        return (back >= 0) & (back < window * dilation) & (back % dilation == 0)

    return dilated_mask


def and_masks(*masks: Mod) -> Mod:
    """Return the mask_mod that is visible where all of `masks` are; everywhere if there are none."""
    _check_masks(masks)

    def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *aux: Any) -> Tensor:
        everywhere = torch.ones_like(q_idx, dtype=torch.bool)
        return reduce(operator.and_, [mask(b, h, q_idx, kv_idx, *aux) for mask in masks] or [everywhere])

    return and_mask


def or_masks(*masks: Mod) -> Mod:
    """Return the mask_mod that is visible where any of `masks` is; nowhere if there are none."""
    _check_masks(masks)

    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *aux: Any) -> Tensor:
        nowhere = torch.zeros_like(q_idx, dtype=torch.bool)
        return reduce(operator.or_, [mask(b, h, q_idx, kv_idx, *aux) for mask in masks] or [nowhere])

    return or_mask


def not_masks(*masks: Mod) -> Mod:
    """Return the mask_mod that is visible where none of `masks` is."""
    either = or_masks(*masks)

    def not_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *aux: Any) -> Tensor:
        return ~either(b, h, q_idx, kv_idx, *aux)

    return not_mask


# ---- scores
def alibi(slopes: Tensor, offset: Offset = 0) -> Mod:
    """Return a score_mod: s - slopes[h] * |i + offset - j|. Gradients flow to `slopes`.

    Source: O. Press et al., "Train Short, Test Long", 2021.

    Args:
        slopes: floating (H,); `alibi_slopes(H)` gives the paper's.
    """
    _check_offset(offset)
    _check_floating("slopes", slopes, (1,))

    def alibi_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx + offset - kv_idx).abs()

    return alibi_score


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return the slopes of the ALiBi paper, fp32 (heads,): 2^(-8/n), 2^(-16/n), ... for n = heads a power of two.

    For other numbers of heads, as its authors do: those of the power of two below, then every other one of the power
    of two above.
    """
    _check_int("heads", heads)
    if heads < 1:
        raise wrong_value("heads", "at least 1", str(heads))
    below = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    slopes += [2 ** (-8 * (2 * i + 1) / (2 * below)) for i in range(heads - below)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def relative_bias(table: Tensor, offset: Offset = 0) -> Mod:
    """Return a score_mod: s + table[..., R + clamp(j - i - offset, -R, R)]. Gradients flow to `table`.

    Source: P. Shaw et al., "Self-Attention with Relative Position Representations", 2018, as a bias per head.

    Args:
        table: floating (H, 2R + 1), or (2R + 1,) for all heads.

    Raises:
        ValueError: an even number of distances.
    """
    _check_offset(offset)
    _check_floating("table", table, (1, 2))
    if table.shape[-1] % 2 == 0:
        raise wrong_value("table", "an odd last dimension 2R + 1", f"shape {tuple(table.shape)}")
    reach = table.shape[-1] // 2

    def relative_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = (kv_idx - q_idx - offset).clamp(-reach, reach) + reach
        return score + (table[place] if table.dim() == 1 else table[h, place])

    return relative_score


def softcap(value: float) -> Mod:
    """Return a score_mod: value * tanh(s / value). The argument `softcap` of the functions does the same.

    Source: Gemma Team, "Gemma 2", 2024, section 2.

    Raises:
        ValueError: value not positive.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_type("value", "a float", value)
    if not value > 0:
        raise wrong_value("value", "a positive number", str(value))

    def softcap_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return value * torch.tanh(score / value)

    return softcap_score


# ---- checks
def _check_int(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(name, "an int", value)


def _check_offset(offset: Any) -> None:
    if isinstance(offset, Tensor):
        _check_integers("offset", offset, (0,))
    else:
        _check_int("offset", offset)


def _check_tensor(name: str, t: Any, ranks: tuple[int, ...], kind: str) -> None:
    if not isinstance(t, Tensor):
        raise wrong_type(name, f"a tensor of {kind}", t)
    if t.dim() not in ranks:
        raise wrong_value(name, f"rank {' or '.join(map(str, ranks))}", f"shape {tuple(t.shape)}")


def _check_integers(name: str, t: Any, ranks: tuple[int, ...]) -> None:
    _check_tensor(name, t, ranks, "integers")
    if t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool:
        raise wrong_type(name, "a tensor of integers", t)


def _check_floating(name: str, t: Any, ranks: tuple[int, ...]) -> None:
    _check_tensor(name, t, ranks, "floating-point numbers")
    if not t.dtype.is_floating_point:
        raise wrong_type(name, "a tensor of floating-point numbers", t)


def _check_masks(masks: tuple[Any, ...]) -> None:
    for mask in masks:
        if not callable(mask):
            raise wrong_type("masks", "mask functions of (b, h, q_idx, kv_idx)", mask)
