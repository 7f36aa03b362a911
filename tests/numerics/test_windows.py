"""Bands: causal, windows, shifted, huge; and that what they hide is not read."""

import pytest
import torch

from tests.support.cases import gradients_of, problem
from tests.support.devices import Place
from tests.support.oracle import check, run

BANDS = [
    (None, 0),
    (0, 0),
    (5, 0),
    (0, 5),
    (5, 7),
    (-3, None),
    (-3, 9),
    (9, -3),
    (None, -4),
    (10**9, 10**9),
    (None, 6),
    (6, None),
]


@pytest.mark.parametrize("left, right", BANDS)
@pytest.mark.parametrize("len_q, len_k", [(37, 37), (20, 50), (50, 20)])
def test_bands(place, left, right, len_q, len_k):
    check(place.backend, problem([len_q], [len_k], window_left=left, window_right=right))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_bands_in_other_dtypes(place, dtype):
    check(place.backend, problem([300], [420], dtype=dtype, window_left=50, window_right=3))


def test_keys_outside_the_window_are_not_read(place: Place):
    """NaN in keys that no row sees reaches nothing."""
    x = problem([10], [400], window_left=20, window_right=0)
    y = problem([10], [400], window_left=20, window_right=0)
    y.k[:, :360] = torch.nan
    y.v[:, :360] = torch.nan
    dout, dlse = gradients_of(x)
    want, got = run(place.backend, x, dout, dlse), run(place.backend, y, dout, dlse)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.grads.q, want.grads.q)
    assert (got.grads.k[:, :360] == 0).all()


@pytest.mark.parametrize("bound", [39, 40, 10**6])
def test_a_bound_beyond_every_key_is_none(place, bound):
    x = problem([40], [40], heads_kv=4)
    for wide, none in (((bound, 0), (None, 0)), ((bound, bound), (None, None)), ((None, bound), (None, None))):
        got = place.backend.forward(x.replace(window_left=wide[0], window_right=wide[1]))
        want = place.backend.forward(x.replace(window_left=none[0], window_right=none[1]))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
