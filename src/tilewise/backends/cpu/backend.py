"""The CPU backend: the whole contract, for every dtype of it."""

from __future__ import annotations

import torch

from ...problem import AttentionInputs, AttentionProblem, Gradients
from . import fused, tiled
from .combine import merge

Tensor = torch.Tensor


class CpuBackend:
    """Torch's fused kernel where it computes the call, tiles of keys elsewhere."""

    name = "cpu"
    runs_on = "any CPU"

    def unavailable(self, device: torch.device) -> list[str]:
        """Refuse tensors that are not in host memory."""
        return [] if device.type == "cpu" else [f"q is on {device}"]

    def unsupported(self, problem: AttentionProblem) -> list[str]:
        """Refuse nothing."""
        return []

    def forward(
        self, inputs: AttentionInputs, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse), written into the buffers where given."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            if (found := fused.forward(inputs, out, lse)) is not None:
                return found
            if out is None:
                out = torch.empty(inputs.out_shape, dtype=inputs.q.dtype)
            if lse is None:
                lse = torch.empty(inputs.lse_shape, dtype=inputs.lse_dtype)
            tiled.forward(inputs, out, lse)
            return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor | None,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        needs: tuple[bool, ...],
    ) -> Gradients:
        """Return the gradients. `needs` says which of q, k, v, sink and then each score capture want one."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = fused.backward(inputs, dout, dlse, out, lse, needs)
            return tiled.backward(inputs, dout, dlse, out, lse, needs) if found is None else found

    def combine(
        self, out_partial: Tensor, lse_partial: Tensor, out: Tensor, lse: Tensor, lengths: Tensor | None
    ) -> None:
        """Merge partial results along dimension 0 into `out` and `lse`. `lengths` as in `merge`."""
        merge(out_partial, lse_partial, out, lse, lengths)
