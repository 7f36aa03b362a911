"""The backends that can run here, each with its device."""

import functools
from typing import NamedTuple

import torch

from tilewise.backends.base import Backend
from tilewise.backends.cpu.backend import CpuBackend
from tilewise.backends.cpu.reference import ReferenceBackend


class Place(NamedTuple):
    """A backend and a device that it accepts."""

    backend: Backend
    device: torch.device

    def __str__(self) -> str:
        return f"{self.backend.name}-{self.device.type}"


@functools.cache
def places() -> tuple[Place, ...]:
    """Return the CPU backend and the reference, which is under test too: against itself in fp64."""
    host = torch.device("cpu")
    return Place(CpuBackend(), host), Place(ReferenceBackend(), host)
