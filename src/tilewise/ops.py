"""The torch operators: schemas, fakes, implementations, and the gradient.

`tilewise::forward` and `tilewise::backward` are what torch.compile and torch.export see. Their string `spec` is
self-describing (`Spec`): digests of modifiers, flags, block size. Differentiability is one autograd.Function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .compile.memo import Ready
from .errors import DoubleBackwardError
from .problem import AttentionInputs

Tensor = torch.Tensor

#: The optional tensors of a call, in the order of the operators' `optional` argument.
OPTIONAL = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
BLOCK_LISTS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor?[] optional, Tensor[] score_captures, Tensor[] mask_captures, "
    "float softmax_scale, float softcap, SymInt? window_left, SymInt? window_right, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, SymInt num_splits, str spec"
)
_library = torch.library.Library("tilewise", "DEF")
_library.define(f"forward({_CALL}) -> (Tensor, Tensor)")
_library.define(f"forward_out({_CALL}, Tensor(a!) out, Tensor(b!) lse) -> ()")
_library.define(f"backward({_CALL}, Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs) -> Tensor[]")


@dataclass(frozen=True)
class Spec:
    """The static part of a call that no tensor or number carries, as text."""

    score_mod: str = ""
    mask_mod: str = ""
    block_size: tuple[int, int] | None = None
    pack_gqa: bool | None = None
    deterministic: bool = False
    backend: str | None = None

    def encode(self) -> str:
        """Return the text form."""
        block = "" if self.block_size is None else f"{self.block_size[0]}x{self.block_size[1]}"
        pack = "" if self.pack_gqa is None else str(int(self.pack_gqa))
        flag = int(self.deterministic)
        return f"{self.score_mod};{self.mask_mod};{block};{pack};{flag};{self.backend or ''}"

    @classmethod
    def decode(cls, text: str) -> Spec:
        """Return what `encode` was given."""
        score_mod, mask_mod, block, pack, flag, backend = text.split(";")
        size = tuple(int(n) for n in block.split("x")) if block else None
        return cls(
            score_mod,
            mask_mod,
            None if size is None else (size[0], size[1]),
            bool(int(pack)) if pack else None,
            flag == "1",
            backend or None,
        )


def _inputs(args: tuple[Any, ...]) -> tuple[AttentionInputs, str | None]:
    """Return the call that the operators' arguments describe, and the backend it asks for."""
    from .mods.block_mask import BlockSparseTensors
    from .mods.trace import lookup

    q, k, v, sink, optional, score_captures, mask_captures, scale, softcap, left, right, max_q, max_k, splits, text = (
        args
    )
    spec = Spec.decode(text)
    named = dict(zip(OPTIONAL, optional, strict=False))
    lists = dict(zip(BLOCK_LISTS, optional[len(OPTIONAL) :], strict=False))
    sparse = None if spec.block_size is None else BlockSparseTensors(**lists, block_size=spec.block_size)
    inputs = AttentionInputs(
        q=q,
        k=k,
        v=v,
        softmax_scale=scale,
        **named,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softcap=softcap,
        window_left=left,
        window_right=right,
        sink=sink,
        score_mod=lookup(spec.score_mod) if spec.score_mod else None,
        mask_mod=lookup(spec.mask_mod) if spec.mask_mod else None,
        score_captures=tuple(score_captures),
        mask_captures=tuple(mask_captures),
        block_sparse=sparse,
        num_splits=splits,
        pack_gqa=spec.pack_gqa,
        deterministic=spec.deterministic,
    )
    return inputs, spec.backend


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    from .dispatch import choose_for

    inputs, name = _inputs(args)
    return choose_for(inputs, "forward", name).forward(inputs)


def _forward_out(*args: Any) -> None:
    from .dispatch import choose_for

    inputs, name = _inputs(args[:-2])
    choose_for(inputs, "forward", name).forward(inputs, *args[-2:])


def _backward(*args: Any) -> list[Tensor]:
    from .dispatch import choose_for

    inputs, name = _inputs(args[:-5])
    dout, dlse, out, lse, needs = args[-5:]
    found = choose_for(inputs, "backward", name, dlse is not None).backward(inputs, dout, dlse, out, lse, tuple(needs))
    wanted = (inputs.q, inputs.k, inputs.v, inputs.sink, *inputs.score_captures)
    given = (found.q, found.k, found.v, found.sink, *found.score_captures)
    # An operator returns tensors only: an empty one stands for a gradient nobody asked for.
    return [
        inputs.q.new_empty(0) if t is None or not need or g is None else g.to(t.dtype)
        for t, g, need in zip(wanted, given, needs, strict=True)
    ]


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = _inputs_without_mods(args)
    return inputs.q.new_empty(inputs.out_shape), inputs.q.new_empty(inputs.lse_shape, dtype=inputs.lse_dtype)


def _inputs_without_mods(args: tuple[Any, ...]) -> AttentionInputs:
    """Return enough of the call for its shapes."""
    q, k, v, sink, optional = args[:5]
    named = dict(zip(OPTIONAL, optional, strict=False))
    return AttentionInputs(q=q, k=k, v=v, softmax_scale=args[7], sink=sink, **named)


def _fake_backward(*args: Any) -> list[Tensor]:
    q, k, v, sink, _, score_captures = args[:6]
    needs = args[-1]
    return [
        q.new_empty(0) if t is None or not need else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, need in zip((q, k, v, sink, *score_captures), needs, strict=True)
    ]


for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _device)
    _library.impl("forward_out", _forward_out, _device)
    _library.impl("backward", _backward, _device)
torch.library.register_fake("tilewise::forward", _fake_forward, lib=_library)
torch.library.register_fake("tilewise::forward_out", lambda *_: None, lib=_library)
torch.library.register_fake("tilewise::backward", _fake_backward, lib=_library)


class _Gradient(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it is an error and not a silent zero."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], needs: list[bool], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        dout, dlse, out, lse, *rest = tensors
        args = _arguments(call, rest)
        return tuple(torch.ops.tilewise.backward(*args, dout, dlse, out, lse, needs))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise DoubleBackwardError(
            "tilewise attention: double backward is not supported: the gradient of attention cannot be differentiated "
            "again; for second derivatives use torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH"
        )


def _arguments(call: tuple[Any, ...], tensors: list[Tensor | None] | tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Return the operators' arguments from the flat tensors and the numbers of a call."""
    n_optional, n_score, numbers = call
    q, k, v, sink, *rest = tensors
    score = rest[:n_score]
    optional = rest[n_score : n_score + n_optional]
    return (q, k, v, sink, optional, score, rest[n_score + n_optional :], *numbers)


class AttentionFunction(torch.autograd.Function):
    """Attention with its gradient with respect to q, k, v, the sink and the tensors that a score_mod captured."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.tilewise.forward(*_arguments(call, tensors))
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        return (None, *_gradients(ctx.call, ctx.needs_input_grad[1:], dout, dlse, out, lse, tensors))


def _gradients(
    call: tuple[Any, ...],
    asked: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tensors: list[Tensor | None],
) -> list[Tensor | None]:
    """Return a gradient for each of `tensors` that wants one."""
    needs = list(asked[: 4 + call[1]])
    grads: list[Tensor | None] = [None] * len(tensors)
    if any(needs) and not (dout is None and dlse is None):
        found = _Gradient.apply(call, needs, dout, dlse, out, lse, *tensors)
        for i, need in enumerate(needs):
            if need:
                grads[i] = found[i]
    return grads


class ReadyFunction(torch.autograd.Function):
    """`AttentionFunction` for a dense call whose launch is ready: (launch, call) from `ready`, then q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, launch: Ready, call: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = launch(q, k, v)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, q, k, v)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, q, k, v = ctx.saved_tensors
        asked = (*ctx.needs_input_grad[2:], False)
        return (None, None, *_gradients(ctx.call, asked, dout, dlse, out, lse, [q, k, v, None])[:3])


def ready(inputs: AttentionInputs, backend: str | None) -> tuple[Ready, tuple[Any, ...]] | None:
    """Return (launch, call) for later calls just like this one; None if its backend has no launch to keep."""
    from .dispatch import choose_for

    make = getattr(choose_for(inputs, "forward", backend), "ready", None)
    launch = None if make is None else make(inputs)
    return None if launch is None else (launch, _call(inputs, backend)[0])


def ready_attention(launch: Ready, call: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run a launch that `ready` made, with its gradient where one is asked for."""
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        result: tuple[Tensor, Tensor] = ReadyFunction.apply(launch, call, q, k, v)
        return result
    return launch(q, k, v)


def attention(inputs: AttentionInputs, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Run one validated call through the operators, with its gradient where one is asked for."""
    call, tensors = _call(inputs, backend)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        result: tuple[Tensor, Tensor] = AttentionFunction.apply(call, *tensors)
        return result
    found: tuple[Tensor, Tensor] = torch.ops.tilewise.forward(*_arguments(call, tensors))
    return found


def attention_forward_out(inputs: AttentionInputs, out: Tensor, lse: Tensor, backend: str | None = None) -> None:
    """Run one validated call into buffers, without autograd."""
    call, tensors = _call(inputs, backend)
    torch.ops.tilewise.forward_out(*_arguments(call, tensors), out, lse)


def attention_backward(
    inputs: AttentionInputs, dout: Tensor, out: Tensor, lse: Tensor, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of one validated call, without autograd."""
    call, tensors = _call(inputs, backend)
    needs = [True, True, True, False, *[False] * call[1]]
    dq, dk, dv = torch.ops.tilewise.backward(*_arguments(call, tensors), dout, None, out, lse, needs)[:3]
    return dq, dk, dv


def _call(inputs: AttentionInputs, backend: str | None) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """Return the numbers and the flat tensors of a call."""
    x = inputs
    sparse = x.block_sparse
    spec = Spec(
        "" if x.score_mod is None else x.score_mod.digest,
        "" if x.mask_mod is None else x.mask_mod.digest,
        None if sparse is None else sparse.block_size,
        x.pack_gqa,
        x.deterministic,
        backend,
    )
    numbers = (
        float(x.softmax_scale),
        float(x.softcap),
        x.window_left,
        x.window_right,
        x.max_seqlen_q,
        x.max_seqlen_k,
        x.num_splits,
        spec.encode(),
    )
    optional = [getattr(x, name) for name in OPTIONAL]
    if sparse is not None:
        optional += [getattr(sparse, name) for name in BLOCK_LISTS]
    call = (len(optional), len(x.score_captures), numbers)
    return call, (x.q, x.k, x.v, x.sink, *x.score_captures, *optional, *x.mask_captures)
