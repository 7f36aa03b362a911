"""From a graph over one score to a graph over a whole tile of scores.

A traced modifier computes one score from rank-0 values. Over a tile the same operators run once each, on tensors with
four leading dimensions (batch, head, query, key) of size 1 wherever a value does not depend on that axis: an index
that only varies with the head stays a (1, H, 1, 1) tensor however large the tile. This does what nested `torch.vmap`
would do, with one torch call per operation and gradients of captured tensors that never take more than tile + table.

Three rules make it exact:

* a rank-0 captured tensor or constant gets four dimensions before it meets a tile, so that type promotion sees
  operands of one category, as it did while tracing;
* reading `table[i][j]` becomes one read `table[i, j]`, so that no tile of table rows is ever made;
* what depends on captured tensors alone is computed as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import UnsupportedError
from .optable import INDEX, OPS, POINTWISE

Tensor = torch.Tensor
aten = torch.ops.aten

#: Leading dimensions of everything that differs from score to score.
TILE_RANK = 4


@dataclass(frozen=True)
class _Whole:
    """A value that does not differ from score to score, of its own rank."""

    node: fx.Node
    rank: int


@dataclass(frozen=True)
class _Tile:
    """A rank-0 value per score."""

    node: fx.Node


@dataclass(frozen=True)
class _Partial:
    """A read of a captured tensor that still lacks the indices that are None."""

    base: fx.Node
    indices: tuple[fx.Node | None, ...]


_Value = _Whole | _Tile | _Partial


def broadcast(scalar: fx.GraphModule, num_inputs: int, name: str) -> fx.GraphModule:
    """Return the graph over tiles of the normalised graph `scalar` over one score.

    Args:
        scalar: graph whose first `num_inputs` placeholders are rank-0 values that differ from score to score, and
            whose others are captured tensors. Every node carries its traced value in `meta["val"]`.
        num_inputs: number of leading placeholders; in the result each is a tensor of rank 4 with broadcast dims of 1.
        name: "score_mod" or "mask_mod", for messages.

    Raises:
        UnsupportedError: a captured vector indexed per score is used otherwise than by indexing it further.
    """
    return _Broadcast(num_inputs, name).run(scalar)


class _Broadcast:
    def __init__(self, num_inputs: int, name: str) -> None:
        self.num_inputs = num_inputs
        self.name = name
        self.graph = fx.Graph()
        self.values: dict[Any, _Value] = {}
        self._raised: dict[fx.Node, fx.Node] = {}

    def run(self, scalar: fx.GraphModule) -> fx.GraphModule:
        for n, node in enumerate(scalar.graph.nodes):
            if node.op == "placeholder":
                new = self.graph.placeholder(node.target)
                rank = node.meta["val"].dim()
                self.values[node] = _Tile(new) if n < self.num_inputs else _Whole(new, rank)
            elif node.op == "output":
                self.graph.output(self._tile(self.values[node.args[0]]))
            else:
                self.values[node] = self._call(node)
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _call(self, node: Any) -> _Value:
        rank = node.meta["val"].dim()
        inputs = [self.values[n] for n in node.all_input_nodes]
        if node.target is aten.full.default:
            return self._constant(node, rank)
        if all(isinstance(v, _Whole) for v in inputs):
            return _Whole(self.graph.node_copy(node, self._whole), rank)
        kind = OPS[str(node.target)]
        if kind == INDEX:
            return self._index(node)
        if kind == POINTWISE and rank == 0:
            return _Tile(self.graph.node_copy(node, lambda n: self._tile(self.values[n])))
        raise UnsupportedError(
            f"{self.name}: expected vectors that are read per score to be indexed down to single elements, got "
            f"{node.target} on one{at(node)}"
        )

    def _constant(self, node: Any, rank: int) -> _Whole:
        # On the device of the tile, which tracing did not know.
        like = next(iter(self.graph.nodes))
        size, value = node.args
        new = self.graph.call_function(aten.new_full.default, (like, size, value), {"dtype": node.kwargs["dtype"]})
        return _Whole(new, rank)

    def _whole(self, node: fx.Node) -> fx.Node:
        value = self.values[node]
        assert isinstance(value, _Whole), "only called when no input differs from score to score"
        return value.node

    def _tile(self, value: _Value) -> fx.Node:
        """Return the node of rank 4 for a rank-0 value."""
        if isinstance(value, _Tile):
            return value.node
        if isinstance(value, _Partial) or value.rank != 0:
            raise UnsupportedError(f"{self.name}: expected a single element wherever a score is met, got a vector")
        if value.node not in self._raised:
            ones = [1] * TILE_RANK
            self._raised[value.node] = self.graph.call_function(aten.view.default, (value.node, ones))
        return self._raised[value.node]

    def _index(self, node: Any) -> _Value:
        """Compose an index or select with the reads before it."""
        base = self.values[node.args[0]]
        if isinstance(base, _Tile):
            raise UnsupportedError(f"{self.name}: expected to index captured tensors, got {node.target}{at(node)}")
        if isinstance(base, _Whole):
            base = _Partial(base.node, (None,) * base.rank)
        free = [dim for dim, index in enumerate(base.indices) if index is None]
        indices = list(base.indices)
        if node.target is aten.select.int:
            _, dim, position = node.args
            indices[free[dim]] = self._constant_index(position)
        else:
            for dim, index in zip(free, node.args[1], strict=False):
                indices[dim] = None if index is None else self._tile(self.values[index])
        if None in indices:
            return _Partial(base.base, tuple(indices))
        return _Tile(self.graph.call_function(read, (base.base, indices)))

    def _constant_index(self, position: int) -> fx.Node:
        like = next(iter(self.graph.nodes))
        return self.graph.call_function(
            aten.new_full.default, (like, [1] * TILE_RANK, position), {"dtype": torch.int64}
        )


def read(table: Tensor, indices: list[Tensor]) -> Tensor:
    """Return table[indices], one index per dimension, all broadcast together; differentiable in `table`.

    On the CPU by one flat index, which is 4 times as fast as `aten.index`, backward included. Negative indices count
    from the end.

    Raises:
        IndexError: an index is out of range (CPU; elsewhere as the device reports it).
    """
    if table.device.type != "cpu" or not table.is_contiguous() or table.numel() == 0 or torch.compiler.is_compiling():
        return aten.index.Tensor(table, indices)  # type: ignore[no-any-return]
    shape = torch.broadcast_shapes(*(i.shape for i in indices))  # type: ignore[no-untyped-call]
    if 0 in shape:
        return table.new_empty(shape)
    flat: Tensor | None = None
    for size, index in zip(table.shape, indices, strict=True):
        low, high = (int(x) for x in index.aminmax())
        if low < -size or high >= size:
            wrong = low if low < -size else high
            raise IndexError(f"index {wrong} is out of bounds for dimension of size {size} of a captured tensor")
        index = index.long()
        wrapped = index if low >= 0 else torch.where(index < 0, index + size, index)
        flat = wrapped if flat is None else flat * size + wrapped
    assert flat is not None, "an index always has a dimension"
    return table.view(-1).index_select(0, flat.reshape(-1)).view(shape)


def at(node: fx.Node) -> str:
    """Return " at file:line" for the place in the user's function that made `node`, or "" if it is not known."""
    where = node.meta.get("stack_trace")
    return f" at {where}" if where else ""
