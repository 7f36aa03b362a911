"""From a Python function to a `Modifier`: a graph over one score, its derivative, and the tensors it reads.

A score_mod or mask_mod is run once, on rank-0 fake tensors, under `make_fx`. What it computed is kept as a graph of
operations from the closed table; tensors it captured become inputs of that graph. A `Modifier` is therefore a pure
function of its inputs, holds no tensors, and is identified by the digest of its graph: new tensors, new data and new
names of arguments give the same Modifier; a new number, dtype or operation gives another.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..canonical import digest as canonical_digest
from ..errors import UnsupportedError, describe, wrong_type, wrong_value
from .broadcast import at, broadcast
from .fingerprint import Fingerprint, fingerprint
from .optable import CONSTANT, OPS, POINTWISE

Tensor = torch.Tensor
Kind = Literal["score", "mask"]
aten = torch.ops.aten

#: Names of the rank-0 inputs of a graph, by kind.
INPUTS: dict[str, tuple[str, ...]] = {
    "score": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask": ("b", "h", "q_idx", "kv_idx"),
}


@dataclass(frozen=True, eq=False)
class Modifier:
    """A traced score_mod or mask_mod: what it computes, without the tensors it reads.

    Two modifiers are equal if their digests are. Constructing one registers it, so that a torch operator, whose
    arguments cannot hold a graph, finds it again by digest with `lookup`.

    Attributes:
        kind: "score" or "mask".
        forward: graph over rank-0 values, (score, b, h, q_idx, kv_idx, *captures) -> score or
            (b, h, q_idx, kv_idx, *captures) -> bool. Every node is a call of an operation in `optable.OPS`.
        digest: SHA-256 of the graph, canonically numbered; captured tensors enter by dtype and rank only.
        num_captures: number of captured tensors.
        captures: dtype, shape and strides of the captured tensors with which the graph was traced.
    """

    kind: str
    forward: fx.GraphModule
    digest: str
    num_captures: int
    captures: tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], ...] = field(repr=False, default=())

    def __post_init__(self) -> None:
        _REGISTRY.setdefault(self.digest, self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Modifier) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def name(self) -> str:
        """The argument's name, for messages: "score_mod" or "mask_mod"."""
        return f"{self.kind}_mod"

    @functools.cached_property
    def gradient(self) -> fx.GraphModule:
        """The derivative: graph (score, b, h, q_idx, kv_idx, *captures, grad) -> dscore, from `torch.func.vjp`.

        Raises:
            ValueError: this is a mask.
            UnsupportedError: the derivative needs an operation that is not in the table.
        """
        if self.kind != "score":
            raise ValueError("gradient: expected a score_mod, got a mask_mod (its result is not differentiable)")
        return _trace_gradient(self)

    @functools.cached_property
    def tile(self) -> Callable[..., Tensor]:
        """The graph over a tile: takes every input as a tensor of rank 4 (batch, head, query, key), of size 1 along the
        axes on which it does not depend, then the captured tensors; its result has size 1 likewise."""
        module = broadcast(self.forward, len(INPUTS[self.kind]), self.name)
        return module.forward

    def apply_score(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, captures: Sequence[Tensor]
    ) -> Tensor:
        """Return the modified scores of a tile, differentiable in `score` and `captures`.

        Args:
            score: (B, H, M, N), floating.
            b, h, q_idx, kv_idx: int64 indices of shapes (B,), (H,), (M,), (N,), on the device of `score`.
            captures: the captured tensors, in the order of the graph.

        Returns:
            (B, H, M, N) of the dtype of `score`; possibly a broadcast view.
        """
        out = self.tile(score, *_axes(b, h, q_idx, kv_idx), *captures)
        return out.to(score.dtype).expand(score.shape)

    def apply_mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, captures: Sequence[Tensor]) -> Tensor:
        """Return which scores of a tile are visible.

        Args:
            b, h, q_idx, kv_idx: int64 indices of shapes (B,), (H,), (M,), (N,).
            captures: the captured tensors, in the order of the graph.

        Returns:
            bool (B, H, M, N); a broadcast view along axes on which the mask does not depend.
        """
        out = self.tile(*_axes(b, h, q_idx, kv_idx), *captures)
        return out.expand(b.shape[0], h.shape[0], q_idx.shape[0], kv_idx.shape[0])


def _axes(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, ...]:
    """Return the indices, each along its own axis of a tile."""
    return b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q_idx.view(1, 1, -1, 1), kv_idx.view(1, 1, 1, -1)


_REGISTRY: dict[str, Modifier] = {}


def lookup(digest: str) -> Modifier:
    """Return the Modifier of that digest.

    Raises:
        RuntimeError: none of that digest has been constructed in this process.
    """
    try:
        return _REGISTRY[digest]
    except KeyError:
        raise RuntimeError(
            f"digest: expected that of a score_mod or mask_mod traced in this process, got {digest!r}; "
            "trace the function again (tilewise.mods.score_mod or mask_mod) before running an exported program"
        ) from None


@dataclass(frozen=True, eq=False)
class TracedMod:
    """A traced function with the tensors it captured, accepted wherever the function is.

    Make one with `tilewise.mods.score_mod` or `mask_mod`. The tensors stay the ones captured when it was made: their
    data may change, but rebinding the function's variables is not seen.
    """

    modifier: Modifier
    captures: tuple[Tensor, ...]


def trace(
    fn: Any,
    kind: Kind,
    aux_tensors: Sequence[Tensor] | None = None,
    score_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Modifier, tuple[Tensor, ...]]:
    """Return the Modifier of `fn` and the tensors it captured, in the order of the graph's inputs.

    Tracing costs some 20 ms, so it is done once per `fingerprint` of `fn`; the tensors are read anew on each call.

    Args:
        fn: pointwise function of (score, b, h, q_idx, kv_idx) or (b, h, q_idx, kv_idx), on rank-0 tensors; or a
            TracedMod, returned as it is (`aux_tensors` are then already part of it).
        kind: "score" or "mask".
        aux_tensors: passed to `fn` as one trailing list, if not None.
        score_dtype: dtype of `score`: float32, or float64 for float64 problems.
        device: device of the indices and the score.

    Raises:
        TypeError: not a function, wrong number of arguments, result of the wrong dtype.
        ValueError: result not rank 0, data-dependent Python control flow, captured tensors changed.
        UnsupportedError: an operation outside the table, or a `@cute.jit` function.
    """
    name = f"{kind}_mod"
    if isinstance(fn, TracedMod):
        if fn.modifier.kind != kind:
            raise wrong_type(name, f"a function or a traced {name}", fn.modifier.name)
        return fn.modifier, fn.captures
    if torch.compiler.is_dynamo_compiling():
        from .dynamo import trace_in_graph

        bound = fn if aux_tensors is None else lambda *scalars: fn(*scalars, list(aux_tensors))
        return trace_in_graph(bound, kind, score_dtype)
    if not callable(fn):
        raise wrong_type(name, f"a function of ({', '.join(INPUTS[kind])})", fn)
    if hasattr(fn, "_dsl_cls"):  # set by the decorator @cute.jit
        raise UnsupportedError(
            f"{name}: backend cpu cannot run a @cute.jit function; write it as a function of torch operations, which "
            "every backend runs"
        )
    device = torch.device(device)
    aux = None if aux_tensors is None else list(aux_tensors)
    found = fingerprint(fn, aux or ())
    if found is None:
        return _trace(fn, kind, aux, score_dtype, device)
    key = (found.key, kind, aux is None, score_dtype, device)
    entry = _CACHE.get(key)
    if entry is None:
        modifier, captures = _trace(fn, kind, aux, score_dtype, device)
        slots = _slots(captures, found)
        if slots is None:
            return modifier, captures
        entry = _CACHE.put(key, _Entry(modifier, slots))
    return entry.modifier, tuple(found.tensors[s] for s in entry.slots)


def trace_graph(fn: Callable[..., Any], kind: str, score_dtype: torch.dtype) -> tuple[Modifier, tuple[Tensor, ...]]:
    """Return what `trace` does for a function that another tracer made: always traced anew."""
    return _trace(fn, kind, None, score_dtype, torch.device("cpu"))


# ---- cache of traces
@dataclass(frozen=True)
class _Entry:
    """A Modifier, and for each of its captures the position among the tensors of the fingerprint."""

    modifier: Modifier
    slots: tuple[int, ...]


class _Cache:
    """The most recently used traces, by fingerprint."""

    def __init__(self, capacity: int) -> None:
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._capacity = capacity

    def get(self, key: Any) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Any, entry: _Entry) -> _Entry:
        self._entries[key] = entry
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return entry


_CACHE = _Cache(capacity=512)


def _slots(captures: tuple[Tensor, ...], found: Fingerprint) -> tuple[int, ...] | None:
    """Return where the captures stand in the fingerprint; None if one was reached by a way it does not know."""
    position = {id(t): i for i, t in enumerate(found.tensors)}
    if all(id(t) in position for t in captures):
        return tuple(position[id(t)] for t in captures)
    return None


# ---- tracing
#: What reads a tensor's value into Python.
_READS = frozenset(
    {
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__complex__,
        Tensor.__index__,
        Tensor.__array__,
        Tensor.__contains__,
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
    }
)


#: dtypes that torch takes as masks where it expects indices.
_MASKS = (torch.bool, torch.uint8)


class Subscripts(TorchFunctionMode):
    """Subscripts with rank-0 tensors stay tensor operations, where Python would read the tensors' values."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(k, Tensor) and k.dtype in _MASKS for k in keys):
            raise TypeError(f"{self.name}: expected integer indices, got a mask at {_user_line()}")
        return _subscript(args[0], keys)


class _Watch(Subscripts):
    """While the user's function runs: refuse reads of values, note the place of each operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = _user_line()
        fx.traceback.set_stack_trace([where])
        if func in _READS:
            raise wrong_value(
                self.name,
                "no Python control flow or conversion that depends on a tensor's value (torch.where chooses by value)",
                f"{func.__name__} at {where}",
            )
        out = super().__torch_function__(func, types, args, kwargs)
        # What the function computes under no_grad is a constant to the derivative.
        return out.detach() if isinstance(out, Tensor) and not torch.is_grad_enabled() else out


class _ReadOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While the user's function runs: refuse writes to captured tensors before they happen."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments if func._schema.is_mutable else ():
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and not isinstance(given.get(argument.name), FakeTensor):
                raise _side_effect(self.name, func, f" at {_user_line()}")
        return func(*args, **(kwargs or {}))


def _side_effect(name: str, func: Any, where: str) -> ValueError:
    return wrong_value(name, "a function without side effects", f"{func}, which writes in place{where}")


def _subscript(t: Tensor, key: tuple[Any, ...]) -> Tensor:
    """Return t[key], with rank-0 integer tensors in `key` as indices that stay symbolic.

    Plain indexing would read their values. Everything else in the key is applied first.
    """
    keys = list(key)
    if not any(isinstance(k, Tensor) for k in keys):
        return t[key]
    if Ellipsis in [k for k in keys if not isinstance(k, Tensor)]:
        where = next(i for i, k in enumerate(keys) if k is Ellipsis)
        missing = t.dim() - sum(k is not None and k is not Ellipsis for k in keys)
        keys[where : where + 1] = [slice(None)] * missing
    basic = tuple(slice(None) if isinstance(k, Tensor) else k for k in keys)
    if any(k is None or isinstance(k, int) or (isinstance(k, slice) and k != slice(None)) for k in basic):
        t = t[basic]
    indices = [k if isinstance(k, Tensor) else None for k in keys if not isinstance(k, int)]
    return torch.ops.aten.index(t, indices)  # type: ignore[no-any-return]


_TORCH = torch.__path__[0]


def _user_line() -> str:
    """Return "file:line" of the innermost caller outside torch and this module."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(_TORCH) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown place"


def _trace(
    fn: Callable[..., Any], kind: str, aux: list[Tensor] | None, score_dtype: torch.dtype, device: torch.device
) -> tuple[Modifier, tuple[Tensor, ...]]:
    name = f"{kind}_mod"
    inputs = INPUTS[kind]
    _check_arity(fn, name, inputs, aux is not None)
    dtypes = [score_dtype if i == "score" else torch.int64 for i in inputs]
    with torch.inference_mode(False), torch.enable_grad():
        example = [torch.zeros((), dtype=d, device=device) for d in dtypes]
        if kind == "score":  # not a leaf, so that the function may write to it
            example[0] = example[0].requires_grad_().clone()

    def call(*args: Tensor) -> Tensor:
        with _Watch(name), _ReadOnly(name):
            out = fn(*args) if aux is None else fn(*args, aux)
        _check_result(out, name, score_dtype)
        _check_derivative(out, name)
        return out  # type: ignore[no-any-return]

    with torch.inference_mode(False), torch.enable_grad():
        return _lift(_make_fx(call, example), kind)


#: make_fx keeps its state in globals: one thread traces at a time.
_TRACING = threading.RLock()


def _make_fx(fn: Callable[..., Tensor], example: Sequence[Tensor], table: Any = None) -> fx.GraphModule:
    """Trace `fn` on fake tensors: no data is read, nothing runs on a device, nothing captured can be changed."""
    from torch.fx.experimental.proxy_tensor import make_fx  # costs an import that plain attention does not need

    tracer = make_fx(fn, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)
    with _TRACING, _without_autocast(), fx.traceback.preserve_node_meta():
        return tracer(*example)


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _check_arity(fn: Callable[..., Any], name: str, inputs: tuple[str, ...], aux: bool) -> None:
    expected = (*inputs, "aux_tensors") if aux else inputs
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a builtin that does not tell
    try:
        signature.bind(*expected)
    except TypeError:
        raise TypeError(
            f"{name}: expected a function of ({', '.join(expected)}), got {getattr(fn, '__qualname__', fn)}{signature}"
        ) from None


def _check_result(out: Any, name: str, score_dtype: torch.dtype) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"{name}: expected a function that returns a tensor, got {describe(out)}")
    if name == "mask_mod" and out.dtype != torch.bool:
        raise TypeError(f"mask_mod: expected a function that returns bool, got {out.dtype}")
    if name == "score_mod" and not out.dtype.is_floating_point:
        raise TypeError(f"score_mod: expected a function that returns a floating-point score, got {out.dtype}")
    if out.dim() != 0:
        raise wrong_value(name, "a function that returns one value per score (rank 0)", f"shape {tuple(out.shape)}")


def _check_derivative(out: Tensor, name: str) -> None:
    """Refuse a derivative of the user's own: the graph of operations, which is all that is kept, does not hold it."""
    todo, seen = [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise UnsupportedError(
                f"{name}: expected operations whose derivative is known, got the torch.autograd.Function "
                f"{type(node).__name__.removesuffix('Backward')}"
            )
        todo += [following for following, _ in node.next_functions]


# ---- normalising a trace
#: Keyword arguments that say where a result lies, not what it is.
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit"})

#: Position of the value among the arguments of operations that make a constant; the others make 0 or 1.
_VALUE_ARGUMENT = {"scalar_tensor": 0, "full": 1, "new_full": 2}


def _lift(raw: fx.GraphModule, kind: str) -> tuple[Modifier, tuple[Tensor, ...]]:
    """Return the Modifier of a raw trace, and its captured tensors."""
    graph, captures = _normalise(raw, INPUTS[kind], f"{kind}_mod")
    digest = canonical_digest(("tilewise modifier 1", kind, _numbered(graph)))
    modifier = _REGISTRY.get(digest)
    if modifier is None:
        layouts = tuple((t.dtype, tuple(t.shape), tuple(t.stride())) for t in captures)
        module = fx.GraphModule(torch.nn.Module(), graph)
        broadcast(module, len(INPUTS[kind]), f"{kind}_mod")  # what cannot run on tiles is refused now, not in a backend
        modifier = Modifier(kind, module, digest, len(captures), layouts)
    return modifier, tuple(captures)


def _trace_gradient(modifier: Modifier) -> fx.GraphModule:
    from torch._subclasses.fake_tensor import FakeTensorMode

    forward = modifier.forward
    inputs = (*INPUTS["score"], *(f"capture_{i}" for i in range(modifier.num_captures)), "grad")

    def pullback(score: Tensor, *rest: Tensor) -> Tensor:
        pull: Any = torch.func.vjp(lambda s: forward(s, *rest[:-1]), score)[1]
        return pull(rest[-1])[0]  # type: ignore[no-any-return]

    vals = [n.meta["val"] for n in forward.graph.nodes if n.op == "placeholder"][: len(INPUTS["score"])]
    result: Any = forward.graph.output_node().args[0]
    with FakeTensorMode():
        example = [torch.zeros((), dtype=v.dtype) for v in vals]
        example += [torch.empty_strided(shape, stride, dtype=dtype) for dtype, shape, stride in modifier.captures]
        example += [torch.zeros((), dtype=result.meta["val"].dtype)]
    with torch.no_grad():
        graph, _ = _normalise(_make_fx(pullback, example), inputs, "score_mod")
    return fx.GraphModule(torch.nn.Module(), graph)


def _normalise(raw: fx.GraphModule, inputs: Sequence[str], name: str) -> tuple[fx.Graph, list[Tensor]]:
    """Return `raw` as a graph of table operations on `inputs` and captured tensors, and those tensors."""
    raw.graph.eliminate_dead_code()
    nodes = list(raw.graph.nodes)
    graph = fx.Graph()
    env: dict[Any, fx.Node] = {}
    for node, target in zip((n for n in nodes if n.op == "placeholder"), inputs, strict=True):
        env[node] = graph.placeholder(target)
    captures: dict[str, fx.Node] = {}
    for node in nodes:
        if node.op == "get_attr" and not all(_is_number(user) for user in node.users):
            if node.target not in captures:
                captures[node.target] = graph.placeholder(f"capture_{len(captures)}")
            env[node] = captures[node.target]
    for node in nodes:
        if node.op == "call_function":
            env[node] = _operation(node, graph, env, name, raw)
        elif node.op == "output":
            graph.output(env[node.args[0]])
        if node in env:
            env[node].meta = {"val": node.meta.get("val"), "stack_trace": node.meta.get("stack_trace")}
    tensors = [getattr(raw, target) for target in captures]
    for placeholder, tensor in zip(captures.values(), tensors, strict=True):
        placeholder.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    graph.eliminate_dead_code()
    return graph, tensors


def _operation(node: Any, graph: fx.Graph, env: dict[Any, fx.Node], name: str, raw: fx.GraphModule) -> fx.Node:
    """Copy one call into `graph`, as an operation of the table that neither mutates nor names a device."""
    target = _out_of_place(node, env, name)
    op = str(target)
    val = node.meta["val"]
    if op not in OPS:
        raise UnsupportedError(f"{name}: expected pointwise operations and reads of tensors, got {op}{at(node)}")
    if OPS[op] == CONSTANT:
        if op == "aten.lift_fresh_copy.default" and not _is_number(node):
            return env[node.args[0]]
        value = _constant_value(node, op, raw)
        return graph.call_function(aten.full.default, (list(val.shape), value), {"dtype": val.dtype})
    if val.device != _device(node):
        raise wrong_value(name, "every tensor on one device", f"{op} to {val.device}{at(node)}")
    kwargs = {k: v for k, v in node.kwargs.items() if k not in _PLACEMENT}
    new = graph.node_copy(node, lambda n: env[n])
    new.target, new.kwargs = target, kwargs
    if target is not node.target and len({n.meta["val"].dtype for n in node.all_input_nodes}) > 1:
        # Written in place, the result had the dtype of its target, whatever it met.
        new.meta = {"val": val}
        new = graph.call_function(aten._to_copy.default, (new,), {"dtype": val.dtype})
    return new


def _out_of_place(node: Any, env: dict[Any, fx.Node], name: str) -> Any:
    """Return the operator of `node`, the one without mutation if it writes to a value of the function's own."""
    target = node.target
    if not target._schema.is_mutable:
        return target
    written = env[node.args[0]]
    own = written.op == "placeholder" and not written.name.startswith("capture_")
    if written.op == "call_function":
        own = OPS[str(written.target)] == POINTWISE and written.target not in _ALIASING
    packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    if not own or packet is None or target._overloadname not in packet.overloads():
        raise _side_effect(name, target, at(node))
    return getattr(packet, target._overloadname)


_ALIASING = (aten.detach.default, aten.alias.default)


def _is_number(node: Any) -> bool:
    """Whether `node` is a rank-0 tensor made from a Python number inside the function: `torch.tensor(0.5)`."""
    return node.target is aten.lift_fresh_copy.default and node.args[0].op == "get_attr" and node.meta["val"].dim() == 0


def _constant_value(node: Any, op: str, raw: fx.GraphModule) -> bool | int | float:
    if op == "aten.lift_fresh_copy.default":
        return getattr(raw, node.args[0].target).item()  # type: ignore[no-any-return]
    operation = op.split(".")[1]
    if operation in _VALUE_ARGUMENT:
        return node.args[_VALUE_ARGUMENT[operation]]  # type: ignore[no-any-return]
    return int(operation.endswith("ones"))


def _device(node: fx.Node) -> torch.device:
    """Return the device on which `node` would run if it moved nothing."""
    devices = [n.meta["val"].device for n in node.all_input_nodes if "val" in n.meta]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _numbered(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the graph as nested tuples of plain values, with nodes as numbers."""
    number = {node: i for i, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", number[value]
        if isinstance(value, (list, tuple)):
            return "list", *map(plain, value)
        return value

    def described(node: fx.Node) -> tuple[Any, ...]:
        val = node.meta["val"]
        if node.op == "placeholder":
            return "input", val.dtype, val.dim()
        kwargs = tuple((k, plain(v)) for k, v in sorted(node.kwargs.items()))
        return str(node.target), plain(node.args), kwargs, val.dtype

    body = tuple(described(n) for n in graph.nodes if n.op != "output")
    return body, plain(graph.output_node().args[0])
