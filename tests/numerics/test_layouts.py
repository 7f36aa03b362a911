"""How sequences are stored: dense, packed, paged, partly used; empty; with strides of all kinds."""

import pytest
import torch

from tests.support.cases import gradients_of, problem
from tests.support.oracle import check, run

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout_q", ["dense", "packed"])
@pytest.mark.parametrize("layout_k", ["dense", "packed", "paged"])
def test_layouts(place, layout_q, layout_k, dtype):
    check(
        place.backend,
        problem([33, 0, 7, 33], [40, 5, 0, 40], layout_q=layout_q, layout_k=layout_k, dtype=dtype, window_right=0),
    )


@pytest.mark.parametrize("layout_q", ["dense", "packed"])
@pytest.mark.parametrize("layout_k", ["dense", "packed", "paged"])
def test_used_part_only(place, layout_q, layout_k):
    check(
        place.backend, problem([9, 0, 17], [21, 4, 3], layout_q=layout_q, layout_k=layout_k, used=True, window_left=6)
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages(place, page_size):
    check(place.backend, problem([1, 1, 5], [100, 3, 64], layout_k="paged", page_size=page_size, window_right=0))


def test_pages_shared_between_sequences(place):
    x = problem([5, 5], [12, 12], layout_k="paged", poison=False)
    x.page_table[1, :2] = x.page_table[0, :2]
    check(place.backend, x)


@pytest.mark.parametrize("len_q, len_k", [([], []), ([0, 0], [7, 7]), ([4, 4], [0, 0]), ([0], [0])])
@pytest.mark.parametrize("layout_q", ["dense", "packed"])
@pytest.mark.parametrize("layout_k", ["dense", "packed", "paged"])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_empty(place, len_q, len_k, layout_q, layout_k, num_splits):
    x = problem(len_q, len_k, layout_q=layout_q, layout_k=layout_k, slack=0, num_splits=num_splits, window_right=0)
    got = check(place.backend, x)
    assert (got.out == 0).all() and (got.lse == -torch.inf).all()


@pytest.mark.parametrize("len_q, len_k", [(257, 1023), (1, 4097), (513, 31)])
def test_odd_tails_of_tiles(place, len_q, len_k):
    check(place.backend, problem([len_q], [len_k], heads=2, heads_kv=1, dim=8, window_right=3, window_left=700))


def test_equal_lengths_apart_are_grouped(place):
    """Sequences that share lengths are processed together, though others lie between them."""
    lens = [7, 3, 7, 7, 3, 12, 7]
    check(place.backend, problem(lens, lens, layout_q="packed", layout_k="packed", window_right=0))


def _variants(t):
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 1), torch.nan, dtype=t.dtype)
    wide[..., :-1] = t
    shifted = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype)
    shifted[1:] = t.flatten()
    return {
        "padded rows": wide[..., :-1],
        "odd offset": shifted[1:].view(t.shape),
        "head-major": t.transpose(1, 2).contiguous().transpose(1, 2),
        "dim-major": t.transpose(-1, -2).contiguous().transpose(-1, -2),
        "stepped": t.repeat_interleave(2, dim=1)[:, ::2],
    }


@pytest.mark.parametrize("kind", ["padded rows", "odd offset", "head-major", "dim-major", "stepped"])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_strides_do_not_matter(place, kind, heads_kv):
    x = problem([17], [17], heads_kv=heads_kv, window_right=0)
    dout, dlse = gradients_of(x, lse=heads_kv == 2)
    want = run(place.backend, x, dout, dlse)
    y = x.replace(**{name: _variants(t)[kind] for name, t in (("q", x.q), ("k", x.k), ("v", x.v))})
    got = run(place.backend, y, _variants(dout)[kind], dlse)
    for a, b in zip(
        (got.out, got.lse, got.grads.q, got.grads.k, got.grads.v),
        (want.out, want.lse, want.grads.q, want.grads.k, want.grads.v),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("broadcast", ["heads", "batch"])
def test_broadcast_keys(place, broadcast):
    x = problem([13, 13], [21, 21], heads_kv=4)
    shape = x.k.shape
    few = (x.k[:, :, :1], x.v[:, :, :1]) if broadcast == "heads" else (x.k[:1], x.v[:1])
    k, v = (t.expand(shape) for t in few)
    check(place.backend, x.replace(k=k, v=v))


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_results_go_into_buffers(place, heads_kv):
    x = problem([9, 9], [9, 9], heads_kv=heads_kv)
    want_out, want_lse = place.backend.forward(x)
    base = torch.full((2, 9, 4, 24), torch.nan)
    out, lse = base[..., :16], torch.full((2, 4, 9), torch.nan)
    got = place.backend.forward(x, out, lse)
    assert got[0] is out and got[1] is lse
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)
    assert base[..., 16:].isnan().all()


def test_only_what_is_asked_for(place):
    x = problem([9], [9], sink=torch.zeros(4))
    dout, dlse = gradients_of(x)
    whole = run(place.backend, x, dout, dlse).grads
    for i, name in enumerate(("q", "k", "v", "sink")):
        grads = run(place.backend, x, dout, dlse, tuple(i == j for j in range(4))).grads
        torch.testing.assert_close(getattr(grads, name), getattr(whole, name))
        assert all(getattr(grads, other) is None for other in ("q", "k", "v", "sink") if other != name)


@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("which", ["out", "lse"])
def test_either_gradient_may_be_absent(place, heads_kv, which):
    x = problem([9], [12], heads_kv=heads_kv, window_right=0)
    dout, dlse = gradients_of(x)
    check(place.backend, x, dout if which == "out" else None, dlse if which == "lse" else None)


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_autocast_does_not_reach_the_arithmetic(place, heads_kv):
    """What dtype a call runs in is settled before a backend sees it."""
    x = problem([40], [40], heads_kv=heads_kv)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(place.backend, x, *gradients_of(x))
    want = run(place.backend, x, *gradients_of(x))
    assert torch.equal(got.out, want.out) and torch.equal(got.grads.k, want.grads.k)
