"""Plain functions as mods inside `torch.compile`.

Dynamo runs the user's function symbolically, as it does for PyTorch's flex_attention: numbers and globals that it reads
become guards, tensors become inputs of the compiled graph. What it saw is then traced into a `Modifier` like any other
function. Only its digest, a constant, and the live tensors remain in the compiled graph.

This hooks into Dynamo where there is no public way. Where the hook does not fit the installed torch, compiling stops
with an error that names the public way: `tilewise.mods.score_mod` or `mask_mod`, called outside.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from ..errors import UnsupportedError
from .optable import OPS, VIEW
from .trace import INPUTS, Modifier, lookup, trace_graph

_NAME = "tilewise_trace_mod"

ADVICE = "trace it outside the compiled region with tilewise.mods.score_mod(fn) or tilewise.mods.mask_mod(fn)"


class _TraceMod(HigherOrderOperator):
    """Stands in the user's code for the tracing of `fn`; Dynamo replaces it by its results."""

    def __init__(self) -> None:
        super().__init__(_NAME)  # type: ignore[no-untyped-call]

    def __call__(self, fn: Any, kind: str, score_dtype: torch.dtype) -> Any:
        raise RuntimeError(f"{kind}_mod: expected to be compiled by Dynamo here; {ADVICE}")


_trace_mod = _TraceMod()


def trace_in_graph(fn: Any, kind: str, score_dtype: torch.dtype) -> tuple[Modifier, tuple[torch.Tensor, ...]]:
    """Return what `trace` does, while Dynamo compiles the caller."""
    _register()
    digest, captures = _trace_mod(fn, kind, score_dtype)
    return _constant_lookup(digest), tuple(captures)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_lookup(digest: str) -> Modifier:
    return lookup(digest)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _register() -> None:
    """Tell Dynamo, while it compiles, how to treat `_trace_mod`."""
    try:
        from torch._dynamo.variables import higher_order_ops

        higher_order_ops._hop_name_to_variable_class.setdefault(_NAME, _variable_class())
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"mods: torch {torch.__version__} cannot compile a plain function; {ADVICE}") from error


def _variable_class() -> Any:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import construct_tensor_variable
    from torch._dynamo.variables.higher_order_ops import (
        TorchHigherOrderOperatorVariable,
        discard_graph_changes,
        speculate_subgraph,
    )
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.tensor import TensorVariable

    from .trace import Subscripts

    class TraceModVariable(TorchHigherOrderOperatorVariable):
        _HOP_NAME = _NAME
        _ALLOW_FALLBACK_TO_EAGER = False

        def python_type(self) -> type:
            return _TraceMod

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return self.call_function(tx, args, kwargs)

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            fn, (kind, score_dtype) = args[0], (a.as_python_constant() for a in args[1:])
            with discard_graph_changes(tx):
                scalars = [scalar(tx, score_dtype if name == "score" else torch.int64) for name in INPUTS[kind]]
            options: Any = {"description": _NAME, "source_target": self.value, "set_subgraph_inputs": "flatten_manual"}
            with Subscripts(f"{kind}_mod"):
                _, graph, lifted = speculate_subgraph(tx, fn, scalars, {}, **options)
            modifier, used = _trace_speculated(fx.GraphModule(tx.output.nn_modules, graph), kind, score_dtype)
            outer = {inner.node.name: proxy for proxy, inner in lifted.items()}
            captures: list[Any] = [
                construct_tensor_variable(TensorVariable, tx, p, p.node.meta["example_value"], None, {})
                for p in map(outer.__getitem__, used)
            ]
            return TupleVariable([VariableTracker.build(tx, modifier.digest), TupleVariable(captures)])

    def scalar(tx: Any, dtype: torch.dtype) -> Any:
        """Return a rank-0 input; a score requires a gradient, so that Dynamo keeps derivatives of the user's own."""
        build, floating = VariableTracker.build, dtype.is_floating_point
        one = build(tx, torch.zeros).call_function(tx, [build(tx, (1,))], {"dtype": build(tx, dtype)})
        options = {"dtype": build(tx, dtype), "requires_grad": build(tx, floating)}
        leaf = one.call_method(tx, "new_empty", [build(tx, [])], options)
        return leaf.call_method(tx, "clone", [], {}) if floating else leaf

    return TraceModVariable


def _trace_speculated(module: fx.GraphModule, kind: str, score_dtype: torch.dtype) -> tuple[Modifier, list[str]]:
    """Return the Modifier of a graph captured by Dynamo, and the names of the placeholders that are its captures."""
    if any(getattr(node.target, "__name__", "") == "autograd_function_apply" for node in module.graph.nodes):
        raise UnsupportedError(
            f"{kind}_mod: expected operations whose derivative is known, got a torch.autograd.Function"
        )
    _make_constant(module.graph)
    lifted = module.graph.find_nodes(op="placeholder")[len(INPUTS[kind]) :]
    values = [node.meta["example_value"] for node in lifted]
    stand_ins = [
        torch.empty_strided(_hints(v.shape), _hints(v.stride()), dtype=v.dtype) if isinstance(v, torch.Tensor) else None
        for v in values
    ]
    module.recompile()
    with torch._guards.tracing(None):  # not on Dynamo's own fake tensors
        modifier, captures = trace_graph(lambda *scalars: module(*scalars, *stand_ins), kind, score_dtype)
    if any(map(_may_hold_sizes, modifier.forward.graph.nodes)):
        for value in values:
            if isinstance(value, torch.Tensor):
                _guarded((*value.shape, *value.stride()))
    names = {id(t): node.name for t, node in zip(stand_ins, lifted, strict=True)}
    return modifier, [names[id(t)] for t in captures]


def _make_constant(graph: fx.Graph) -> None:
    """Put constants where the function reads sizes and numbers that Dynamo holds symbolic."""
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        whole_size = isinstance(value, torch.Size) and any(user.target is not operator.getitem for user in node.users)
        if node.users and (symbolic or whole_size):
            constant = _guarded(value)
            for user in list(node.users):
                user.args = fx.node.map_arg(user.args, lambda n: constant if n is node else n)  # noqa: B023
                user.kwargs = fx.node.map_arg(user.kwargs, lambda n: constant if n is node else n)  # noqa: B023
            if node.op != "placeholder":
                graph.erase_node(node)


def _guarded(value: Any) -> Any:
    """Return the number or sizes behind symbolic ones. Dynamo then compiles again for others."""
    if isinstance(value, tuple):
        return tuple(map(_guarded, value))
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds.get(type(value), int)(value)


def _may_hold_sizes(node: fx.Node) -> bool:
    """Whether the arguments of an operation may hold sizes of captured tensors that nobody read."""
    if node.op != "call_function":
        return False
    return OPS[str(node.target)] == VIEW or (node.target is torch.ops.aten.full.default and bool(node.args[0]))


def _hints(sizes: Any) -> list[int]:
    """Return the sizes Dynamo saw, without a guard on them."""
    return [int(n.node.hint) if isinstance(n, torch.SymInt) else int(n) for n in sizes]
