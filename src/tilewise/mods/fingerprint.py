"""What a Python function would compute, as a hashable key: equal keys mean that tracing again gives the same graph.

The key covers the code object, default arguments, closure cells, the globals and attributes that the code names, and
the same of every function reached that way. Numbers go in by value, tensors by dtype, shape, strides and device only
(and by which of them are one object), never by data: a trace made once serves as long as only their data changes. The
tensors themselves are returned beside the key, so that each call reads the current ones.

It fails closed. What may change without changing the key (an object of unknown type, `getattr`, an import inside the
function, `random`) gives no key at all, and the caller traces again: a cost, never a stale answer.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import types
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

Tensor = torch.Tensor

#: Modules whose functions depend on their arguments alone.
_PURE_MODULES = frozenset({"math", "cmath", "operator", "_operator"})

#: Other functions of that kind.
_PURE_FUNCTIONS = (functools.reduce,)

#: Methods that no expression in a modifier calls, though a class has them: what they read does not matter.
_UNUSED_METHODS = frozenset("__init__ __post_init__ __repr__ __str__ __setattr__ __delattr__ __hash__".split())

#: What only classes written in C have among their attributes.
_WRITTEN_IN_C = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.BuiltinFunctionType,
)

#: Builtins that look at nothing but their arguments; the others (getattr, globals, eval, ...) defeat the analysis.
_PURE_BUILTINS = set(
    "abs all any bool divmod enumerate float int isinstance len list max min pow print range reversed round slice "
    "sorted str sum tuple zip map filter True False None Ellipsis NotImplemented ValueError TypeError".split()
)

#: Names that reach values behind the back of this analysis.
_OPAQUE_NAMES = frozenset({"__dict__", "__class__", "__globals__", "__closure__", "__code__", "__getattribute__"})

#: Comparisons that `dataclass` writes: they name `__class__`, and only to compare it.
_GENERATED = ("<string>", frozenset({"__eq__", "__lt__", "__le__", "__gt__", "__ge__"}))


class _Opaque(Exception):
    """Something whose meaning cannot be pinned down."""


@dataclass(frozen=True)
class Fingerprint:
    """A key, and the tensors found on the way, each object once, in the order of the walk."""

    key: Hashable
    tensors: tuple[Tensor, ...]


def fingerprint(fn: Callable[..., Any], extra: Iterable[Any] = ()) -> Fingerprint | None:
    """Return the fingerprint of `fn` and of the values in `extra` that it will be handed, or None if it has none."""
    walk = _Walk()
    try:
        key = (walk.value(fn), tuple(walk.value(v) for v in extra), walk.attributes(), torch.get_default_dtype())
        hash(key)
    except (_Opaque, TypeError, RecursionError):
        return None
    return Fingerprint(key, tuple(walk.tensors))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...] | None:
    """Return the global and attribute names in `code` and in the code nested in it; None if it imports a module that is
    neither torch nor pure, or names something opaque."""
    names = dict.fromkeys(code.co_names)
    if code.co_filename == _GENERATED[0] and code.co_name in _GENERATED[1]:
        names.pop("__class__", None)
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            root = str(instruction.argval).split(".")[0]
            if root != "torch" and root not in _PURE_MODULES:
                return None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            if inner is None:
                return None
            names.update(dict.fromkeys(inner))
    return None if _OPAQUE_NAMES & names.keys() else tuple(names)


def _in_torch(module: Any) -> bool:
    return isinstance(module, str) and (module == "torch" or module.startswith("torch."))


def _from_torch(value: Any) -> bool:
    """Whether a function, class or module is part of torch."""
    return _in_torch(getattr(value, "__module__", None) or getattr(value, "__name__", None))


@functools.lru_cache(maxsize=1024)
def _is_plain(kind: type) -> bool:
    """Whether the attributes of the instances of a class can be found without running its code."""
    dynamic = "__getattr__" in vars(kind) or "__getattribute__" in vars(kind)
    written_in_c = any(isinstance(a, _WRITTEN_IN_C) for a in vars(kind).values())
    return not (dynamic or written_in_c or _from_torch(kind))


class _Walk:
    """One walk. `owners` are the objects and modules met, whose named attributes are looked up at the end, when all
    code that could name them is known."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._names: dict[str, None] = {}
        self._owners: list[Any] = []

    def value(self, v: Any) -> Hashable:
        """Return the key of any value."""
        kind = type(v)
        if v is None or kind in (bool, int, str, bytes, torch.dtype, torch.device, torch.Size):
            return kind, v
        if kind is float:
            return kind, v.hex()
        if isinstance(v, Tensor):
            return self._tensor(v)
        if kind is types.FunctionType:
            return self._function(v)
        if kind in (tuple, list):
            return kind, tuple(map(self.value, v))
        if kind is dict:
            return kind, tuple((self.value(k), self.value(x)) for k, x in v.items())
        if kind is types.ModuleType:
            return self._module(v)
        if kind is types.MethodType:
            return kind, self.value(v.__func__), self.value(v.__self__)
        if kind is functools.partial:
            return kind, self.value(v.func), self.value(v.args), self.value(v.keywords)
        if isinstance(v, Enum):
            return kind, v.name
        if kind is types.BuiltinFunctionType:
            return self._builtin(v)
        if isinstance(v, type):
            if _from_torch(v) or (v.__module__ == "builtins" and v.__name__ in _PURE_BUILTINS):
                return "class", v
            raise _Opaque
        if _from_torch(kind) and not isinstance(v, torch.nn.Module):
            return self._torch_constant(v)
        return self._object(v)

    def attributes(self) -> Hashable:
        """Return the key of every named attribute of every owner met. More owners and names may turn up on the way."""
        keys: list[Hashable] = []
        done: set[tuple[int, str]] = set()
        progress = True
        while progress:
            progress = False
            for i, owner in enumerate(list(self._owners)):
                for name in list(self._names):
                    if (i, name) not in done:
                        done.add((i, name))
                        progress = True
                        keys.append((i, name, self._attribute(owner, name)))
        return tuple(keys)

    def _first_time(self, v: Any) -> bool:
        if id(v) in self._seen:
            return False
        self._seen[id(v)] = len(self._seen)
        return True

    def _tensor(self, t: Tensor) -> Hashable:
        if self._first_time(t):
            self.tensors.append(t)
        if t.layout is not torch.strided:
            raise _Opaque
        return "tensor", self._seen[id(t)], type(t), t.dtype, t.shape, t.stride(), t.device

    def _function(self, f: types.FunctionType) -> Hashable:
        if _from_torch(f):
            return "torch", f
        if not self._first_time(f):
            return "function", self._seen[id(f)]
        names = _names(f.__code__)
        if names is None:
            raise _Opaque
        used = []
        for name in names:
            self._names[name] = None
            if name in f.__globals__:
                used.append((name, self.value(f.__globals__[name])))
            elif hasattr(builtins, name) and name not in _PURE_BUILTINS:
                raise _Opaque
        try:
            cells = tuple(self.value(cell.cell_contents) for cell in f.__closure__ or ())
        except ValueError:  # an empty cell
            raise _Opaque from None
        return f.__code__, cells, self.value(f.__defaults__), self.value(f.__kwdefaults__), tuple(used)

    def _builtin(self, v: types.BuiltinFunctionType) -> Hashable:
        owner = v.__self__  # the module or the class that it belongs to, or the object it is bound to
        module = v.__module__ or getattr(
            owner, "__name__" if isinstance(owner, types.ModuleType) else "__module__", None
        )
        pure = module in _PURE_MODULES or (module == "builtins" and v.__name__ in _PURE_BUILTINS)
        if pure or v in _PURE_FUNCTIONS or (not isinstance(owner, Tensor) and _in_torch(module)):
            return "builtin", v
        raise _Opaque

    def _torch_constant(self, v: Any) -> Hashable:
        if isinstance(v, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return "operator", v
        raise _Opaque

    def _module(self, m: types.ModuleType) -> Hashable:
        if m is not torch and not _from_torch(m) and m not in (math, operator) and self._first_time(m):
            self._owners.append(m)
        return "module", m.__name__

    def _object(self, v: Any) -> Hashable:
        kind = type(v)
        own = [c for c in kind.__mro__ if c not in (object, torch.nn.Module)]
        if not all(map(_is_plain, own)):
            raise _Opaque
        if self._first_time(v):
            self._owners.append(v)
            # Operators and calls reach these without naming them.
            special = [f for c in own for n, f in vars(c).items() if n.startswith("__") or n == "forward"]
            methods = [f for f in special if type(f) is types.FunctionType and f.__name__ not in _UNUSED_METHODS]
            return kind, self._seen[id(v)], tuple(map(self.value, methods))
        return kind, self._seen[id(v)]

    def _attribute(self, owner: Any, name: str) -> Hashable:
        """Return the key of `owner.name`, found without running code; None if there is no such attribute."""
        if isinstance(owner, types.ModuleType):
            return self.value(vars(owner)[name]) if name in vars(owner) else None
        found = next((vars(c)[name] for c in type(owner).__mro__ if name in vars(c)), None)
        if isinstance(found, property):
            return self.value(found.fget)
        if isinstance(found, functools.cached_property) and name not in vars(owner):
            return self.value(found.func)
        if isinstance(found, types.MemberDescriptorType):
            return self.value(getattr(owner, name, None))
        if name in getattr(owner, "__dict__", ()):
            return self.value(vars(owner)[name])
        if isinstance(owner, torch.nn.Module):
            for part in (owner._parameters, owner._buffers, owner._modules):
                if name in part:
                    return self.value(part[name])
        if isinstance(found, (staticmethod, classmethod)):
            return self.value(found.__func__)
        return None if found is None else self.value(found)
