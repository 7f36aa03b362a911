"""Every check of user arguments. Nothing is allocated or written before these end, and no GPU is synchronised.

Types and dtypes raise TypeError; shapes, sizes, devices, values and combinations raise ValueError.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .errors import wrong_type, wrong_value
from .problem import UNBOUNDED, AttentionInputs

Tensor = torch.Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256


def check_tensor(name: str, value: Any, rank: int, layout: str, like: Tensor | None = None) -> None:
    """Require a tensor of `rank` dimensions and, with `like`, of its device."""
    if not isinstance(value, Tensor):
        raise wrong_type(name, f"a tensor of shape {layout}", value)
    if value.dim() != rank:
        raise wrong_value(name, f"shape {layout}", f"shape {tuple(value.shape)}")
    if like is not None and value.device != like.device:
        raise wrong_value(name, f"device {like.device} as q", f"{value.device}")


def check_index(name: str, value: Any, shape: tuple[int, ...], layout: str, like: Tensor) -> None:
    """Require an int32 tensor of `shape`; -1 in it leaves that size free."""
    check_tensor(name, value, len(shape), layout, like)
    if value.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, got {value.dtype}")
    for n, expected in zip(value.shape, shape, strict=True):
        if expected not in (-1, n):
            raise wrong_value(name, f"shape {layout} = {shape}", f"shape {tuple(value.shape)}")


def check_flag(name: str, value: Any, optional: bool = False) -> None:
    """Require a bool, or None where `optional`."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise wrong_type(name, "a bool" + (" or None" if optional else ""), value)


def check_number(name: str, value: Any, low: float | None = None) -> None:
    """Require a finite real number, at least `low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise wrong_type(name, "a number", value)
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        # Comparisons, not math.isfinite: Dynamo traces these.
        if not -math.inf < value < math.inf or (low is not None and value < low):
            raise wrong_value(name, "a finite number" + ("" if low is None else f" of at least {low:g}"), repr(value))


def check_count(name: str, value: Any, low: int = 0) -> None:
    """Require an int of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise wrong_type(name, "an int", value)
    if value < low:
        raise wrong_value(name, f"an int of at least {low}", repr(value))


def check_window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """Return (left, right) as given, after checking them."""
    if not isinstance(window_size, (tuple, list)):
        raise wrong_type("window_size", "a pair (left, right)", window_size)
    if len(window_size) != 2:
        raise wrong_value("window_size", "a pair (left, right)", f"{len(window_size)} entries: {window_size!r}")
    for side, bound in zip(("left", "right"), window_size, strict=True):
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)):
            raise wrong_type(f"window_size {side}", "an int or None", bound)
        if not isinstance(bound, torch.SymInt) and not -UNBOUNDED <= bound <= UNBOUNDED:
            raise wrong_value(f"window_size {side}", "a bound from -(2^31 - 1) to 2^31 - 1", repr(bound))
    left, right = (None if bound == -1 else bound for bound in window_size)
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        raise wrong_value("window_size", "left + right of at least 0, else no key is visible", f"{window_size!r}")
    return left, right


def check_qkv(
    q: Any, k: Any, v: Any, packed_q: bool, packed_k: bool, paged: bool, names: tuple[str, str] = ("k", "v")
) -> None:
    """Check q, k and v against each other; `names` are what the caller calls k and v."""
    k_name, v_name = names
    q_layout = "(total_q, H, D)" if packed_q else "(B, Sq, H, D)"
    k_layout = "(num_pages, page_size, Hk, {})" if paged else "(total_k, Hk, {})" if packed_k else "(B, Sk, Hk, {})"
    check_tensor("q", q, 3 if packed_q else 4, q_layout)
    check_tensor(k_name, k, 3 if packed_k else 4, k_layout.format("D"), q)
    check_tensor(v_name, v, 3 if packed_k else 4, k_layout.format("Dv"), q)
    if q.dtype not in DTYPES:
        raise TypeError(f"q: expected dtype float16, bfloat16, float32 or float64, got {q.dtype}")
    for name, t in ((k_name, k), (v_name, v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as in q, got {t.dtype}")
    for name, t in (("q", q), (v_name, v)):
        d = t.shape[-1]
        if d % 8 or d > MAX_HEAD_DIM or d == 0:
            raise wrong_value(
                name, f"a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}", f"{d} (shape {tuple(t.shape)})"
            )
    if k.shape[-1] != q.shape[-1]:
        raise wrong_value(k_name, f"head_dim {q.shape[-1]} as in q", f"{k.shape[-1]} (shape {tuple(k.shape)})")
    if v.shape[:-1] != k.shape[:-1]:
        raise wrong_value(v_name, f"leading sizes {tuple(k.shape[:-1])} as in {k_name}", f"{tuple(v.shape[:-1])}")
    heads, heads_kv = q.shape[-2], k.shape[-2]
    if heads == 0 or heads_kv == 0:
        raise wrong_value("q" if heads == 0 else k_name, "at least one head", "0")
    if heads % heads_kv:
        raise wrong_value("q", f"a number of heads that is a multiple of the {heads_kv} heads of {k_name}", f"{heads}")
    if not packed_q and not packed_k and not paged and q.shape[0] != k.shape[0]:
        raise wrong_value(k_name, f"batch {q.shape[0]} as in q", f"{k.shape[0]} (shape {tuple(k.shape)})")


def check_lengths(x: AttentionInputs) -> None:
    """Check cu_seqlens, seqused and page_table: shapes, dtypes, devices and how they combine."""
    q, k = x.q, x.k
    batch = -1
    for name, t in (("cu_seqlens_q", x.cu_seqlens_q), ("cu_seqlens_k", x.cu_seqlens_k)):
        if t is not None:
            check_index(name, t, (-1,), "(B + 1,)", q)
            if t.shape[0] == 0:
                raise wrong_value(name, "shape (B + 1,), at least one entry", "shape (0,)")
    if x.cu_seqlens_q is not None:
        batch = x.cu_seqlens_q.shape[0] - 1
    else:
        batch = q.shape[0]
    if x.cu_seqlens_k is not None and x.page_table is not None:
        raise wrong_value("page_table", "no cu_seqlens_k beside it", "both")
    if x.cu_seqlens_k is not None and x.cu_seqlens_k.shape[0] - 1 != batch:
        raise wrong_value(
            "cu_seqlens_k", f"shape ({batch + 1},) for {batch} sequences", f"{tuple(x.cu_seqlens_k.shape)}"
        )
    if x.cu_seqlens_k is None and x.page_table is None and k.shape[0] != batch:
        raise wrong_value("k", f"batch {batch} as in q", f"{k.shape[0]} (shape {tuple(k.shape)})")
    for name, t in (("seqused_q", x.seqused_q), ("seqused_k", x.seqused_k)):
        if t is not None:
            check_index(name, t, (batch,), "(B,)", q)
    if x.page_table is not None:
        check_index("page_table", x.page_table, (batch, -1), "(B, max_pages)", q)
        if x.seqused_k is None:
            raise wrong_value("page_table", "seqused_k beside it", "none")
        if k.shape[1] == 0:
            raise wrong_value("k", "a page_size of at least 1", f"0 (shape {tuple(k.shape)})")


def check_values(x: AttentionInputs) -> None:
    """Read cu_seqlens, seqused, page_table and block lists and check what they say. Synchronises on a GPU."""
    for name, t, total in (
        ("cu_seqlens_q", x.cu_seqlens_q, x.q.shape[0]),
        ("cu_seqlens_k", x.cu_seqlens_k, x.k.shape[0]),
    ):
        if t is None:
            continue
        starts = t.tolist()
        if starts[0] != 0 or any(b < a for a, b in zip(starts, starts[1:], strict=False)):
            raise wrong_value(name, "non-decreasing from 0", f"{starts[:8]}")
        if starts[-1] > total:
            raise wrong_value(name, f"a last entry of at most {total}, the rows there are", f"{starts[-1]}")
    capacity = x.k.shape[1] * x.page_table.shape[1] if x.page_table is not None else x.k.shape[1]
    used = []
    for name, t, cu, room in (
        ("seqused_q", x.seqused_q, x.cu_seqlens_q, x.q.shape[1]),
        ("seqused_k", x.seqused_k, x.cu_seqlens_k, capacity),
    ):
        if t is None:
            continue
        rooms = [room] * t.shape[0] if cu is None else cu.diff().tolist()
        used = t.tolist()
        for i, (n, most) in enumerate(zip(used, rooms, strict=True)):
            if not 0 <= n <= most:
                raise wrong_value(name, f"lengths from 0 to {most}, the room of sequence {i}", f"{n}")
    if x.page_table is not None:
        page_size, pages = x.k.shape[1], x.k.shape[0]
        for row, n in zip(x.page_table.tolist(), used, strict=True):
            for page in row[: -(-n // page_size)]:
                if not 0 <= page < pages:
                    raise wrong_value(
                        "page_table", f"page numbers from 0 to {pages - 1} within the used length", f"{page}"
                    )
    if x.block_sparse is not None:
        check_block_values(x)


def check_sink(sink: Any, q: Tensor) -> None:
    """Check the learnable sink."""
    if sink is None:
        return
    check_tensor("learnable_sink", sink, 1, "(H,)", q)
    if sink.dtype not in (torch.bfloat16, torch.float32, q.dtype):
        raise TypeError(f"learnable_sink: expected bfloat16, float32 or the dtype of q, got {sink.dtype}")
    if sink.shape[0] != q.shape[-2]:
        raise wrong_value("learnable_sink", f"shape ({q.shape[-2]},), one per query head", f"{tuple(sink.shape)}")


def check_blocks(sparse: Any, x: AttentionInputs) -> None:
    """Check block-sparse lists against the sizes of the call."""
    bm, bn = sparse.block_size
    for n in (bm, bn):
        check_count("block_size", n, 1)
    if (sparse.full_block_cnt is None) != (sparse.full_block_idx is None):
        raise wrong_value("full_block_cnt", "full_block_idx beside it, or neither", "one of them")
    n_q, n_k = -(-x.capacity_q // bm), -(-x.capacity_k // bn)
    for name, t in sparse.tensors().items():
        shape = (-1, -1, -1) if name.endswith("cnt") else (-1, -1, -1, -1)
        check_index(name, t, shape, "(B|1, H|1, nQ)" if len(shape) == 3 else "(B|1, H|1, nQ, nK)", x.q)
        for axis, n, most in (("B", t.shape[0], x.batch), ("H", t.shape[1], x.heads)):
            if n not in (1, most):
                raise wrong_value(name, f"{axis} of 1 or {most}", f"{n} (shape {tuple(t.shape)})")
        if t.shape[2] < n_q:
            raise wrong_value(name, f"{n_q} blocks of {bm} queries", f"{t.shape[2]} (shape {tuple(t.shape)})")
        if len(shape) == 4 and x.cu_seqlens_k is None and x.page_table is None and t.shape[3] > max(n_k, 1):
            raise wrong_value(name, f"at most {n_k} blocks of {bn} keys", f"{t.shape[3]} (shape {tuple(t.shape)})")


def check_block_values(x: AttentionInputs) -> None:
    """Read block lists: counts within the lists, and key blocks that exist. Repeated blocks are legal."""
    sparse = x.block_sparse
    if sparse is None:
        return
    lists = sparse.tensors()
    # Packed and paged keys: lists made for a longer capacity are legal; blocks past a sequence's end are empty.
    open_ended = x.cu_seqlens_k is not None or x.page_table is not None
    most = UNBOUNDED if open_ended else -(-x.capacity_k // sparse.block_size[1]) - 1
    rows = -(-x.capacity_q // sparse.block_size[0])
    for kind in ("mask", "full"):
        if f"{kind}_block_cnt" not in lists:
            continue
        count, index = lists[f"{kind}_block_cnt"][:, :, :rows], lists[f"{kind}_block_idx"][:, :, :rows]
        room = index.shape[3]
        for n in _outside(count, room):
            raise wrong_value(f"{kind}_block_cnt", f"counts from 0 to {room}, the room of {kind}_block_idx", f"{n}")
        listed = torch.arange(room, device=index.device) < count[..., None]
        # A list that serves all batch entries or heads is in use wherever any of them counts it.
        index, listed = torch.broadcast_tensors(index, listed)  # type: ignore[no-untyped-call]
        for n in _outside(index[listed], most):
            rule = "key blocks of at least 0" if open_ended else f"key blocks from 0 to {most}"
            raise wrong_value(f"{kind}_block_idx", f"{rule} within the counts", f"{n}")


def _outside(t: Tensor, most: int) -> list[int]:
    """Return one value of `t` that is not from 0 to `most`, if there is any."""
    if not t.numel():
        return []
    low, high = (int(n) for n in t.aminmax())
    return [low] if low < 0 else [high] if high > most else []


def check_buffer(name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> None:
    """Check a buffer that a result is written into."""
    check_tensor(name, t, len(shape), str(shape), like)
    if t.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {t.dtype}")
    if tuple(t.shape) != tuple(shape):
        raise wrong_value(name, f"shape {tuple(shape)}", f"{tuple(t.shape)}")
    if any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True)):
        raise wrong_value(name, "memory of its own for each element", f"broadcast strides {t.stride()}")
