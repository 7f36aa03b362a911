"""Learnable sinks and soft-capped scores."""

import pytest
import torch

from tests.support.cases import gradients_of, problem
from tests.support.oracle import check, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_sink(place, dtype, sink_dtype, num_splits):
    sink = torch.tensor([0.7, -2.0, 5.0, 0.0], dtype=sink_dtype)
    got = check(
        place.backend, problem([20, 20], [13, 13], dtype=dtype, sink=sink, window_right=0, num_splits=num_splits)
    )
    assert got.grads.sink.dtype == sink_dtype


@pytest.mark.parametrize("layout", ["dense", "packed", "paged"])
def test_sink_of_unused_rows_counts_for_nothing(place, layout):
    layouts = {"layout_q": "packed" if layout == "packed" else "dense", "layout_k": layout}
    check(place.backend, problem([3, 0, 8], [0, 4, 5], sink=torch.randn(4), used=True, **layouts))


def test_no_keys_leaves_the_sink(place):
    x = problem([5], [0], sink=torch.full((4,), 0.7))
    dout, dlse = gradients_of(x)
    got = run(place.backend, x, dout, dlse)
    assert (got.out == 0).all()
    torch.testing.assert_close(got.lse, torch.full((1, 4, 5), 0.7))
    torch.testing.assert_close(got.grads.sink, dlse.sum((0, 2)))


def test_a_sink_of_minus_infinity_is_none(place):
    x = problem([9], [6], window_right=0)
    got = place.backend.forward(x.replace(sink=torch.full((4,), -torch.inf)))
    for a, b in zip(got, place.backend.forward(x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_softcap(place, softcap, dtype):
    check(
        place.backend,
        problem([30, 7], [41, 7], dtype=dtype, softcap=softcap, window_right=0, layout_q="packed", layout_k="packed"),
    )
