"""inf and NaN go where IEEE arithmetic sends them, and never into rows or keys that do not see them."""

import pytest
import torch

from tests.support.cases import gradients_of, problem
from tests.support.oracle import exact, run

SPECIAL = [float("nan"), float("inf"), float("-inf")]
FEATURES = {
    "plain": {"heads_kv": 4},
    "causal": {"heads_kv": 4, "window_right": 0},
    "window, grouped": {"window_left": 4, "window_right": 0},
    "softcap": {"softcap": 2.0, "window_right": 0},
    "sink, split": {"sink": torch.zeros(4), "num_splits": 3, "window_right": 0},
}


def assert_same_special(a, b):
    torch.testing.assert_close(a.isfinite(), b.isfinite())
    ok = b.isfinite()
    torch.testing.assert_close(a.double()[ok], b.double()[ok], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_special_value(place, feature, value, where, dtype):
    x = problem([24, 24], [24, 24], dtype=dtype, **FEATURES[feature])
    dout, _ = gradients_of(x)
    target = dout if where == "dout" else getattr(x, where)
    target[0, 11, 1, 3] = value
    got, want = run(place.backend, x, dout, None), exact(x, dout, None)
    for a, b in (
        (got.out, want.out),
        (got.lse, want.lse),
        *((getattr(got.grads, n), getattr(want.grads, n)) for n in "qkv"),
    ):
        assert_same_special(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [7, 64, 600])
@pytest.mark.parametrize("value", SPECIAL)
def test_a_special_query_is_never_lost(place, dtype, length, value):
    """Whatever the length, and so whatever the way it is computed, a NaN or inf in a query shows in its row only."""
    x = problem([length], [length], heads=1, heads_kv=1, dim=16, dtype=dtype)
    x.q[0, 3, 0, 2] = value
    out, _ = place.backend.forward(x)
    bad = (~out.isfinite()).any(-1)[0, :, 0].nonzero().flatten().tolist()
    assert bad == [3]


def test_nan_past_the_diagonal_stays_there(place):
    x = problem([50], [50], heads_kv=4, window_right=0)
    x.v[:, 30:], x.k[:, 30:], x.q[:, 30:] = torch.nan, torch.nan, torch.nan
    dout, _ = gradients_of(x)
    dout[:, 30:] = 0
    got = run(place.backend, x, dout, None)
    assert got.out[:, :30].isfinite().all() and got.out[:, 30:].isnan().all()
    assert got.grads.q[:, :30].isfinite().all()
