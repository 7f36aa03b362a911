"""Problems: built from lengths and layouts, with NaN in every slot that must not be read."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tilewise.backends.cpu import sequences
from tilewise.backends.cpu.reference import _rows
from tilewise.problem import AttentionInputs

Tensor = torch.Tensor


def problem(
    len_q: Sequence[int] = (40, 40),
    len_k: Sequence[int] = (40, 40),
    *,
    heads: int = 4,
    heads_kv: int = 2,
    dim: int = 16,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    layout_q: str = "dense",
    layout_k: str = "dense",
    slack: int = 3,
    used: bool = False,
    page_size: int = 4,
    seed: int = 0,
    poison: bool = True,
    device: torch.device | str = "cpu",
    **options: Any,
) -> AttentionInputs:
    """Return a call whose sequences have the given lengths, with NaN around them.

    Args:
        layout_q: "dense" or "packed". Dense sequences of unequal lengths get seqused_q.
        layout_k: "dense", "packed" or "paged".
        slack: packed: rows after the last sequence; paged: pages nobody uses.
        used: leave room after each packed sequence too, and say with seqused where it begins.
        options: further fields of AttentionInputs.
    """
    g = torch.Generator().manual_seed(seed)
    dim_v = dim if dim_v is None else dim_v
    q, lay_q = _storage(len_q, layout_q, (heads, dim), slack, used, page_size, g)
    k, lay_k = _storage(len_k, layout_k, (heads_kv, dim), slack, used, page_size, g)
    v = torch.randn(*k.shape[:-1], dim_v, generator=g)
    named = {f"{name}_q": t for name, t in lay_q.items()} | {
        name if name == "page_table" else f"{name}_k": t for name, t in lay_k.items()
    }
    call = AttentionInputs(
        q.to(dtype), k.to(dtype), v.to(dtype), options.pop("softmax_scale", dim**-0.5), **named, **options
    )
    if poison:
        poison_unused(call)
    return move(call, device)


def _storage(
    lengths: Sequence[int],
    layout: str,
    tail: tuple[int, int],
    slack: int,
    used: bool,
    page_size: int,
    g: torch.Generator,
) -> tuple[Tensor, dict[str, Tensor]]:
    count = torch.tensor(lengths, dtype=torch.int32)
    longest = max(lengths, default=0)
    if layout == "dense":
        extra = {} if all(n == longest for n in lengths) and not used else {"seqused": count}
        room = longest + (slack if used else 0)
        return torch.randn(len(lengths), room, *tail, generator=g), extra
    if layout == "packed":
        steps = count + (slack if used else 0)
        edges = torch.cat([torch.zeros(1), steps.cumsum(0)]).to(torch.int32)
        extra = {"cu_seqlens": edges} | ({"seqused": count} if used else {})
        return torch.randn(int(edges[-1]) + slack, *tail, generator=g), extra
    each = -(-longest // page_size)
    pages = len(lengths) * each + slack
    table = torch.randperm(pages, generator=g)[: len(lengths) * each].view(len(lengths), each).to(torch.int32)
    for row, n in zip(table, lengths, strict=True):
        row[-(-n // page_size) :] = -1
    return torch.randn(pages, page_size, *tail, generator=g), {"page_table": table, "seqused": count}


def unused_rows(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return bool masks over the leading dims of q and of k: the slots of no sequence."""
    found = []
    for t, *layout in ((x.q, x.cu_seqlens_q, x.seqused_q), (x.k, x.cu_seqlens_k, x.seqused_k, x.page_table)):
        rows, _ = _rows(t, *layout)
        used = torch.zeros(t.shape[:-2].numel() + 1, dtype=torch.bool)
        used[rows.flatten()] = True
        found.append(~used[:-1].view(t.shape[:-2]))
    return found[0], found[1]


def poison_unused(x: AttentionInputs) -> None:
    """Fill every slot that no sequence uses with NaN."""
    off_q, off_k = unused_rows(x)
    x.q[off_q] = torch.nan
    x.k[off_k] = torch.nan
    x.v[off_k] = torch.nan


def move(x: AttentionInputs, device: torch.device | str) -> AttentionInputs:
    """Return the call with every tensor on `device`."""
    changes: dict[str, Any] = {name: t.to(device) for name, t in x.tensors().items()}
    changes["score_captures"] = tuple(t.to(device) for t in x.score_captures)
    changes["mask_captures"] = tuple(t.to(device) for t in x.mask_captures)
    if x.block_sparse is not None:
        lists = x.block_sparse
        changes["block_sparse"] = lists._replace(**{name: t.to(device) for name, t in lists.tensors().items()})
    return x.replace(**changes)


def gradients_of(x: AttentionInputs, seed: int = 1, lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return random gradients of out and, if asked for, of lse; NaN-free, also in unused rows."""
    g = torch.Generator().manual_seed(seed)
    dout = torch.randn(x.out_shape, generator=g).to(x.q.dtype).to(x.q.device)
    return dout, torch.randn(x.lse_shape, generator=g).to(x.lse_dtype).to(x.q.device) if lse else None


@contextlib.contextmanager
def tiles(rows: int, columns: int, elements: int) -> Iterator[None]:
    """Give the CPU backend small tiles, so that small problems have many."""
    names = ("TILE_ROWS", "TILE_COLUMNS", "WIDE_COLUMNS", "TILE_ELEMENTS")
    before = [getattr(sequences, name) for name in names]
    for name, value in zip(names, (rows, columns, columns, elements), strict=True):
        setattr(sequences, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(sequences, name, value)
