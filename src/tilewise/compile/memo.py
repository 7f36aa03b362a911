"""From the raw signature of a dense call to a launch that is ready: problem and plan are built only on a miss.

The signature holds everything that validation and planning look at, with types where equal values are not equally
valid (`True == 1`), so a hit needs no check of its own. It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..settings import Settings, settings

Tensor = torch.Tensor

#: (q, k, v) -> (out, lse), on the current stream of q's device.
Ready = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

#: Entries before all are dropped: lengths that grow call by call must not fill the memory.
LIMIT = 4096

_entries: dict[tuple[Any, ...], tuple[Ready, tuple[Any, ...]]] = {}
_settings: Settings | None = None

#: Devices other than CUDA take the fast path too. For tests: the CPU's backends have nothing to launch.
everywhere = False

_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_autocast = torch.is_autocast_enabled
_PLAIN = (Tensor, torch.nn.Parameter)


def signature(
    q: Tensor, k: Tensor, v: Tensor, scale: Any, causal: Any, window: Any, softcap: Any, splits: Any, pack: Any,
    deterministic: Any, backend: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return the key of a dense call without modifiers, sink and lists; None if it must take the long way.

    That is when something may have to see the operator: a subclass, a mode, a transform, autocast.
    """
    if type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN:
        return None
    if not (q.is_cuda or everywhere) or _modes() or _function_modes() or _transform() is not None:
        return None
    if type(window) is not tuple or len(window) != 2 or _autocast("cuda"):
        return None
    left, right = window
    return (
        q.shape, q.stride(), q.data_ptr() & 15, q.dtype, q.device,
        k.shape, k.stride(), k.data_ptr() & 15, k.dtype, k.device,
        v.shape, v.stride(), v.data_ptr() & 15, v.dtype, v.device,
        scale, type(scale), causal, type(causal), left, type(left), right, type(right), softcap, type(softcap),
        splits, type(splits), pack, type(pack), deterministic, type(deterministic), backend,
    )  # fmt: skip


def find(key: tuple[Any, ...]) -> tuple[Ready, tuple[Any, ...]] | None:
    """Return (launch, call) kept for `key`; nothing is kept across a change of settings."""
    global _settings
    if settings() is not _settings:
        _entries.clear()
        _settings = settings()
    try:
        return _entries.get(key)
    except TypeError:  # an argument that cannot be hashed is one that validation names
        return None


def keep(key: tuple[Any, ...], ready: Ready, call: tuple[Any, ...]) -> None:
    """Keep `ready` for `key`, with the `call` that a backward hands to its operator."""
    if len(_entries) >= LIMIT:
        _entries.clear()
    _entries[key] = (ready, call)


def clear() -> None:
    """Forget everything."""
    _entries.clear()
