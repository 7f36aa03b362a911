"""Random modifications: a tile equals the function run score by score, and the derivative is right."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from tilewise.mods.trace import lookup, trace

torch.set_num_threads(2)

SIZES = (2, 2, 3, 4)  # B, H, M, N
WEIGHTS = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
COUNTS = torch.tensor([3, 0, 4, 1, 2])
SCALE = torch.tensor(0.75, dtype=torch.float64)

# Expressions are tuples (operation, *operands), of integers or of floating-point numbers.
_INTEGER = st.recursive(
    st.sampled_from(["b", "h", "q", "k"]) | st.integers(-3, 3),
    lambda i: (
        st.tuples(st.sampled_from(["+", "-", "*", "//", "%", "min", "max"]), i, i)
        | st.tuples(st.sampled_from(["abs", "neg", "clamp", "count"]), i)
        | st.tuples(st.just("choose"), i, i, i)
    ),
    max_leaves=4,
)
_FLOAT = st.recursive(
    st.sampled_from(["s", "scale"]) | st.floats(-2, 2, width=16) | st.tuples(st.just("float"), _INTEGER),
    lambda f: (
        st.tuples(st.sampled_from(["+", "-", "*", "/", "min", "max"]), f, f)
        | st.tuples(st.sampled_from(["tanh", "sigmoid", "exp", "sqrt", "log1p", "square", "abs", "neg"]), f)
        | st.tuples(st.just("where"), _INTEGER, _INTEGER, f, f)
        | st.tuples(st.just("weight"), _INTEGER, _INTEGER)
        | st.tuples(st.just("row"), _INTEGER, _INTEGER)
    ),
    max_leaves=6,
)


def evaluate(tree, env):
    """Return the value of an expression, with `env` for the names in it."""
    if isinstance(tree, str):
        return env[tree]
    if isinstance(tree, int):
        return torch.full_like(env["q"], tree)
    if isinstance(tree, float):
        return torch.tensor(tree, dtype=torch.float64)
    op, *operands = tree
    x, *rest = [evaluate(t, env) for t in operands]
    y = rest[0] if rest else x
    return {
        "+": lambda: x + y,
        "-": lambda: x - y,
        "*": lambda: x * y,
        "/": lambda: x / (y * y + 1),
        "//": lambda: x // torch.where(y == 0, 1, y),
        "%": lambda: x % torch.where(y == 0, 1, y),
        "min": lambda: torch.minimum(x, y),
        "max": lambda: torch.maximum(x, y),
        "abs": lambda: torch.abs(x),
        "neg": lambda: -x,
        "clamp": lambda: x.clamp(-2, 3),
        "choose": lambda: torch.where(x >= y, rest[1], y),
        "count": lambda: env["counts"][x % 5],
        "float": lambda: x.to(torch.float64) * 0.25,
        "tanh": lambda: torch.tanh(x),
        "sigmoid": lambda: torch.sigmoid(x),
        "exp": lambda: torch.exp(torch.clamp(x, max=3.0)),
        "sqrt": lambda: torch.sqrt(x * x + 1),
        "log1p": lambda: torch.log1p(torch.abs(x)),
        "square": lambda: torch.tanh(x) ** 2,
        "where": lambda: torch.where((x < y) | (x % 3 == 1), rest[1], rest[2]),
        "weight": lambda: env["weights"][x % 5, y % 6],
        "row": lambda: env["weights"][x % 5][y % 6],
    }[op]()


def as_mod(tree, weights=WEIGHTS):
    def mod(score, b, h, q, k):
        env = {"s": score, "b": b, "h": h, "q": q, "k": k, "scale": SCALE, "weights": weights, "counts": COUNTS}
        return evaluate(tree, env) + score * 0

    return mod


INDICES = tuple(map(torch.arange, SIZES))


def looped(fn, score):
    with TransformGetItemToIndex():
        rows = [
            fn(score[b, h, q, k], *map(torch.tensor, (b, h, q, k)))
            for b in range(SIZES[0])
            for h in range(SIZES[1])
            for q in range(SIZES[2])
            for k in range(SIZES[3])
        ]
    return torch.stack(rows).view(SIZES)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_FLOAT)
def test_a_tile_and_its_gradients_equal_the_function_score_by_score(tree):
    weights = WEIGHTS.clone().requires_grad_()
    score = torch.randn(SIZES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    fn = as_mod(tree, weights)
    modifier, captures = trace(fn, "score", score_dtype=torch.float64)
    assert lookup(modifier.digest) is modifier
    got, want = modifier.apply_score(score, *INDICES, captures), looped(fn, score)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)

    grad = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view(SIZES)
    gradients = [torch.autograd.grad(x, (score, weights), grad, materialize_grads=True) for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)
    for at in ((0, 0, 0, 0), (1, 1, 2, 3), (0, 1, 2, 1)):
        one = modifier.gradient(score.detach()[at], *map(torch.tensor, at), *(t.detach() for t in captures), grad[at])
        torch.testing.assert_close(one, gradients[1][0][at], rtol=1e-8, atol=1e-8)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_FLOAT, _FLOAT)
def test_equal_digests_mean_equal_results(one, two):
    first, second = (trace(as_mod(t), "score", score_dtype=torch.float64) for t in (one, two))
    if first[0].digest == second[0].digest:
        score = torch.randn(SIZES, dtype=torch.float64)
        results = [m.apply_score(score, *INDICES, c) for m, c in (first, second)]
        assert torch.equal(*results)
    else:
        assert one != two


@pytest.mark.parametrize("spoil", ["weights", "indices"])
def test_the_comparison_would_notice(spoil):
    """The oracle above is independent of the tile: other weights, or shifted indices, give other results."""
    tree = ("weight", "q", ("+", "k", "h"))
    score = torch.zeros(SIZES, dtype=torch.float64)
    modifier, captures = trace(as_mod(tree), "score", score_dtype=torch.float64)
    indices = (*INDICES[:3], INDICES[3] + (spoil == "indices"))
    spoiled = tuple(t + 1 if spoil == "weights" and t.dim() == 2 else t for t in captures)
    assert not torch.allclose(modifier.apply_score(score, *indices, spoiled), looped(as_mod(tree), score))
