"""Which backend runs a call: the first in order that does not refuse it, or the one named, never another."""

from __future__ import annotations

import functools

import torch

from .backends.base import Backend
from .errors import UnsupportedError
from .problem import AttentionInputs, AttentionProblem
from .settings import settings

#: In order of preference. The reference runs everything, slowly: only by name.
NAMES = ("sm90", "cpu", "reference")
AUTOMATIC = ("sm90", "cpu")


@functools.cache
def backend(name: str) -> Backend:
    """Return the backend called `name`; its module is imported on first use."""
    if name == "cpu":
        from .backends.cpu.backend import CpuBackend

        return CpuBackend()
    if name == "reference":
        from .backends.cpu.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "sm90":
        from .backends.sm90.backend import Sm90Backend

        return Sm90Backend()
    raise ValueError(f"backend: expected one of {', '.join(NAMES)}, got {name!r}")


def choose(problem: AttentionProblem, device: torch.device, name: str | None = None) -> Backend:
    """Return the backend for `problem` on `device`.

    Raises:
        UnsupportedError: none accepts it, or the one asked for by `name` does not; each one's reasons are listed.
    """
    reasons = []
    name = name or settings().backend
    # A CPU tensor never needs the GPU backends' modules.
    order = (name,) if name else ("cpu",) if device.type == "cpu" else AUTOMATIC
    for candidate in order:
        found = backend(candidate)
        refused = found.unavailable(device) + found.unsupported(problem)
        if not refused:
            return found
        reasons.append(f"  {candidate}: {'; '.join(refused)}")
    who = f"backend {name!r} does not accept" if name else "no backend accepts"
    raise UnsupportedError(f"{who} this problem on {device}:\n" + "\n".join(reasons) + f"\n  problem: {problem}")


def choose_for(inputs: AttentionInputs, direction: str, name: str | None, lse_gradient: bool = False) -> Backend:
    """Return the backend for one call."""
    return choose(inputs.problem(direction, lse_gradient), inputs.q.device, name)
