"""From the arguments of a public function to `AttentionInputs`: checked, and in canonical form.

Two steps, since a functional entry point checks its buffers between them: `sequences` takes the tensors that say what
attends to what, `Options.apply` everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import validation
from .errors import wrong_type, wrong_value
from .mods.block_mask import BlockSparseTensors
from .problem import AttentionInputs, canonical_band
from .settings import settings

Tensor = torch.Tensor
Window = tuple[int | None, int | None] | list[int | None]


def sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
) -> AttentionInputs:
    """Return a call without its options; q, k and v are checked against each other, the lengths by `Options.apply`."""
    validation.check_qkv(q, k, v, cu_seqlens_q is not None, cu_seqlens_k is not None, page_table is not None)
    return AttentionInputs(
        q=q,
        k=k,
        v=v,
        softmax_scale=0.0,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=length_bound("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=length_bound("max_seqlen_k", max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
    )


@dataclass(frozen=True)
class Options:
    """What a caller asks for beside the tensors, as given; `apply` checks it. Meanings as in `flash_attn_func`."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (None, None)
    learnable_sink: Tensor | None = None
    softcap: float = 0.0
    num_splits: int = 1
    pack_gqa: bool | None = None
    deterministic: bool = False
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    aux_tensors: Sequence[Tensor] | None = None
    block_sparse: BlockSparseTensors | None = None
    score_mod_bwd: Callable[..., Tensor] | None = None

    def apply(self, x: AttentionInputs) -> AttentionInputs:
        """Return `x` with these options, all of it checked."""
        self._check(x)
        traced = self._trace(x)
        left, right = (None, None) if self.mask_mod is not None else canonical_band(self.causal, *self.window_size)
        x = x.replace(
            softmax_scale=1.0 / math.sqrt(x.head_dim) if self.softmax_scale is None else self.softmax_scale,
            softcap=self.softcap,
            window_left=left,
            window_right=right,
            sink=self.learnable_sink,
            num_splits=self.num_splits,
            pack_gqa=self.pack_gqa,
            deterministic=self.deterministic,
            block_sparse=self.block_sparse,
            **traced,
        )
        if values_are_readable(x.q):
            validation.check_values(x)
        return x

    def _check(self, x: AttentionInputs) -> None:
        """Check types, shapes and combinations."""
        if self.softmax_scale is not None:
            validation.check_number("softmax_scale", self.softmax_scale)
        validation.check_flag("causal", self.causal)
        validation.check_window(self.window_size, self.causal and self.mask_mod is None)
        validation.check_sink(self.learnable_sink, x.q)
        validation.check_number("softcap", self.softcap, 0.0)
        validation.check_count("num_splits", self.num_splits)
        validation.check_flag("pack_gqa", self.pack_gqa, optional=True)
        validation.check_flag("deterministic", self.deterministic)
        validation.check_lengths(x)
        if self.score_mod is not None and self.softcap != 0.0:
            raise wrong_value("score_mod", "no softcap beside it", f"softcap {self.softcap!r}")
        if self.score_mod_bwd is not None:
            rule = "a @cute.jit score_mod beside it; the derivative of a torch score_mod is automatic"
            raise wrong_value("score_mod_bwd", rule, "one")
        if self.block_sparse is not None:
            if not isinstance(self.block_sparse, BlockSparseTensors):
                raise wrong_type("block_sparse_tensors", "a BlockSparseTensors", self.block_sparse)
            validation.check_blocks(self.block_sparse, x)
        if self.aux_tensors is not None:
            if not isinstance(self.aux_tensors, (list, tuple)):
                raise wrong_type("aux_tensors", "a list of tensors", self.aux_tensors)
            for i, t in enumerate(self.aux_tensors):
                if not isinstance(t, Tensor):
                    raise wrong_type(f"aux_tensors[{i}]", "a tensor", t)

    def _trace(self, x: AttentionInputs) -> dict[str, Any]:
        """Return the modifiers as graphs, and the tensors that they read, by field of `AttentionInputs`."""
        from .mods.trace import trace

        traced: dict[str, Any] = {}
        score_dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
        if self.score_mod is not None:
            modifier, captures = trace(self.score_mod, "score", self.aux_tensors, score_dtype, x.q.device)
            traced |= {"score_mod": modifier, "score_captures": captures}
        if self.mask_mod is not None:
            modifier, captures = trace(self.mask_mod, "mask", self.aux_tensors, score_dtype, x.q.device)
            traced |= {"mask_mod": modifier, "mask_captures": captures}
        return traced


def block_lists(
    given: BlockSparseTensors | None,
    mask_block_cnt: Tensor | None,
    mask_block_idx: Tensor | None,
    full_block_cnt: Tensor | None,
    full_block_idx: Tensor | None,
) -> BlockSparseTensors | None:
    """Return the block lists of a call that may name their four tensors one by one."""
    if mask_block_cnt is None and mask_block_idx is None and full_block_cnt is None and full_block_idx is None:
        return given
    if given is not None:
        raise wrong_value("block_sparse_tensors", "no block lists by name beside it", "both")
    if mask_block_cnt is None or mask_block_idx is None:
        raise wrong_value("mask_block_cnt", "mask_block_cnt and mask_block_idx with any block list", "none")
    return BlockSparseTensors(mask_block_cnt, mask_block_idx, full_block_cnt, full_block_idx)


def length_bound(name: str, value: Any) -> int | None:
    """Return an upper bound on lengths; a tensor's value stays where it is, since reading it would synchronise."""
    if value is None or isinstance(value, Tensor):
        return None
    if not isinstance(value, torch.SymInt) and not isinstance(value, bool) and hasattr(value, "__index__"):
        value = int(value)
    validation.check_count(name, value)
    return value  # type: ignore[no-any-return]


def values_are_readable(q: Tensor) -> bool:
    """Say whether the values of lengths and lists are to be read: free on a CPU, by TILEWISE_CHECK elsewhere."""
    if torch.compiler.is_compiling() or q.device.type == "meta":
        return False
    if type(q) is not Tensor and not isinstance(q, torch.nn.Parameter):
        return False  # a fake, functional or batched tensor has no values
    return q.device.type == "cpu" or settings().check


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Cast q, k and v to the autocast dtype where autocast is on, fp64 excepted as everywhere in torch."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type if q.device.type != "meta" else "cpu"):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    cast = [
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (q, k, v)
    ]
    return cast[0], cast[1], cast[2]
