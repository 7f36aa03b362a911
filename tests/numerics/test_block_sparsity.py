"""Block lists: what they name is seen, what they do not name is never read."""

import pytest
import torch

from tests.support.cases import gradients_of, problem
from tests.support.oracle import check, run
from tilewise.mods import BlockSparseTensors, mask_mod


def lists(shape, block_size, seed=0):
    g = torch.Generator().manual_seed(seed)
    return BlockSparseTensors.from_map(torch.randint(0, 3, shape, generator=g), block_size)


@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("block_size", [(16, 16), (8, 32), (64, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_random_lists(place, batch, heads, block_size, masked):
    traced = mask_mod(lambda b, h, i, j: (i + 2 * j + h) % 3 != 0)
    mods = {"mask_mod": traced.modifier, "mask_captures": traced.captures} if masked else {}
    shape = (batch, heads, -(-70 // block_size[0]), -(-90 // block_size[1]))
    check(place.backend, problem([70, 70], [90, 90], block_sparse=lists(shape, block_size), **mods))


@pytest.mark.parametrize("layout_k", ["dense", "packed", "paged"])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_lengths_always_hold(place, layout_k, num_splits):
    """Lists may name blocks past the end of a sequence; a band narrows what they name."""
    check(
        place.backend,
        problem(
            [50, 3, 0],
            [60, 17, 9],
            layout_q="packed",
            layout_k=layout_k,
            window_right=0,
            num_splits=num_splits,
            block_sparse=lists((1, 1, 4, 4), (16, 16)),
            sink=torch.zeros(4),
        ),
    )


def test_empty_lists(place):
    none = BlockSparseTensors.from_map(torch.zeros(1, 1, 3, 3), (16, 16))
    got = check(place.backend, problem([40], [40], block_sparse=none))
    assert (got.out == 0).all() and (got.lse == -torch.inf).all()


def test_blocks_not_listed_are_not_read(place):
    some = torch.zeros(1, 1, 4, 8)
    some[..., 2], some[..., 5] = 2, 2
    x = problem([64], [128], block_sparse=BlockSparseTensors.from_map(some, (16, 16)))
    y = x.replace(k=x.k.clone(), v=x.v.clone())
    for block in (0, 1, 3, 4, 6, 7):
        for t in (y.k, y.v):
            t[:, block * 16 : block * 16 + 16] = torch.nan
    dout, dlse = gradients_of(x)
    want, got = run(place.backend, x, dout, dlse), run(place.backend, y, dout, dlse)
    for a, b in zip((got.out, got.lse, got.grads.q), (want.out, want.lse, want.grads.q), strict=True):
        torch.testing.assert_close(a, b)
    assert got.grads.k.isfinite().all() and got.grads.v.isfinite().all()
