"""What a backend is: a name, its reasons for refusing, a forward and a backward."""

from __future__ import annotations

from typing import Protocol

import torch

from ..problem import AttentionInputs, AttentionProblem, Gradients

Tensor = torch.Tensor


class Backend(Protocol):
    """One implementation of the whole contract, or of as much of it as its two lists of reasons let through."""

    name: str
    runs_on: str  # in words, for the support tables

    def unavailable(self, device: torch.device) -> list[str]:
        """Return why this backend cannot run tensors of `device` on this machine; empty if it can."""
        ...

    def unsupported(self, problem: AttentionProblem) -> list[str]:
        """Return why this backend cannot compute `problem` on any machine; empty if it can."""
        ...

    def forward(
        self, inputs: AttentionInputs, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of shapes `inputs.out_shape`, `inputs.lse_shape`, written into the buffers where given."""
        ...

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
        ...

    def combine(
        self, out_partial: Tensor, lse_partial: Tensor, out: Tensor, lse: Tensor, lengths: Tensor | None
    ) -> None:
        """Merge partial results along dimension 0 into `out` and `lse`."""
        ...
