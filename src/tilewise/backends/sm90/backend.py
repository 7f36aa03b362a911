"""The Hopper backend: what it refuses, and from a call to a launch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NoReturn

import torch

from ...compile.folder import kernel_folder
from ...compile.key import CompileKey
from ...compile.launch import can_compile
from ...compile.memo import Ready
from ...errors import UnsupportedError
from ...problem import AttentionInputs, AttentionProblem, Gradients, TensorSig
from ...settings import log
from ...target import Target, capability, multiprocessors
from .config import ForwardConfig, choose, tuned

Tensor = torch.Tensor

ARCH = "sm_90a"

#: Bounds are added to positions in 32 bits; no sequence is this long.
FAR = 2**29


class Sm90Backend:
    """Attention on GPUs of compute capability 9.0."""

    name = "sm90"
    runs_on = "GPUs of compute capability 9.0 (Hopper)"

    def unavailable(self, device: torch.device) -> list[str]:
        """Return why tensors of `device` cannot be computed on here; empty if they can."""
        reasons = []
        if device.type != "cuda":
            reasons.append(f"q is on {device}, not on a CUDA device")
        elif capability(device.index or 0) != (9, 0):
            reasons.append("compute capability %d.%d, not 9.0" % capability(device.index or 0))
        if not can_compile() and kernel_folder() is None:
            reasons.append("nvidia-cutlass-dsl is not installed, and no precompiled kernels are (TILEWISE_KERNELS)")
        return reasons

    def unsupported(self, problem: AttentionProblem) -> list[str]:
        """Return why the kernels cannot compute `problem`; empty if they can."""
        p, reasons = problem, []
        if p.dtype not in ("float16", "bfloat16"):
            reasons.append(f"dtype {p.dtype}, not float16 or bfloat16")
        for name, size in (("head_dim", p.head_dim), ("head_dim_v", p.head_dim_v)):
            if size > 256 or size % 8 or size == 0:
                reasons.append(f"{name} {size}, not a multiple of 8 up to 256")
        if p.direction != "forward":
            reasons.append(f"{p.direction}: only the forward is built")
        for name, present in (
            ("paged K/V", p.paged),
            ("split K/V", p.split),
            ("score_mod", p.score_mod is not None),
            ("mask_mod", p.mask_mod is not None),
            ("block sparsity", p.block_size is not None),
        ):
            if present:
                reasons.append(f"{name} is not built")
        return reasons

    def forward(
        self, inputs: AttentionInputs, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse), written into the buffers where given. Runs on the current stream of q's device."""
        q = inputs.q
        result = q.new_empty(inputs.out_shape) if out is None else out
        stats = q.new_empty(inputs.lse_shape, dtype=torch.float32) if lse is None else lse
        if result.numel() == 0 and stats.numel() == 0:
            return result, stats
        if inputs.k.shape[0] == 0 or inputs.k.shape[1] == 0 or result.numel() == 0:
            return self._without_keys(inputs, result, stats)
        with torch.cuda.device(q.device):
            self._launch(inputs, result, stats)
        return result, stats

    def backward(self, *_: object, **__: object) -> Gradients:
        """Refuse: the backward is not built for this GPU yet."""
        self._refuse("backward")

    def combine(self, *_: object, **__: object) -> None:
        """Refuse: merging of partial results is not built for this GPU yet."""
        self._refuse("combine")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(f"sm90: {what} is not built; the cpu backend has it")

    def _launch(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        from ...compile import compile_kernel

        q, k, v = (aligned(t) for t in (inputs.q, inputs.k, inputs.v))
        scale = inputs.softmax_scale
        if scale <= 0.0:
            # The running maximum is taken of unscaled scores: the sign goes into q, and 0 makes all scores 0.
            q, scale = (-q, -scale) if scale < 0.0 else (torch.zeros_like(q), 1.0)
        key = forward_key(inputs)
        config, run = key.config, compile_kernel(key)
        target = out if is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        stats = lse if lse.stride(-1) == 1 or lse.shape[-1] == 1 else torch.empty_like(lse, memory_format=torch.contiguous_format)
        run(
            *(four(t) for t in (q, k, v, target)),
            stats if stats.dim() == 3 else stats.unsqueeze(0),
            *(vector(t) for t in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k)),
            vector(inputs.sink),
            q.new_zeros(1, dtype=torch.int32) if config.schedule == "dynamic" else None,
            scale,
            inputs.softcap or 1.0,
            bound(inputs.window_left),
            bound(inputs.window_right),
            inputs.batch,
            multiprocessors(q.device.index),
        )
        if target is not out:
            out.copy_(target)
        if stats is not lse:
            lse.copy_(stats)

    def keys(self, inputs: AttentionInputs, direction: str) -> list[CompileKey]:
        """Return the kernels that a call needs, for compiling ahead of time. Reads no device."""
        return [forward_key(inputs)] if direction == "forward" else []

    def ready(self, inputs: AttentionInputs) -> Ready | None:
        """Return a launch for calls just like `inputs`, a dense one; None if such a call needs more than one launch."""
        from ...compile import compile_kernel

        x = inputs
        tensors = (x.q, x.k, x.v)
        out_shape, lse_shape, dtype, device = x.out_shape, x.lse_shape, x.q.dtype, x.q.device
        if x.softmax_scale <= 0.0 or x.sink is not None or any(t.numel() == 0 for t in tensors):
            return None
        if not all(is_aligned(t) and four(t) is t for t in tensors):
            return None
        key = forward_key(x)
        run, counted = compile_kernel(key), key.config.schedule == "dynamic"
        numbers = (x.softmax_scale, x.softcap or 1.0, bound(x.window_left), bound(x.window_right), x.batch, multiprocessors(device.index))
        index, current, empty, fp32, int32 = device.index, torch._C._cuda_getDevice, torch.empty, torch.float32, torch.int32

        def launch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if current() != index:
                with torch.cuda.device(index):
                    return launch(q, k, v)
            out = empty(out_shape, dtype=dtype, device=device)
            lse = empty(lse_shape, dtype=fp32, device=device)
            counter = torch.zeros(1, dtype=int32, device=device) if counted else None
            run(q, k, v, out, lse, None, None, None, None, None, counter, *numbers)
            return out, lse

        return launch

    @staticmethod
    def _without_keys(inputs: AttentionInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Write what every row is when there is no key at all: zeros, and the sink as LSE where rows count."""
        out.zero_()
        lse.fill_(float("-inf"))
        if inputs.sink is None or lse.numel() == 0:
            return out, lse
        sink, device = inputs.sink.float(), lse.device
        if inputs.cu_seqlens_q is None:
            rows = torch.arange(lse.shape[2], device=device)
            used = torch.full((lse.shape[0],), lse.shape[2], device=device)
            used = used if inputs.seqused_q is None else inputs.seqused_q
            counts = (rows < used[:, None])[:, None, :]
            lse.copy_(torch.where(counts, sink[None, :, None], lse))
            return out, lse
        starts, rows = inputs.cu_seqlens_q, torch.arange(lse.shape[1], device=device)
        which = torch.searchsorted(starts, rows, right=True, out_int32=True).long() - 1
        inside = which < inputs.batch
        which = which.clamp(max=inputs.batch - 1)
        if inputs.seqused_q is not None:
            inside = inside & (rows - starts[which] < inputs.seqused_q[which])
        lse.copy_(torch.where(inside[None], sink[:, None], lse))
        return out, lse


def forward_key(inputs: AttentionInputs) -> CompileKey:
    """Return the forward kernel of a call, planned."""
    problem = kernel_problem(inputs.problem())
    config = choose(problem, inputs.extents())
    log("plan", (problem, config), lambda: f"{problem} -> sm90 {config}: {reason(problem, config)}")
    return CompileKey("sm90.forward", problem, config, Target.of_arch(ARCH))


def reason(problem: AttentionProblem, config: Any) -> str:
    """Say in words why `config` was chosen for `problem`."""
    if config == tuned(problem):
        return "the measured configuration for these head dims and bounds"
    changes = [f.name for f in fields(config) if getattr(config, f.name) != getattr(tuned(problem), f.name)]
    return f"the measured configuration with {', '.join(changes)} changed for these sizes"


def is_aligned(t: Tensor) -> bool:
    """Say whether the copy engine can address `t`: 16-byte base and strides, unit last stride, no broadcast rows."""
    if t.stride(-1) != 1 or t.data_ptr() % 16:
        return False
    step = 16 // t.element_size()
    return all(s % step == 0 and s > 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)


def aligned(t: Tensor) -> Tensor:
    """Return `t`, or a copy that the copy engine can address."""
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def four(t: Tensor) -> Tensor:
    """Return `t` as (B, S, H, D), B = 1 for packed tensors, with strides of size-1 dimensions that are aligned too."""
    t = t if t.dim() == 4 else t.unsqueeze(0)
    step = 16 // t.element_size()
    if all(s % step == 0 for s in t.stride()[:-1]):
        return t
    strides = tuple(s if n > 1 or s % step == 0 else step for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided(t.shape, (*strides[:-1], 1))


def vector(t: Tensor | None) -> Tensor | None:
    """Return a 1-D tensor with unit stride, or None."""
    return None if t is None else t.contiguous()


def bound(value: int | None) -> int:
    """Return a window bound that 32-bit sums can hold; 0 where absent, and then never read."""
    return 0 if value is None else max(-FAR, min(value, FAR))


def kernel_problem(problem: AttentionProblem) -> AttentionProblem:
    """Return `problem` without what the forward kernel does not depend on, so that it compiles once."""
    sig = TensorSig(problem.dtype, 4, (), True, False)
    return replace(problem, q=sig, k=sig, v=sig, lse_gradient=False, deterministic=False)


__all__ = ["ForwardConfig", "Sm90Backend"]
