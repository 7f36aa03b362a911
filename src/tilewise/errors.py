"""Exceptions, and the one grammar of their messages.

    TypeError                        a wrong kind of thing, or a wrong dtype
    ValueError                       a wrong shape, size, device, value or combination
      └─ SettingError                a TILEWISE_* environment variable holds what it cannot mean
    NotImplementedError
      └─ UnsupportedError            legal input that the backend asked for, or every backend, cannot run
           ├─ DoubleBackwardError    a derivative of the gradient was asked for
           └─ MissingKernelError     no precompiled kernel for a call, and no compiler to make one

A message reads ``<argument>: expected <rule>, got <value>``: the argument first, since that is what its reader can
change.
"""

from __future__ import annotations

from typing import Any

import torch


class UnsupportedError(NotImplementedError):
    """Legal input that no backend, or not the backend asked for by name, can run. The text lists each one's reasons."""


class SettingError(ValueError):
    """A TILEWISE_* environment variable holds what it cannot mean."""


class DoubleBackwardError(UnsupportedError):
    """A second derivative was asked for; attention's gradient is not itself differentiable here."""


class MissingKernelError(UnsupportedError):
    """A call needs a kernel that was not precompiled, and this machine has no compiler. The text says what adds it."""


def describe(value: Any) -> str:
    """Return a short text for `value`: a tensor by shape, dtype and device, anything else by type and repr."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{value!r} ({type(value).__name__})"


def wrong_type(name: str, expected: str, value: Any) -> TypeError:
    """Return the TypeError for argument `name` that should be `expected` and is `value`."""
    return TypeError(f"{name}: expected {expected}, got {describe(value)}")


def wrong_value(name: str, expected: str, got: str) -> ValueError:
    """Return the ValueError for argument `name` that should be `expected` and is described by `got`."""
    return ValueError(f"{name}: expected {expected}, got {got}")
