"""What a mask can be over whole blocks, by interval arithmetic on its graph.

Every value of the graph is bounded over each block of (query, key) pairs at once: indices by the block's corners,
integer operations by the usual rules, reads of captured integer tables by range minima and maxima. Where the bounds
settle the mask, a block is known to be full or absent without a look at any of its pairs; only the others need one.

Sound, not tight: whatever has no rule here (floating point, bit patterns) is unknown, which settles nothing.
Interval arithmetic: R. E. Moore, "Interval Analysis", 1966. Range minima by doubling: M. A. Bender and
M. Farach-Colton, "The LCA problem revisited", 2000.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .trace import INPUTS, Modifier

Tensor = torch.Tensor
aten = torch.ops.aten


@dataclass(frozen=True)
class Interval:
    """Bounds, both inclusive: int64, or bool with False < True. Of shape (B, H, nQ, nK), 1 where it does not vary."""

    lo: Tensor
    hi: Tensor

    @property
    def exact(self) -> bool:
        """Whether the value does not vary within any block, whatever the block."""
        return self.lo is self.hi


@dataclass(frozen=True)
class _Partial:
    """A read of a captured tensor that still lacks the indices that are None."""

    table: Tensor
    indices: tuple[Interval | None, ...]


#: Of a value in the graph: its bounds, the captured tensor (or what is computed from those alone) itself, or nothing.
_Known = Interval | _Partial | Tensor | None


def mask_bounds(
    modifier: Modifier, b: Tensor, h: Tensor, q: Interval, kv: Interval, captures: tuple[Tensor, ...]
) -> Interval | None:
    """Return bounds of a mask over blocks: where `lo` is True the block is full, where `hi` is False it is absent.

    Args:
        modifier: of kind "mask".
        b, h: the indices themselves, int64 of shapes (B, 1, 1, 1), (1, H, 1, 1).
        q, kv: first and last index of each block, int64 of shapes (1, 1, nQ, 1), (1, 1, 1, nK).

    Returns:
        bool bounds that broadcast to (B, H, nQ, nK), or None if nothing is known.
    """
    graph = modifier.forward.graph
    inputs: list[_Known] = [Interval(b, b), Interval(h, h), q, kv, *captures]
    values: dict[fx.Node, _Known] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    assert len(INPUTS["mask"]) + len(captures) == len(values), "a mask takes its four indices and its captures"
    for node in graph.nodes:
        if node.op == "call_function":
            values[node] = _bounds(node, values, like=q.lo)
    result: Any = graph.output_node().args[0]
    return values[result] if isinstance(values[result], Interval) else None  # type: ignore[return-value]


def _bounds(node: Any, values: dict[fx.Node, _Known], like: Tensor) -> _Known:
    dtype = node.meta["val"].dtype
    known = [values[n] for n in node.all_input_nodes]
    if known and all(isinstance(v, Tensor) for v in known):
        tensor: Any = values.__getitem__
        return node.target(*fx.node.map_arg(node.args, tensor), **node.kwargs)  # type: ignore[no-any-return]
    if node.target in (aten.index.Tensor, aten.select.int):
        result = _read(node, values, like)
    else:
        rule = _RULES.get(node.target._schema.name.removeprefix("aten::"))
        arguments = node.args[1:] if node.target is aten.full.default else node.args
        operands = [_operand(values[a] if isinstance(a, fx.Node) else a, like) for a in arguments]
        scaled = node.kwargs.get("alpha", 1) != 1
        if rule is None or scaled or dtype.is_floating_point or None in operands:
            return None
        result = rule(*operands)
    return _as_dtype(result, dtype) if isinstance(result, Interval) else result


def _operand(value: Any, like: Tensor) -> Interval | None:
    """Return the bounds of an operand: an interval, a rank-0 integer tensor, or a Python integer."""
    if isinstance(value, Interval):
        return value
    if isinstance(value, (bool, int)):
        value = torch.tensor(value, device=like.device)
    if not isinstance(value, Tensor) or value.dim() != 0 or value.dtype.is_floating_point:
        return None
    return _same((value if value.dtype == torch.bool else value.long()).view(1, 1, 1, 1))


def _as_dtype(x: Interval, dtype: torch.dtype) -> Interval:
    """Return bounds of the value once it has `dtype`: the whole range of a narrow one where it may wrap around."""
    if dtype == torch.bool:
        return _truth(x)
    x = _numbers(x)
    if dtype == torch.int64:
        return x
    info = torch.iinfo(dtype)
    fits = (x.lo >= info.min) & (x.hi <= info.max)
    return Interval(torch.where(fits, x.lo, info.min), torch.where(fits, x.hi, info.max))


def _same(value: Tensor) -> Interval:
    return Interval(value, value)


# ---- reads of captured tensors
#: Largest table of range minima, in elements; larger captured tensors are bounded as a whole.
_RANGE_TABLE = 2**26


def _read(node: Any, values: dict[fx.Node, _Known], like: Tensor) -> _Known:
    base = values[node.args[0]]
    if isinstance(base, Tensor):
        base = _Partial(base, (None,) * base.dim())
    if not isinstance(base, _Partial):
        return None
    free = [dim for dim, index in enumerate(base.indices) if index is None]
    indices = list(base.indices)
    if node.target is aten.select.int:
        given = {free[node.args[1]]: node.args[2]}
    else:
        given = {dim: values[i] for dim, i in zip(free, node.args[1], strict=False) if i is not None}
    for dim, index in given.items():
        indices[dim] = _operand(index, like)
        if indices[dim] is None:
            return None
    if None in indices:
        return _Partial(base.table, tuple(indices))
    return _table_bounds(base.table, [i for i in indices if i is not None])


def _table_bounds(table: Tensor, indices: list[Interval]) -> Interval | None:
    """Return bounds of table[indices]."""
    if table.dtype.is_floating_point or table.numel() == 0:
        return None
    table = table.long()
    places = [_places(i, n) for i, n in zip(indices, table.shape, strict=True)]
    ranged = [dim for dim, index in enumerate(indices) if not index.exact]
    if not ranged:
        return _same(table[tuple(p.lo for p in places)])
    levels = table.shape[ranged[0]].bit_length()
    if len(ranged) > 1 or levels * table.numel() > _RANGE_TABLE:
        return Interval(table.amin().view(1, 1, 1, 1), table.amax().view(1, 1, 1, 1))
    dim = ranged[0]
    fixed = [p.lo for d, p in enumerate(places) if d != dim]
    table, place = table.movedim(dim, -1), places[dim]
    level = torch.log2((place.hi - place.lo + 1).double()).long()
    corners = [(level, *fixed, place.lo), (level, *fixed, place.hi - (1 << level) + 1)]
    bounds = []
    for narrower in (torch.minimum, torch.maximum):
        ranges = _doubled(table, levels, narrower)
        bounds.append(narrower(ranges[corners[0]], ranges[corners[1]]))
    return Interval(*bounds)


def _places(index: Interval, size: int) -> Interval:
    """Return the places that an index reads: negative ones count from the end, and one of either sign is any place."""
    index = _numbers(index)

    def wrap(i: Tensor) -> Tensor:
        return torch.where(i < 0, i + size, i).clamp(0, size - 1)

    if index.exact:
        return _same(wrap(index.lo))
    mixed = (index.lo < 0) & (index.hi >= 0)
    return Interval(torch.where(mixed, 0, wrap(index.lo)), torch.where(mixed, size - 1, wrap(index.hi)))


def _doubled(table: Tensor, levels: int, narrower: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return minima (or maxima) over 1, 2, 4, ... elements from each on: (levels, *table.shape)."""
    rows = [table]
    for level in range(levels - 1):
        rows.append(narrower(rows[-1], rows[-1].roll(-(1 << level), -1)))
    return torch.stack(rows)


# ---- rules
def _numbers(x: Interval) -> Interval:
    """Return the bounds as integers."""
    if x.lo.dtype == torch.int64:
        return x
    return _same(x.lo.long()) if x.exact else Interval(x.lo.long(), x.hi.long())


def _truth(x: Interval) -> Interval:
    """Return whether x is not zero."""
    return x if x.lo.dtype == torch.bool else Interval((x.lo > 0) | (x.hi < 0), (x.lo != 0) | (x.hi != 0))


def _growing(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Interval, Interval], Interval]:
    """Return the rule of a function that grows with both operands."""
    return lambda x, y: _same(fn(x.lo, y.lo)) if x.exact and y.exact else Interval(fn(x.lo, y.lo), fn(x.hi, y.hi))


_add = _growing(operator.add)


def _neg(x: Interval) -> Interval:
    return _same(-x.lo) if x.exact else Interval(-x.hi, -x.lo)


def _mul(x: Interval, y: Interval) -> Interval:
    if x.exact and y.exact:
        return _same(x.lo * y.lo)
    one, two, three, four = x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi
    lo = torch.minimum(torch.minimum(one, two), torch.minimum(three, four))
    return Interval(lo, torch.maximum(torch.maximum(one, two), torch.maximum(three, four)))


def _abs(x: Interval) -> Interval:
    if x.exact:
        return _same(x.lo.abs())
    return Interval(torch.maximum(x.lo, -x.hi).clamp_min(0), torch.maximum(x.hi, -x.lo))


def _floor_divide(x: Interval, y: Interval) -> Interval:
    """By a divisor that varies, the quotient is no further from zero than the dividend, and one less by rounding."""
    fixed = (y.lo == y.hi) & (y.lo != 0)
    divisor = torch.where(fixed, y.lo, 1)
    ends = x.lo.div(divisor, rounding_mode="floor"), x.hi.div(divisor, rounding_mode="floor")
    largest = torch.maximum(x.lo.abs(), x.hi.abs())
    lo, hi = torch.minimum(*ends), torch.maximum(*ends)
    return Interval(torch.where(fixed, lo, -largest - 1), torch.where(fixed, hi, largest))


def _remainder(x: Interval, y: Interval) -> Interval:
    """Between two multiples of the divisor it grows; otherwise it takes any value between zero and the divisor."""
    divisor = torch.where((y.lo == y.hi) & (y.lo != 0), y.lo, 1)
    grows = x.lo.div(divisor, rounding_mode="floor") == x.hi.div(divisor, rounding_mode="floor")
    grows &= (y.lo == y.hi) & (y.lo != 0)
    lo = torch.where(grows, x.lo.remainder(divisor), (y.lo + 1).clamp_max(0))
    return Interval(lo, torch.where(grows, x.hi.remainder(divisor), (y.hi - 1).clamp_min(0)))


def _less(x: Interval, y: Interval) -> Interval:
    return Interval(x.hi < y.lo, x.lo < y.hi)


def _less_equal(x: Interval, y: Interval) -> Interval:
    return Interval(x.hi <= y.lo, x.lo <= y.hi)


def _equal(x: Interval, y: Interval) -> Interval:
    return Interval((x.lo == y.hi) & (x.hi == y.lo), (x.lo <= y.hi) & (y.lo <= x.hi))


def _not(x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


def _xor(x: Interval, y: Interval) -> Interval:
    known = (x.lo == x.hi) & (y.lo == y.hi)
    return Interval(known & (x.lo ^ y.lo), ~known | (x.lo ^ y.lo))


def _where(c: Interval, x: Interval, y: Interval) -> Interval:
    c, x, y = _truth(c), _numbers(x), _numbers(y)
    lo = torch.where(c.lo, x.lo, torch.where(c.hi, torch.minimum(x.lo, y.lo), y.lo))
    return Interval(lo, torch.where(c.lo, x.hi, torch.where(c.hi, torch.maximum(x.hi, y.hi), y.hi)))


_Rule = Callable[..., Interval | None]


def _on_numbers(rule: _Rule) -> _Rule:
    return lambda *operands: rule(*map(_numbers, operands))


def _on_truth(rule: _Rule) -> _Rule:
    return lambda *operands: rule(*map(_truth, operands))


def _on_bools(rule: _Rule) -> _Rule:
    """Return the rule for operands that are bool, and none for integers, whose bit patterns have no bounds."""
    return lambda *operands: rule(*operands) if all(x.lo.dtype == torch.bool for x in operands) else None


_NUMBER_RULES: dict[str, _Rule] = {
    "add": _add,
    "sub": lambda x, y: _add(x, _neg(y)),
    "rsub": lambda x, y: _add(y, _neg(x)),
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "maximum": _growing(torch.maximum),
    "minimum": _growing(torch.minimum),
    "clamp_min": _growing(torch.maximum),
    "clamp_max": _growing(torch.minimum),
    "lt": _less,
    "le": _less_equal,
    "gt": lambda x, y: _less(y, x),
    "ge": lambda x, y: _less_equal(y, x),
    "eq": _equal,
    "ne": lambda x, y: _not(_equal(x, y)),
}
_BOOL_RULES: dict[str, _Rule] = {"and": _growing(operator.and_), "or": _growing(operator.or_), "xor": _xor, "not": _not}
_OTHER_RULES: dict[str, _Rule] = {
    "full": lambda value: value,
    "where": _where,
    "_to_copy": lambda x: x,
    "clone": lambda x: x,
    "zeros_like": lambda x: _same(torch.zeros_like(x.lo)),
    "ones_like": lambda x: _same(torch.ones_like(x.lo)),
}
_RULES: dict[str, _Rule] = {
    **{name: _on_numbers(rule) for name, rule in _NUMBER_RULES.items()},
    **{f"logical_{name}": _on_truth(rule) for name, rule in _BOOL_RULES.items()},
    **{f"bitwise_{name}": _on_bools(rule) for name, rule in _BOOL_RULES.items()},
    **_OTHER_RULES,
}
