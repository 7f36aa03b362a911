"""Heads and head dims: grouped, many, odd, and values of another size than keys."""

import pytest
import torch

from tests.support.cases import problem
from tests.support.oracle import check


@pytest.mark.parametrize("heads, heads_kv", [(4, 4), (6, 2), (8, 1), (21, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped(place, heads, heads_kv, dtype):
    check(place.backend, problem([19, 19], [35, 35], heads=heads, heads_kv=heads_kv, dtype=dtype, window_right=0))


@pytest.mark.parametrize("dim, dim_v", [(64, 128), (128, 64), (192, 128), (64, 256), (256, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_of_another_size(place, dim, dim_v, dtype):
    got = check(place.backend, problem([33], [65], dim=dim, dim_v=dim_v, dtype=dtype))
    assert got.out.shape == (1, 33, 4, dim_v)


@pytest.mark.parametrize("dim", [8, 24, 40, 72, 80, 88, 96, 112, 120, 136, 160, 224])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_head_dims(place, dim, heads_kv):
    check(
        place.backend, problem([31], [31], heads_kv=heads_kv, dim=dim, window_right=0), with_lse_gradient=heads_kv == 2
    )


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scale(place, scale):
    check(place.backend, problem([21], [21], softmax_scale=scale))
