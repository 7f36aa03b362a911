"""Pictures of masks: what is visible, and which blocks a block-sparse backend computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from .block_mask import FULL, PARTIAL, create_block_sparse
from .trace import trace

Tensor = torch.Tensor

#: Most pixels along an axis of the picture of a mask, and most (batch, head) pairs shown.
_PIXELS = 512
_PAIRS = 12


def show(
    mask_mod: Any,
    B: int,
    H: int,
    Sq: int,
    Sk: int,
    *,
    path: str | os.PathLike[str],
    block_size: tuple[int, int] = (128, 128),
    device: torch.device | str = "cpu",
    aux_tensors: Sequence[Tensor] | None = None,
) -> None:
    """Draw `mask_mod` over B batches, H heads, Sq queries and Sk keys, and save the picture.

    Each (batch, head) on which the mask depends, up to 12 of them, gets two panels: the map of absent, partial and
    full blocks, and the mask itself, a sample of its pairs where there are more than 512 along an axis.

    Args:
        path: file to write; its ending says the format, as for matplotlib's `savefig` (png, svg, pdf).
        block_size, device, aux_tensors: as for `create_block_sparse`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a size of 0, of which there is nothing to see.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("show: expected matplotlib, which is not installed; pip install matplotlib") from error
    if 0 in (B, H, Sq, Sk):
        raise ValueError(f"show: expected sizes of at least 1, got B={B}, H={H}, Sq={Sq}, Sk={Sk}")
    blocks = create_block_sparse(mask_mod, B, H, Sq, Sk, block_size, device, aux_tensors).dense()
    rows, columns = _sample(Sq, device), _sample(Sk, device)
    pairs = [(b, h) for b in range(blocks.shape[0]) for h in range(blocks.shape[1])][:_PAIRS]
    modifier, captures = trace(mask_mod, "mask", aux_tensors, device=device)

    figure = Figure(figsize=(8, 4 * len(pairs)), layout="constrained")
    panels = figure.subplots(len(pairs), 2, squeeze=False)
    colors = ListedColormap(["#ffffff", "#9ecae1", "#08519c"])
    extent = (0, Sk, Sq, 0)
    for (left, right), (b, h) in zip(panels, pairs, strict=True):
        batch, head = torch.tensor([b], device=device), torch.tensor([h], device=device)
        mask = modifier.apply_mask(batch, head, rows, columns, captures)[0, 0]
        for panel, values, highest in ((left, blocks[b, h], FULL), (right, mask, 1)):
            image = panel.imshow(values.cpu().numpy(), cmap=colors, vmin=0, vmax=highest, aspect="auto", extent=extent)
            image.set_interpolation("nearest")
            panel.set(xlabel="key", ylabel="query")
        partial, full = (int((blocks[b, h] == state).sum()) for state in (PARTIAL, FULL))
        size = "x".join(map(str, block_size))
        left.set_title(f"blocks of {size}: {full} full, {partial} partial, of {blocks[b, h].numel()}")
        right.set_title("mask" + _which(blocks, b, h))
    figure.savefig(os.fspath(path))


def _sample(size: int, device: torch.device | str) -> Tensor:
    """Return up to _PIXELS evenly spaced positions."""
    pixels = min(size, _PIXELS)
    return (torch.arange(pixels, device=device) * size + size // 2) // pixels


def _which(blocks: Tensor, b: int, h: int) -> str:
    words = [f"batch {b}"] * (blocks.shape[0] > 1) + [f"head {h}"] * (blocks.shape[1] > 1)
    return f" ({', '.join(words)})" if words else ""
