"""Canonical encoding of plain values, and the digest of it.

Identities that outlive a process (the digest of a modifier, the key of a compiled kernel) must be equal for equal
meaning and must differ otherwise, whatever the hash seed, the process or the machine. So values are encoded by type,
each with a tag, and anything whose meaning is not wholly in the encoding is refused: never `repr`, `hash` or pickle.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch


def encode(value: Any) -> str:
    """Return the canonical text of `value`. Equal text means equal type and equal meaning.

    Args:
        value: None, bool, int, float, str, Enum member, torch.dtype, tuple of such values, or an instance of a frozen
            dataclass whose fields are such values. Floats are written by `float.hex`, so -0.0, 0.0 and NaN are told
            apart; True is not 1, and 1 is not 1.0. Strings carry their length, so no text can imitate another.

    Raises:
        TypeError: for any other type (subclasses of the builtin types included), naming it.
    """
    kind = type(value)
    if value is None:
        return "N"
    if kind is bool:
        return "T" if value else "F"
    if kind is int:
        return f"i{value}"
    if kind is float:
        return f"f{value.hex()}"
    if kind is str:
        return f"s{len(value)}:{value}"
    if kind is tuple:
        return f"({','.join(map(encode, value))})"
    if kind is torch.dtype:
        return f"d{str(value).removeprefix('torch.')}"
    if isinstance(value, Enum):
        return f"e{kind.__module__}.{kind.__qualname__}.{value.name}"
    if is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen:  # noqa: B009  (not in the type stubs)
        body = ",".join(f"{f.name}={encode(getattr(value, f.name))}" for f in fields(kind))
        return f"c{kind.__module__}.{kind.__qualname__}{{{body}}}"
    raise TypeError(
        "value: expected None, bool, int, float, str, an Enum member, a dtype, a tuple or a frozen dataclass of these, "
        f"got {kind.__module__}.{kind.__qualname__}"
    )


def digest(value: Any) -> str:
    """Return the SHA-256 of `encode(value)`, 64 hexadecimal digits.

    Raises:
        TypeError: as `encode`.
    """
    return hashlib.sha256(encode(value).encode()).hexdigest()
