"""Tracing of mods: what is computed, what is captured, what is refused, and when a trace is reused."""

import functools
import itertools
import math
import random
import subprocess
import sys
import threading
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import tilewise.mods.trace as module
from tilewise.errors import UnsupportedError
from tilewise.mods import TracedMod, mask_mod, score_mod
from tilewise.mods.fingerprint import fingerprint
from tilewise.mods.trace import lookup, trace

SIZES = (2, 3, 4, 5)  # B, H, M, N


def indices(sizes=SIZES):
    return tuple(map(torch.arange, sizes))


def looped(fn, score, sizes=SIZES, args=()):
    """The mod as its author wrote it, one score at a time."""
    rows = []
    with TransformGetItemToIndex():
        for b in range(sizes[0]):
            for h in range(sizes[1]):
                for q in range(sizes[2]):
                    for k in range(sizes[3]):
                        at = [torch.tensor(i) for i in (b, h, q, k)]
                        first = () if score is None else (score[(*[int(i) for i in (b, h, q, k)],)].clone(),)
                        rows.append(fn(*first, *at, *args))
    return torch.stack(rows).view(sizes)


def applied(fn, score, aux=None, **kw):
    modifier, captures = trace(fn, "score", aux, **kw)
    return modifier.apply_score(score, *indices(score.shape), captures)


SLOPES = torch.tensor([0.5, -0.25, 2.0])
TABLE = torch.linspace(-2, 2, 3 * 4 * 5).view(3, 4, 5)
IDS = torch.tensor([0, 0, 1, 1, 2])
TEMPERATURE = torch.tensor(1.5, dtype=torch.float64)


def _inplace(score, b, h, q, k):
    score += SLOPES[h]
    score *= 2
    return score


def _helper(score, factor=0.5):
    return score * factor


SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "table by three indices": lambda s, b, h, q, k: s + TABLE[h, q, k],
    "table by chained indices": lambda s, b, h, q, k: s + TABLE[h][q][k],
    "table by derived and negative indices": lambda s, b, h, q, k: (
        s + TABLE[h, (q - k) // 2, torch.remainder(k - q, 5)]
    ),
    "table of indices": lambda s, b, h, q, k: s + SLOPES[IDS[k]],
    "last axis first": lambda s, b, h, q, k: s + TABLE[0, 1][k] + TABLE[2][q % 4, 3],
    "computed from the captured tensor alone": lambda s, b, h, q, k: (
        s + torch.exp(SLOPES)[h] + TABLE.transpose(0, 2)[k, q, h]
    ),
    "rank-0 tensor of another dtype": lambda s, b, h, q, k: s * TEMPERATURE,
    "softcap": lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0),
    "where with numbers": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    "number tensors": lambda s, b, h, q, k: s * torch.tensor(0.5) + torch.ones(()),
    "casts": lambda s, b, h, q, k: s + (q - k).to(s.dtype) + (q > k).float() + (s * 3).int(),
    "in place on its own value": _inplace,
    "helper with default": lambda s, b, h, q, k: _helper(s) + _helper(s, 2.0),
    "integer arithmetic": lambda s, b, h, q, k: s + ((q * 3 + k) % 4) + (q | k) + (q // 2) + (k >> 1) + min(3, 4),
    "minimum, clamp, abs, pow": lambda s, b, h, q, k: (
        torch.minimum(s.abs() ** 1.5, s.clamp(-1, 1) ** 2) + torch.sqrt(s * s + 1)
    ),
    "not on the score": lambda s, b, h, q, k: TABLE[h, q, k],
    "partial": functools.partial(lambda w, s, b, h, q, k: s * w, 0.25),
}


@pytest.mark.parametrize("fn", SCORES.values(), ids=SCORES.keys())
def test_a_tile_equals_the_function_score_by_score(fn):
    score = torch.randn(SIZES)
    want = looped(fn, score)
    torch.testing.assert_close(applied(fn, score.clone()), want.to(score.dtype), rtol=1e-6, atol=1e-6)


MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "document": lambda b, h, q, k: IDS[q] == IDS[k],
    "per head": lambda b, h, q, k: (q - k).abs() <= h,
    "constant": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool),
    "logic": lambda b, h, q, k: (q >= k) & ~(k == 1) | (b == 1) ^ (h == 0),
    "float table": lambda b, h, q, k: TABLE[h, q, k] > 0.1,
}


@pytest.mark.parametrize("fn", MASKS.values(), ids=MASKS.keys())
def test_a_mask_tile_equals_the_function_pair_by_pair(fn):
    modifier, captures = trace(fn, "mask")
    tile = modifier.apply_mask(*indices(), captures)
    assert tile.shape == SIZES and tile.dtype == torch.bool
    assert torch.equal(tile, looped(fn, None))


def test_offsets_of_a_tile_are_positions_not_rows():
    modifier, captures = trace(lambda b, h, q, k: q * 10 + k == 74, "mask")
    tile = modifier.apply_mask(torch.tensor([0]), torch.tensor([0]), torch.arange(6, 9), torch.arange(3, 6), captures)
    assert tile.nonzero().tolist() == [[0, 0, 1, 1]]


# ---- captured tensors
def test_captures_are_the_objects_themselves_in_graph_order():
    first, second, aux = torch.randn(3), torch.randn(4), torch.randn(5)
    modifier, captures = trace(lambda s, b, h, q, k, t: s * t[0][k] + second[q] * first[h], "score", [aux])
    assert modifier.num_captures == 3
    assert [t is u for t, u in zip(captures, (aux, second, first), strict=True)] == [True] * 3


def test_new_data_and_new_tensors_are_seen_without_another_modifier():
    def with_table(table):
        return lambda s, b, h, q, k: s + table[h]

    score = torch.zeros(1, 3, 1, 1)
    table = torch.tensor([1.0, 2.0, 3.0])
    fn = with_table(table)
    one, _ = trace(fn, "score")
    table.mul_(10)
    assert applied(fn, score).flatten().tolist() == [10, 20, 30]
    two, captures = trace(with_table(torch.tensor([4.0, 5.0, 6.0])), "score")
    assert two is one and captures[0].tolist() == [4, 5, 6]


def test_a_rebound_cell_is_seen():
    table = torch.ones(3)

    def fn(s, b, h, q, k):
        return s + table[h]

    assert applied(fn, torch.zeros(1, 3, 1, 1)).sum() == 3
    table = torch.full((3,), 7.0)
    assert applied(fn, torch.zeros(1, 3, 1, 1)).sum() == 21


def test_one_tensor_in_two_places_is_told_from_two_tensors():
    def pair(x, y):
        return lambda s, b, h, q, k: s + x[h] * 10 + y[h]

    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    score = torch.zeros(1, 1, 1, 1)
    assert [applied(pair(*p), score).item() for p in ((x, x), (x, y), (y, x))] == [11, 12, 21]


def test_a_module_and_its_parameters():
    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
            self.scale = 2.0

        def mod(self, s, b, h, q, k):
            return s + self.table[h] * self.scale

    bias = Bias()
    assert fingerprint(bias.mod) is not None
    out = applied(bias.mod, torch.zeros(1, 3, 1, 1))
    assert out.flatten().tolist() == [2, 4, 6]
    out.sum().backward()
    assert bias.table.grad.tolist() == [2, 2, 2]
    bias.scale = 3.0
    assert applied(bias.mod, torch.zeros(1, 3, 1, 1)).flatten().tolist() == [3, 6, 9]
    bias.table = torch.nn.Parameter(torch.zeros(3))
    assert applied(bias.mod, torch.zeros(1, 3, 1, 1)).flatten().tolist() == [0, 0, 0]


# ---- what reuses a trace, and what must not
_WINDOW = 2
_LIMITS = {"window": 2}
_settings = types.ModuleType("some_settings")
_settings.window = 2


class _Config:
    window = 2

    @property
    def doubled(self):
        return self.window * 2


_config = _Config()


class _Classed:
    window = 2


_classed = _Classed()


class _Dynamic:
    def __getattr__(self, name):
        return _WINDOW


_dynamic = _Dynamic()


def _limit():
    return _WINDOW


def _set_window(value):
    globals()["_WINDOW"] = value
    _LIMITS["window"] = value
    _settings.window = value
    _config.window = value
    _Classed.window = value


READERS = {
    "global": lambda b, h, q, k: q - k < _WINDOW,
    "global in a helper": lambda b, h, q, k: q - k < _limit(),
    "global in a dict": lambda b, h, q, k: q - k < _LIMITS["window"],
    "attribute of a module": lambda b, h, q, k: q - k < _settings.window,
    "attribute of an object": lambda b, h, q, k: q - k < _config.window,
    "property of an object": lambda b, h, q, k: q - k < _config.doubled // 2,
    "dynamic attribute": lambda b, h, q, k: q - k < _dynamic.window,
    "getattr": lambda b, h, q, k: q - k < getattr(_config, "win" + "dow"),
    "globals": lambda b, h, q, k: q - k < globals()["_WINDOW"],
    "nested function": lambda b, h, q, k: (lambda: q - k < _WINDOW)(),
    "the class of an object": lambda b, h, q, k: q - k < _classed.__class__.window,
    "import in the body": lambda b, h, q, k: q - k < __import__(__name__, fromlist=["x"])._WINDOW,
}


@pytest.mark.parametrize("fn", READERS.values(), ids=READERS.keys())
def test_a_changed_number_is_always_seen(fn):
    def visible():
        modifier, captures = trace(fn, "mask")
        return int(
            modifier.apply_mask(
                torch.tensor([0]), torch.tensor([0]), torch.tensor([9]), torch.arange(10), captures
            ).sum()
        )

    try:
        seen = [visible()]
        for window in (5, 2, 7):
            _set_window(window)
            seen.append(visible())
    finally:
        _set_window(2)
    assert seen == [2, 5, 2, 7]


def test_changed_closures_defaults_and_signed_zeros_are_seen():
    def scaled(w):
        return lambda s, b, h, q, k: torch.copysign(s, s) if False else s / w

    one = torch.ones(1, 1, 1, 1)
    assert [applied(scaled(w), one).item() for w in (2.0, 4.0, 0.0, -0.0, 2)] == [0.5, 0.25, math.inf, -math.inf, 0.5]

    def fn(s, b, h, q, k, w=1.0):
        return s * w

    assert applied(fn, one).item() == 1
    fn.__defaults__ = (3.0,)
    assert applied(fn, one).item() == 3


def test_a_shape_read_in_python_is_seen():
    def by_size(table):
        return lambda s, b, h, q, k: s + table.shape[0]

    one = torch.zeros(1, 1, 1, 1)
    assert [applied(by_size(torch.zeros(n)), one).item() for n in (3, 4, 3)] == [3, 4, 3]


def test_a_repeated_call_does_not_trace_again(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_make_fx", lambda *a, _make=module._make_fx: calls.append(1) or _make(*a))

    def make(w, table):
        return lambda s, b, h, q, k: s * w + table[h]

    for _ in range(3):
        trace(make(0.123, torch.randn(3)), "score")
    assert len(calls) == 1
    trace(make(0.124, torch.randn(3)), "score")
    assert len(calls) == 2


@dataclass(frozen=True)
class _Settings:
    window: int
    table: torch.Tensor


def test_a_dataclass_of_numbers_and_tensors():
    def by(config):
        return lambda s, b, h, q, k: s * config.window + config.table[h]

    one = torch.ones(1, 1, 1, 1)
    first = by(_Settings(2, torch.tensor([1.0])))
    assert fingerprint(first) is not None
    assert [applied(by(_Settings(w, torch.tensor([t]))), one).item() for w, t in ((2, 1.0), (3, 1.0), (2, 4.0))] == [
        3,
        4,
        6,
    ]
    assert applied(first, one).item() == 3


@functools.lru_cache
def _remembered():
    return 1.0


class _Callable:
    factor = 2.0

    def __call__(self, s, b, h, q, k):
        return s * self.factor


def test_an_object_that_is_called():
    fn = _Callable()
    one = torch.ones(1, 1, 1, 1)
    assert fingerprint(fn) is not None and applied(fn, one).item() == 2
    fn.factor = 3.0
    assert applied(fn, one).item() == 3


OPAQUE = {
    "a function with a memory of its own": lambda s, b, h, q, k: s * _remembered(),
    "random numbers": lambda s, b, h, q, k: s * random.random(),
    "an array": lambda s, b, h, q, k: s * ARRAY[0],
    "an iterator": lambda s, b, h, q, k: s * next(COUNTER),
    "a set": lambda s, b, h, q, k: s * len({*SET}),
    "a module that is imported in the body": lambda s, b, h, q, k: s * __import__("json").__name__.count("j"),
}
ARRAY, COUNTER, SET = np.ones(3), itertools.count(1), {1}


@pytest.mark.parametrize("fn", OPAQUE.values(), ids=OPAQUE.keys())
def test_what_cannot_be_pinned_down_is_traced_every_time(fn):
    assert fingerprint(fn) is None
    applied(fn, torch.ones(1, 1, 1, 1))


def test_a_counter_counts():
    fn = OPAQUE["an iterator"]
    one = torch.ones(1, 1, 1, 1)
    first = applied(fn, one).item()
    assert applied(fn, one).item() == first + 1


# ---- digests
def test_the_digest_is_the_computation():
    def digest(fn, kind="score"):
        return trace(fn, kind)[0].digest

    def by(table):
        return lambda s, b, h, q, k: s + table[h]

    base = digest(by(torch.zeros(3)))
    assert base == digest(lambda score, batch, head, row, col: torch.add(score, SLOPES[head]))
    assert base == digest(by(torch.ones(7)))
    others = [
        digest(by(torch.zeros(3, dtype=torch.float64))),
        digest(by(torch.zeros(3, 2)[:, 0].to(torch.bfloat16))),
        digest(lambda s, b, h, q, k: s + SLOPES[q]),
        digest(lambda s, b, h, q, k: s - SLOPES[h]),
        digest(lambda s, b, h, q, k: s * 30.0),
        digest(lambda s, b, h, q, k: s * 50.0),
        digest(lambda s, b, h, q, k: s * 30),
        digest(lambda b, h, q, k: q >= k, "mask"),
        digest(lambda b, h, q, k: k >= q, "mask"),
    ]
    assert len({base, *others}) == len(others) + 1
    assert lookup(base).digest == base


def test_lookup_of_an_unknown_digest_says_what_to_do():
    with pytest.raises(RuntimeError, match="digest: .*'nowhere'.*trace the function again"):
        lookup("nowhere")


_PROGRAM = """
import torch
from tilewise.mods.trace import trace
table = torch.zeros(3, 4)
def fn(s, b, h, q, k):
    return torch.where(q >= k, 30.0 * torch.tanh(s / 30.0) + table[h, (q - k).clamp(0, 3)], -float("inf"))
print(trace(fn, "score")[0].digest)
"""


def test_the_digest_does_not_depend_on_the_process():
    digests = {
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == 64


# ---- gradients
GRADIENT_SCORES = {
    "alibi": lambda t: lambda s, b, h, q, k: s + t[h, 0] * (q - k),
    "table": lambda t: lambda s, b, h, q, k: s * t[h][q] + t[h, k % 4] * t[0, 0],
    "softcap": lambda t: lambda s, b, h, q, k: t[h, 1] * torch.tanh(s / t[h, 1]),
    "where": lambda t: lambda s, b, h, q, k: torch.where(q >= k, s * torch.exp(t[h, q]), -s),
    "transposed": lambda t: lambda s, b, h, q, k: s * s + torch.sigmoid(t.t()[q, h]) ** 2,
    "rank 0": lambda t: lambda s, b, h, q, k: s * t[1, 1] + t.sin()[h, q],
}


@pytest.mark.parametrize("make", GRADIENT_SCORES.values(), ids=GRADIENT_SCORES.keys())
def test_gradients_of_score_and_captures(make):
    table = (torch.rand(3, 4, dtype=torch.float64) + 0.5).requires_grad_()
    score = torch.randn(SIZES, dtype=torch.float64, requires_grad=True)
    modifier, captures = trace(make(table), "score", score_dtype=torch.float64)
    assert len(captures) == 1 and captures[0] is table
    assert torch.autograd.gradcheck(lambda s, t: modifier.apply_score(s, *indices(), (t,)), (score, table))


@pytest.mark.parametrize("make", GRADIENT_SCORES.values(), ids=GRADIENT_SCORES.keys())
def test_the_gradient_graph_is_the_derivative_of_one_score(make):
    table = torch.rand(3, 4) + 0.5
    modifier, captures = trace(make(table), "score")
    score, grad = torch.randn(SIZES), torch.randn(SIZES)
    _, pull = torch.func.vjp(lambda s: modifier.apply_score(s, *indices(), captures), score)
    for at in [(0, 0, 0, 0), (1, 2, 3, 4), (1, 1, 0, 4), (0, 2, 3, 1)]:
        one = modifier.gradient(score[at], *map(torch.tensor, at), *captures, grad[at])
        torch.testing.assert_close(one, pull(grad)[0][at])


def test_detach_stops_the_gradient():
    table = torch.ones(3, requires_grad=True)
    out = applied(lambda s, b, h, q, k: s + table[h].detach(), torch.zeros(SIZES, requires_grad=True))
    out.sum().backward()
    assert table.grad is None


def test_no_grad_stops_the_gradient():
    table = torch.ones(3, requires_grad=True)

    def fn(s, b, h, q, k):
        with torch.no_grad():
            bias = table[h] * 2
        return s + bias + table[h]

    applied(fn, torch.zeros(SIZES, requires_grad=True)).sum().backward()
    assert table.grad.tolist() == [40, 40, 40]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_derivative_of_ones_own_is_refused_not_dropped():
    with pytest.raises(UnsupportedError, match=r"score_mod: .*got the torch\.autograd\.Function _StraightThrough"):
        trace(lambda s, b, h, q, k: _StraightThrough.apply(s) + 1, "score")


def test_the_digest_does_not_depend_on_the_grad_mode():
    def digest(w):
        return trace(lambda s, b, h, q, k: s * w + SLOPES[h], "score")[0].digest

    want = digest(0.375)
    for mode in (torch.no_grad, torch.inference_mode):
        module._CACHE._entries.clear()
        with mode():
            assert digest(0.375) == want


def test_threads_trace_at_the_same_time():
    results = []

    def work(w):
        modifier, _ = trace(lambda s, b, h, q, k: s * w, "score")
        results.append((w, modifier.gradient(*[torch.tensor(1.0)] * 6).item()))

    threads = [threading.Thread(target=work, args=(w,)) for w in (11.0, 12.0, 13.0, 14.0)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(results) == [(w, w) for w in (11.0, 12.0, 13.0, 14.0)]


def test_the_gradient_of_a_large_table_needs_no_table_per_score():
    table = torch.randn(50_000, requires_grad=True)
    score = torch.randn(1, 2, 32, 32, requires_grad=True)
    out = applied(lambda s, b, h, q, k: s + table[q * 32 + k + h], score)
    limit = 20 * (table.numel() + score.numel()) * 4
    with torch.profiler.profile(profile_memory=True) as profile:
        out.sum().backward()
    assert sum(max(e.self_cpu_memory_usage, 0) for e in profile.events()) < limit
    want = torch.bincount((torch.arange(1024)[None] + torch.arange(2)[:, None]).flatten(), minlength=50_000)
    assert torch.equal(table.grad, want.float())


def test_a_mask_has_no_gradient_graph():
    with pytest.raises(ValueError, match="gradient: expected a score_mod, got a mask_mod"):
        trace(lambda b, h, q, k: q >= k, "mask")[0].gradient  # noqa: B018


# ---- refusals
def _counter(s, b, h, q, k):
    SLOPES.add_(1)
    return s


def _write_through_a_view(s, b, h, q, k):
    SLOPES[0].mul_(2)
    return s


def _branch(s, b, h, q, k):
    if q > k:  # the line a user must find
        return s
    return -s


def _cute(*args):
    raise AssertionError("never called")


_cute._dsl_cls = object

LINE = r"test_mods_trace\.py:\d+"
REFUSED = [
    (
        "score",
        _branch,
        ValueError,
        rf"score_mod: .*torch\.where.* __bool__ at .*test_mods_trace\.py:{_branch.__code__.co_firstlineno + 1}",
    ),
    ("score", lambda s, b, h, q, k: s * float(TEMPERATURE), ValueError, rf"score_mod: .*__float__ at .*{LINE}"),
    ("score", lambda s, b, h, q, k: s * TEMPERATURE.item(), ValueError, rf"score_mod: .*item at .*{LINE}"),
    ("score", lambda s, b, h, q, k: s * SLOPES.tolist()[0], ValueError, rf"score_mod: .*tolist at .*{LINE}"),
    ("score", lambda s, b, h, q, k: s + [1.0, 2.0, 3.0][h], ValueError, rf"score_mod: .*__index__ at .*{LINE}"),
    ("mask", lambda b, h, q, k: q > k and h > 0, ValueError, rf"mask_mod: .*__bool__ at .*{LINE}"),
    ("mask", lambda b, h, q, k: q - k, TypeError, "mask_mod: expected a function that returns bool, got torch.int64"),
    ("mask", lambda b, h, q, k: True, TypeError, "mask_mod: expected a function that returns a tensor, got True"),
    ("score", lambda s, b, h, q, k: q >= k, TypeError, "score_mod: expected .*floating-point score, got torch.bool"),
    ("score", lambda s, b, h, q, k: q - k, TypeError, "score_mod: expected .*floating-point score, got torch.int64"),
    ("score", lambda s, b, h, q, k: None, TypeError, "score_mod: expected a function that returns a tensor, got None"),
    ("score", lambda s, b, h, q, k: s + SLOPES, ValueError, r"score_mod: expected .*rank 0.*got shape \(3,\)"),
    ("score", lambda s, b, h, q, k: TABLE[h], ValueError, r"score_mod: expected .*rank 0.*got shape \(4, 5\)"),
    (
        "score",
        lambda b, h, q, k: q,
        TypeError,
        r"score_mod: expected a function of \(score, b, h, q_idx, kv_idx\), got .*lambda",
    ),
    (
        "mask",
        lambda s, b, h, q, k: q,
        TypeError,
        r"mask_mod: expected a function of \(b, h, q_idx, kv_idx\), got .*lambda",
    ),
    ("score", 3, TypeError, "score_mod: expected a function of .*, got 3"),
    ("mask", mask_mod, TypeError, "mask_mod: expected a function of .*, got mask_mod"),
    ("score", _counter, ValueError, rf"score_mod: expected .*without side effects.*add_.* at .*{LINE}"),
    ("score", _write_through_a_view, ValueError, rf"score_mod: expected .*without side effects.*mul_.* at .*{LINE}"),
    (
        "score",
        lambda s, b, h, q, k: s + torch.rand(()),
        UnsupportedError,
        rf"score_mod: expected pointwise .*aten.rand.* at .*{LINE}",
    ),
    (
        "score",
        lambda s, b, h, q, k: s + SLOPES.sum(),
        UnsupportedError,
        rf"score_mod: expected pointwise .*aten.sum.* at .*{LINE}",
    ),
    (
        "score",
        lambda s, b, h, q, k: s + (TABLE[h] * 2)[q, k],
        UnsupportedError,
        rf"score_mod: .*aten.mul.* at .*{LINE}",
    ),
    (
        "score",
        lambda s, b, h, q, k: s + SLOPES[h > 1],
        TypeError,
        rf"score_mod: expected integer indices, got a mask at .*{LINE}",
    ),
    ("score", _cute, UnsupportedError, "score_mod: backend cpu cannot run a @cute.jit function; .*torch operations"),
]


@pytest.mark.parametrize("kind, fn, error, message", REFUSED)
def test_refusals_name_the_argument_and_the_place(kind, fn, error, message):
    before = SLOPES.clone()
    with pytest.raises(error, match=message):
        trace(fn, kind)
    assert torch.equal(SLOPES, before)


def test_an_index_out_of_range_is_an_error():
    score = torch.zeros(1, 4, 1, 1)
    with pytest.raises(IndexError, match="index 3 is out of bounds for dimension of size 3"):
        applied(lambda s, b, h, q, k: s + SLOPES[h], score)
    with pytest.raises(IndexError, match="index -4 is out of bounds"):
        applied(lambda s, b, h, q, k: s + SLOPES[-h - 1], score)


def test_aux_tensors_must_be_taken():
    with pytest.raises(TypeError, match=r"expected a function of \(score, b, h, q_idx, kv_idx, aux_tensors\)"):
        trace(lambda s, b, h, q, k: s, "score", [SLOPES])


# ---- traced ahead
def test_a_traced_mod_stands_for_its_function():
    traced = score_mod(lambda s, b, h, q, k: s + SLOPES[h])
    assert isinstance(traced, TracedMod)
    modifier, captures = trace(traced, "score", [torch.zeros(1)])
    assert modifier is traced.modifier and captures[0] is SLOPES
    with pytest.raises(TypeError, match="mask_mod: expected a function or a traced mask_mod, got 'score_mod'"):
        trace(traced, "mask")


def test_float64_scores_keep_their_precision():
    score = torch.randn(SIZES, dtype=torch.float64)

    def fn(s, b, h, q, k):
        return s + (q * 0 + 1).to(s.dtype) / 3

    assert torch.equal(
        applied(fn, score, score_dtype=torch.float64), score + torch.tensor(1.0, dtype=torch.float64) / 3
    )
