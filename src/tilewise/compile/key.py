"""What a compiled kernel is a function of: nothing else can reach its code, so nothing can be missing here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..canonical import digest
from ..problem import AttentionProblem
from ..target import Target


@dataclass(frozen=True)
class CompileKey:
    """Identity of a compiled kernel.

    Attributes:
        kernel: name in the registry of `compile.launch`, e.g. "sm90.forward".
        problem: what it computes.
        config: how; a frozen dataclass of plain values that belongs to the kernel.
        target: where.
    """

    kernel: str
    problem: AttentionProblem
    config: Any
    target: Target

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical encoding; TypeError if a field cannot be encoded."""
        return digest(self)
