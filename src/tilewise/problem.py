"""What is computed: the static problem, the sizes, and the arguments of one call.

Four things are kept apart, since they change at different rates and meet different readers:

* `AttentionProblem`: what is computed. Static: dtypes, head dims, which features are present, how tensors lie.
  No sizes and no values: a new window, scale, softcap or length never makes a new problem.
* `Extents`: how much. Sizes, for planners.
* `AttentionInputs`: one call, normalised: the tensors and the values a backend reads.
* `Modifier` (in `tilewise.mods`): a user's score_mod or mask_mod, traced.

Equal meaning gives an equal problem: softcap 0 is no softcap, a bound wider than any length is no bound,
`causal` is a right bound of 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .mods.block_mask import BlockSparseTensors
    from .mods.trace import Modifier

Tensor = torch.Tensor

#: Window bounds at or beyond this are no bounds at all: no sequence is longer.
UNBOUNDED = 2**31 - 1


@dataclass(frozen=True)
class TensorSig:
    """How a tensor lies in memory, as far as generated code could care.

    Attributes:
        dtype: element type, e.g. "bfloat16".
        rank: number of dimensions.
        broadcast: dimensions of stride 0 and size above 1.
        aligned: base address and all outer strides are multiples of 16 bytes, last dimension of stride 1.
        wide: some element lies 2^31 or more elements from the first, so offsets need 64 bits.
    """

    dtype: str
    rank: int
    broadcast: tuple[int, ...]
    aligned: bool
    wide: bool

    @classmethod
    def of(cls, t: Tensor) -> TensorSig:
        """Describe `t`. Dimensions of size 1 have no stride worth keeping."""
        shape, stride, size = t.shape, t.stride(), t.element_size()
        outer = [s for n, s in zip(shape[:-1], stride[:-1], strict=True) if n > 1]
        unit = t.dim() > 0 and (shape[-1] <= 1 or stride[-1] == 1)
        base = 0 if t.device.type == "meta" or t.numel() == 0 else t.data_ptr()
        return cls(
            dtype=str(t.dtype).removeprefix("torch."),
            rank=t.dim(),
            broadcast=tuple(i for i, (n, s) in enumerate(zip(shape, stride, strict=True)) if n > 1 and s == 0),
            aligned=unit and base % 16 == 0 and all(s * size % 16 == 0 for s in outer),
            wide=sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n > 0) >= 2**31,
        )


@dataclass(frozen=True)
class AttentionProblem:
    """What is computed, without sizes or values. Equal meaning gives an equal object.

    `left`/`right` say which side of the window is bounded. The digests identify modifiers by what they compute.
    """

    direction: str  # "forward" | "backward"
    dtype: str
    head_dim: int
    head_dim_v: int
    grouped: bool  # fewer K/V heads than query heads
    q: TensorSig
    k: TensorSig
    v: TensorSig
    packed_q: bool = False
    packed_k: bool = False
    paged: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    left: bool = False
    right: bool = False
    softcap: bool = False
    sink: str | None = None  # dtype of the sink
    score_mod: str | None = None  # digest
    mask_mod: str | None = None  # digest
    captures: tuple[TensorSig, ...] = ()
    block_size: tuple[int, int] | None = None  # of block-sparse lists, if any
    full_blocks: bool = False  # the lists name wholly visible blocks too
    split: bool = False  # more than one partial result may be asked for
    pack_gqa: bool | None = None
    deterministic: bool = False
    lse_gradient: bool = False

    def __str__(self) -> str:
        """Say in one line what is out of the ordinary: the text users paste into issues."""
        words = [self.direction, self.dtype, f"d={self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            words.append(f"dv={self.head_dim_v}")
        if self.left or self.right:
            words.append("window=" + ("left" if self.left else "") + ("right" if self.right else ""))
        for name in ("score_mod", "mask_mod"):
            if digest := getattr(self, name):
                words.append(f"{name}={digest[:8]}")
        if self.block_size:
            words.append("blocks=%dx%d" % self.block_size)
        words += [
            name
            for name in (
                "grouped packed_q packed_k paged seqused_q seqused_k softcap split deterministic lse_gradient".split()
            )
            if getattr(self, name)
        ]
        if self.sink:
            words.append(f"sink={self.sink}")
        return " ".join(words)


@dataclass(frozen=True)
class Extents:
    """How much is computed; what a planner may look at. `max_seqlen_*` are upper bounds for packed sequences."""

    batch: int
    heads: int
    heads_kv: int
    max_seqlen_q: int
    max_seqlen_k: int
    total_q: int
    page_size: int | None = None
    window_left: int | None = None
    window_right: int | None = None
    num_splits: int = 1


@dataclass(frozen=True)
class AttentionInputs:
    """One call after normalisation: everything a backend reads, and nothing it has to interpret.

    Shapes as in the public functions. `window_left`/`window_right` are None where unbounded; `causal` has become
    `window_right = 0`; both are None when a mask_mod is given. `softcap` is 0.0 when there is none.

    Attributes:
        score_captures, mask_captures: the tensors that the traced modifiers read, in the order of their graphs.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths of packed sequences, or None if the caller gave none.
        num_splits: as asked for: 0 leaves the choice to the backend.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softcap: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    sink: Tensor | None = None
    score_mod: Modifier | None = None
    mask_mod: Modifier | None = None
    score_captures: tuple[Tensor, ...] = ()
    mask_captures: tuple[Tensor, ...] = ()
    block_sparse: BlockSparseTensors | None = None
    num_splits: int = 1
    pack_gqa: bool | None = None
    deterministic: bool = False

    # ---- derived facts
    @property
    def batch(self) -> int:
        """Number of sequences."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[-2]

    @property
    def heads_kv(self) -> int:
        """Number of key/value heads."""
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // max(self.heads_kv, 1)

    @property
    def head_dim(self) -> int:
        """Size of a query or key."""
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        """Size of a value."""
        return self.v.shape[-1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of `out`: that of q with the head dim of v."""
        return (*self.q.shape[:-1], self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of `lse`: (B, H, Sq), or (H, total_q) for packed q."""
        if self.cu_seqlens_q is not None:
            return (self.heads, self.q.shape[0])
        return (self.q.shape[0], self.heads, self.q.shape[1])

    @property
    def lse_dtype(self) -> torch.dtype:
        """fp32; fp64 for fp64 inputs, so that a numerical gradient check can use it."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def capacity_k(self) -> int:
        """The most keys any one sequence can have, from shapes alone."""
        if self.page_table is not None:
            return self.page_table.shape[1] * self.k.shape[1]
        if self.cu_seqlens_k is not None:
            return self.k.shape[0] if self.max_seqlen_k is None else min(self.max_seqlen_k, self.k.shape[0])
        return self.k.shape[1]

    @property
    def capacity_q(self) -> int:
        """The most queries any one sequence can have, from shapes alone."""
        if self.cu_seqlens_q is not None:
            return self.q.shape[0] if self.max_seqlen_q is None else min(self.max_seqlen_q, self.q.shape[0])
        return self.q.shape[1]

    def problem(self, direction: str = "forward", lse_gradient: bool = False) -> AttentionProblem:
        """Return the static problem of this call."""
        captures = (*self.score_captures, *self.mask_captures)
        sparse = self.block_sparse
        return AttentionProblem(
            direction=direction,
            dtype=str(self.q.dtype).removeprefix("torch."),
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            grouped=self.heads != self.heads_kv,
            q=TensorSig.of(self.q),
            k=TensorSig.of(self.k),
            v=TensorSig.of(self.v),
            packed_q=self.cu_seqlens_q is not None,
            packed_k=self.cu_seqlens_k is not None,
            paged=self.page_table is not None,
            seqused_q=self.seqused_q is not None,
            seqused_k=self.seqused_k is not None,
            left=self.window_left is not None,
            right=self.window_right is not None,
            softcap=self.softcap != 0.0,
            sink=None if self.sink is None else str(self.sink.dtype).removeprefix("torch."),
            score_mod=None if self.score_mod is None else self.score_mod.digest,
            mask_mod=None if self.mask_mod is None else self.mask_mod.digest,
            captures=tuple(TensorSig.of(t) for t in captures),
            block_size=None if sparse is None else sparse.block_size,
            full_blocks=sparse is not None and sparse.full_block_cnt is not None,
            split=self.num_splits != 1,
            pack_gqa=self.pack_gqa,
            deterministic=self.deterministic,
            lse_gradient=lse_gradient,
        )

    def extents(self) -> Extents:
        """Return the sizes of this call."""
        return Extents(
            batch=self.batch,
            heads=self.heads,
            heads_kv=self.heads_kv,
            max_seqlen_q=self.capacity_q,
            max_seqlen_k=self.capacity_k,
            total_q=self.q.shape[0] if self.cu_seqlens_q is not None else self.q.shape[0] * self.q.shape[1],
            page_size=None if self.page_table is None else self.k.shape[1],
            window_left=self.window_left,
            window_right=self.window_right,
            num_splits=self.num_splits,
        )

    def replace(self, **changes: Any) -> AttentionInputs:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by field name (block lists and captures not included)."""
        return {f.name: t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}


@dataclass(frozen=True)
class Gradients:
    """What a backward returns. A gradient nobody asked for is None."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    sink: Tensor | None = None
    score_captures: tuple[Tensor | None, ...] = ()


def canonical_band(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """Return (left, right), None for unbounded: -1 and 2^31 - 1 or more are none, causal sets right = 0."""
    left = None if left is None or left == -1 or left >= UNBOUNDED else left
    right = None if right is None or right == -1 or right >= UNBOUNDED else right
    return left, 0 if causal else right
