"""Partial results over ranges of keys, and their merge."""

import pytest
import torch

from tests.support.cases import problem
from tests.support.oracle import check


@pytest.mark.parametrize("num_splits", [0, 2, 3, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_splits(place, num_splits, dtype):
    x = problem([1, 9], [70, 33], layout_k="paged", dtype=dtype, window_left=40, window_right=0, num_splits=num_splits)
    check(place.backend, x)


@pytest.mark.parametrize("num_splits", [0, 2, 5])
def test_dense_splits(place, num_splits):
    check(place.backend, problem([5], [257], heads_kv=4, num_splits=num_splits))


def parts(lead, splits=3, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(splits, *lead, dim, generator=g), torch.randn(splits, *lead, generator=g)


def merged(place, out_partial, lse_partial, lengths=None, dtype=torch.float32):
    out = torch.full(out_partial.shape[1:], torch.nan, dtype=dtype)
    lse = torch.full(lse_partial.shape[1:], torch.nan)
    place.backend.combine(out_partial, lse_partial, out, lse, lengths)
    return out, lse


@pytest.mark.parametrize("lead", [(2, 5, 3), (7, 3), (0, 5, 3), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merge(place, lead, dtype):
    out_partial, lse_partial = parts(lead)
    out, lse = merged(place, out_partial, lse_partial, dtype=dtype)
    want = (lse_partial.double().softmax(0)[..., None] * out_partial.double()).sum(0)
    torch.testing.assert_close(out, want.to(dtype))
    torch.testing.assert_close(lse, lse_partial.double().logsumexp(0).float())


def test_a_dead_part_contributes_nothing(place):
    out_partial, lse_partial = parts((2, 5, 3))
    lse_partial[1] = -torch.inf
    out_partial[1] = torch.nan
    out, lse = merged(place, out_partial, lse_partial)
    want = merged(place, out_partial[::2], lse_partial[::2])
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1])


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_all_parts_dead(place, splits):
    out_partial, lse_partial = parts((2, 5, 3), splits)
    out, lse = merged(place, out_partial * torch.nan, lse_partial.fill_(-torch.inf))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_huge_and_tiny_parts(place):
    out_partial, lse_partial = parts((1, 1, 2), 2)
    lse_partial[0], lse_partial[1] = 1e4, -1e4
    out, lse = merged(place, out_partial, lse_partial)
    torch.testing.assert_close(out, out_partial[0])
    assert (lse == 1e4).all()


def test_rows_past_the_length_count_for_nothing(place):
    out_partial, lse_partial = parts((2, 5, 3))
    out_partial[:, 0, 2:] = torch.nan
    out, lse = merged(place, out_partial, lse_partial, torch.tensor([2, 5], dtype=torch.int32))
    want = merged(place, out_partial, lse_partial)
    assert (out[0, 2:] == 0).all() and (lse[0, 2:] == -torch.inf).all()
    torch.testing.assert_close(out[0, :2], want[0][0, :2])
    torch.testing.assert_close(out[1], want[0][1])


def test_rows_that_count_as_a_mask(place):
    """Packed rows have no common length: a mask over rows says which count."""
    out_partial, lse_partial = parts((6, 3))
    out, lse = merged(place, out_partial, lse_partial, torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.bool)[:, None])
    assert (out[[1, 4, 5]] == 0).all() and (lse[[1, 4, 5]] == -torch.inf).all()
    assert lse[[0, 2, 3]].isfinite().all()
