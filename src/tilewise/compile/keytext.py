"""A compile key as one line of JSON and back, for command lines and manifests. Defaults are left out."""

from __future__ import annotations

import json
import typing
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

from ..problem import AttentionProblem
from ..target import Target
from .key import CompileKey


def to_text(key: CompileKey) -> str:
    """Return `key` without its compiler's version, e.g. '{"arch":"sm_90a","kernel":"sm90.forward",...}'."""
    kind = type(key.config)
    parts = {
        "kernel": key.kernel,
        "arch": key.target.arch,
        "config_type": f"{kind.__module__}:{kind.__qualname__}",
        "problem": _plain(key.problem),
        "config": _plain(key.config),
    }
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def from_text(text: str) -> CompileKey:
    """Return the key that `to_text` wrote, for the compiler installed here.

    Raises:
        ValueError: the text is not such a key.
    """
    try:
        parts = json.loads(text)
        module, name = parts["config_type"].split(":")
        if not module.startswith("tilewise.backends."):
            raise ValueError(f"config_type: expected a class of tilewise.backends, got {module}")
        kind = getattr(import_module(module), name)
        problem, config = _typed(AttentionProblem, parts["problem"]), _typed(kind, parts["config"])
        return CompileKey(parts["kernel"], problem, config, Target.of_arch(parts["arch"]))
    except (KeyError, TypeError, AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"key: expected what a missing kernel's error printed, got {text[:200]!r}: {error}") from error


def _plain(value: Any) -> Any:
    """Return dataclasses as dicts of what differs from their defaults; tuples as lists."""
    if is_dataclass(value):
        given = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: _plain(x) for f, x in given if f.default is MISSING or x != f.default}
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return value


def _typed(kind: Any, value: Any) -> Any:
    """Return `value` from JSON as the type that a field declares."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: _typed(hints[name], x) for name, x in value.items()})  # type: ignore[operator]
    if isinstance(value, list):
        inner = [a for a in typing.get_args(kind) if a is not type(None)]
        if typing.get_origin(kind) is not tuple and inner:
            return _typed(inner[0], value)  # tuple[...] | None
        inner = [a for a in inner if a is not ...]
        return tuple(_typed(inner[min(i, len(inner) - 1)] if inner else None, x) for i, x in enumerate(value))
    return value
