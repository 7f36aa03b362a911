"""Inputs on which attention libraries have gone wrong for their users: one test per kind of fault."""

import math

import pytest
import torch

from tests.support.cases import gradients_of, problem, tiles
from tests.support.oracle import check, run
from tilewise.mods import BlockSparseTensors, create_block_sparse, mask_mod
from tilewise.problem import AttentionInputs, canonical_band


def dense(q, k, v, **options):
    return AttentionInputs(q, k, v, q.shape[-1] ** -0.5, **options)


def with_band(x, causal, left, right):
    left, right = canonical_band(causal, left, right)
    return x.replace(window_left=left, window_right=right)


def test_minus_one_bound_is_unbounded_not_zeros(place):
    x = problem([128, 128], [128, 128], heads=8, heads_kv=8, dim=64, dtype=torch.bfloat16)
    for causal, bounds, same_as in (
        (True, [(-1, 0), (-1, -1), (None, None), (None, 0)], (None, 0)),
        (False, [(-1, -1)], (None, None)),
        (False, [(-1, 0)], (None, 0)),
    ):
        want = place.backend.forward(with_band(x, False, *same_as))
        for left, right in bounds:
            got = place.backend.forward(with_band(x, causal, left, right))
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for left, right in ((0, -1), (5, -1)):
        assert place.backend.forward(with_band(x, False, left, right))[1].isfinite().all()


@pytest.mark.parametrize("len_k, empty", [(32, 33), (1, 64), (2, 63), (3, 62), (64, 1), (65, 0)])
def test_rows_before_a_two_sided_window_are_empty(place, len_k, empty):
    got = check(place.backend, problem([129], [len_k], heads=1, heads_kv=1, dim=64, window_left=32, window_right=64))
    dead = got.lse[0, 0] == -math.inf
    assert dead[:empty].all() and not dead[empty:].any() and (got.out[0, :empty] == 0).all()


def test_equivalent_windows_agree(place):
    size, keep = 256, 17
    x = problem([size], [size], heads=2, heads_kv=2, dim=64, dtype=torch.float16)
    want = place.backend.forward(with_band(x, True, None, None))
    for left in (-1, size, size - 1):
        got = place.backend.forward(with_band(x, False, left, 0))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    out, _ = place.backend.forward(with_band(x, False, keep - 1, 0))
    i = torch.arange(size)
    kept = (i <= i[:, None]) & (i > i[:, None] - keep)
    assert int(kept[100].sum()) == keep
    scores = (x.q.float().transpose(1, 2) @ x.k.float().permute(0, 2, 3, 1) / 8).masked_fill(~kept, -math.inf)
    torch.testing.assert_close(
        out.float(), (scores.softmax(-1) @ x.v.float().transpose(1, 2)).transpose(1, 2), atol=2e-3, rtol=0
    )


def test_one_key_per_packed_sequence_has_zero_gradients_not_nan(place):
    q, k, v = (torch.randn(n, 1, 32).mul(3).half() for n in (256, 3, 3))
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 76, 110, 256], [0, 1, 2, 3]))
    x = dense(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=256, max_seqlen_k=3, window_right=0)
    got = run(place.backend, x, torch.ones(256, 1, 32).half(), None)
    seen = torch.zeros(256, dtype=torch.bool)
    seen[[75, 109, 255]] = True
    assert torch.equal(got.out[seen], v) and (got.out[~seen] == 0).all()
    assert (got.lse[0, ~seen] == -math.inf).all() and got.lse[0, seen].isfinite().all()
    # P is 1 in exact arithmetic; recomputed from an fp32 lse it may miss 1 by a rounding.
    assert got.grads.q.abs().max() <= 1e-3 and got.grads.k.abs().max() <= 1e-3
    torch.testing.assert_close(got.grads.v, torch.ones_like(v), rtol=1e-3, atol=0)


@pytest.mark.parametrize("len_k", [400, 448, 449, 511, 513, 640])
def test_first_tile_masked_and_logits_very_negative(place, len_k):
    q, k = torch.full((1, 88, 14, 128), 4.0), torch.full((1, len_k, 2, 128), -4.0)
    v = torch.randn(1, len_k, 2, 128)
    x = dense(q, k, v, window_right=0)
    out, lse = place.backend.forward(x)
    seen = torch.arange(88) + len_k - 88 + 1
    want = (v[0].cumsum(0)[seen - 1] / seen[:, None, None]).repeat_interleave(7, 1)
    torch.testing.assert_close(out[0], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[0, 3], -181.01934 + seen.log(), atol=1e-3, rtol=0)
    if len_k == 448:
        torch.testing.assert_close(
            lse[0, 0, [0, 2, 87]], torch.tensor([-175.1305, -175.1249, -174.9145]), atol=1e-3, rtol=0
        )
    with tiles(256, 32, 2**20):  # in one tile of rows, the last ones see nothing of the first tiles of keys
        windowed, _ = place.backend.forward(x.replace(window_left=30))
    for i in range(88):
        seen_rows = v[0, len_k - 88 + i - 30 : len_k - 88 + i + 1, 0]
        # One rounding of a logit of -181 is 1.5e-5: tiles of other widths may round it the other way.
        torch.testing.assert_close(windowed[0, i, 0], seen_rows.mean(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 128])
@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("right", [None, 0, 5])
def test_huge_finite_inputs(place, length, heads_kv, right):
    """Scores and their maximum must be scaled by the same arithmetic, else their difference overflows exp."""
    q, k = (torch.full((1, length, h, 64), 133120.0).bfloat16() for h in (2, heads_kv))
    got = run(place.backend, dense(q, k, k, window_right=right), torch.ones_like(q), None)
    assert (got.out == 133120).all()
    torch.testing.assert_close(got.lse, torch.full((1, 2, length), 1.4176748e11), rtol=1e-6, atol=0)
    assert all(g.isfinite().all() for g in (got.grads.q, got.grads.k, got.grads.v))


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_lse_is_a_natural_logarithm(place, heads_kv):
    x = problem([256], [256], heads=2, heads_kv=heads_kv, dim=32, dtype=torch.float16)
    k = x.k.double().repeat_interleave(2 // heads_kv, dim=2)
    want = (x.q.double().transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(32)).logsumexp(-1)
    torch.testing.assert_close(place.backend.forward(x)[1].double(), want, atol=1e-4, rtol=0)


def test_sink_of_empty_rows_and_its_gradient(place):
    x = problem([5], [3], window_right=0, sink=torch.full((4,), 0.7))
    got = run(place.backend, x, *gradients_of(x), needs=(False, False, False, True))
    assert (got.out[0, :2] == 0).all()
    torch.testing.assert_close(got.lse[0, :, :2], torch.full((4, 2), 0.7))
    alone = place.backend.forward(x.replace(sink=None))[1][0, :, 2:]
    torch.testing.assert_close(got.lse[0, :, 2:], torch.logaddexp(alone, torch.tensor(0.7)))
    dout, dlse = gradients_of(x)
    p = torch.exp(0.7 - got.lse)
    delta = (dout * got.out).sum(-1).mT - dlse
    torch.testing.assert_close(got.grads.sink, -(p * delta).sum((0, 2)))
    assert got.grads.q is None and got.grads.k is None


@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("right", [None, 0])
def test_batch_or_queries_of_size_zero(place, num_splits, right):
    for batch, len_q, len_k in ((2, 0, 64), (0, 64, 64), (0, 395, 16)):
        q, k = torch.empty(batch, len_q, 16, 128).bfloat16(), torch.randn(batch, len_k, 16, 128).bfloat16()
        got = run(place.backend, dense(q, k, k, num_splits=num_splits, window_right=right), torch.empty_like(q), None)
        assert got.out.shape == q.shape and got.lse.shape == (batch, 16, len_q)
        assert (got.grads.k == 0).all() and got.grads.k.shape == k.shape
    for edges in ([0, 0, 0], [0]):
        cu = torch.tensor(edges, dtype=torch.int32)
        q = torch.empty(0, 2, 8)
        got = run(place.backend, dense(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu), q, None)
        assert got.out.shape == q.shape and got.lse.shape == (2, 0)


def test_one_token_sequences_some_empty_with_groups(place):
    check(
        place.backend,
        problem(
            [1, 0, 1],
            [3, 0, 5],
            heads=9,
            heads_kv=3,
            dim=64,
            dtype=torch.bfloat16,
            layout_q="packed",
            layout_k="packed",
            slack=0,
            window_right=0,
        ),
    )
    check(
        place.backend,
        problem(
            [0, 0, 0, 1], [0, 0, 0, 1], heads=21, heads_kv=7, dim=120, layout_q="packed", layout_k="packed", slack=0
        ),
    )


def test_rows_past_the_last_sequence_are_zero(place):
    lens = [14, 28, 51]
    x = problem(lens, lens, heads=4, heads_kv=4, dim=64, layout_q="packed", layout_k="packed", slack=2)
    got = run(place.backend, x, torch.ones(x.out_shape), None)
    for t in (got.out, got.grads.q, got.grads.k, got.grads.v):
        assert (t[93:] == 0).all() and t.isfinite().all()
    assert (got.lse[:, 93:] == -math.inf).all()


def test_page_table_used_to_its_last_slot(place):
    x = problem([1], [512], heads=2, heads_kv=1, layout_k="paged", page_size=256)
    assert x.page_table.shape == (1, 2)
    check(place.backend, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_packed_paged_and_split(place, dtype):
    x = problem(
        [1, 1],
        [512, 1024],
        heads=4,
        heads_kv=2,
        dim=64,
        dtype=dtype,
        layout_q="packed",
        layout_k="paged",
        page_size=256,
    )
    want = check(place.backend, x)
    for splits in (0, 2, 3, 8):
        out, lse = place.backend.forward(x.replace(num_splits=splits))
        torch.testing.assert_close(out, want.out, atol=2e-3, rtol=2e-2)
        torch.testing.assert_close(lse, want.lse, atol=1e-4, rtol=0)
        assert splits or torch.equal(out, want.out)


@pytest.mark.parametrize("len_k", [255, 256, 257, 511, 513])
@pytest.mark.parametrize("dim", [32, 128])
def test_tiny_odd_split(place, len_k, dim):
    check(place.backend, problem([1], [len_k], heads=1, heads_kv=1, dim=dim, dtype=torch.bfloat16, num_splits=4))


def test_many_short_sequences():
    from tilewise.backends.cpu.backend import CpuBackend

    count = 80_000
    q = torch.randn(count * 16, 1, 8)
    cu = torch.arange(0, count * 16 + 1, 16, dtype=torch.int32)
    out, _ = CpuBackend().forward(dense(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=16, max_seqlen_k=16))
    batch = q.view(count, 16, 8)
    want = (batch @ batch.mT * 8**-0.5).softmax(-1) @ batch
    torch.testing.assert_close(out.view_as(want), want, atol=1e-5, rtol=1e-5)


def test_many_heads_and_large_batches():
    from tilewise.backends.cpu.backend import CpuBackend

    for shape in ((1, 3, 71280, 8), (65536, 4, 1, 8)):
        q = torch.randn(shape)
        k = q[:, :, :1].expand(shape)
        out, _ = CpuBackend().forward(dense(q, k, q, window_right=0, softcap=9.0))
        torch.testing.assert_close(out[:, 0], q[:, 0])  # the first row sees one key
        last = (9 * torch.tanh((q[:, -1:] * k).sum(-1) * 8**-0.5 / 9)).softmax(1)
        torch.testing.assert_close(out[:, -1], (last[..., None] * q).sum(1), atol=1e-5, rtol=1e-5)


def test_a_mask_holds_in_the_backward(place):
    traced = mask_mod(lambda b, h, i, j: (j <= i) | (j < 32))
    x = problem([256], [256], heads=4, heads_kv=4, dim=64, mask_mod=traced.modifier, mask_captures=traced.captures)
    check(place.backend, x)


def test_block_lists_that_are_mostly_empty(place):
    lists = create_block_sparse(lambda b, h, i, j: (j <= i) & (j >= i - 64), 1, 1, 1024, 128, (64, 64))
    x = problem(
        [1024] * 2, [128] * 2, heads=16, heads_kv=1, dim=32, dtype=torch.bfloat16, block_sparse=lists, num_splits=2
    )
    out, lse = place.backend.forward(x)
    assert isinstance(lists, BlockSparseTensors)
    assert (out[:, 256:] == 0).all() and (lse[:, :, 256:] == -math.inf).all() and lse[:, :, :64].isfinite().all()


@pytest.mark.parametrize("dim", [72, 59, 61, 100])
def test_odd_head_dims_give_equal_bits(place, dim):
    x = problem([130], [130], heads=4, heads_kv=4, dim=dim, dtype=torch.float16)
    first = place.backend.forward(x)
    for _ in range(3):
        again = place.backend.forward(x)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    check(
        place.backend,
        problem(
            [3],
            [7],
            heads=4,
            heads_kv=4,
            dim=dim,
            dtype=torch.float16,
            layout_q="packed",
            layout_k="packed",
            window_right=0,
        ),
    )


def test_misaligned_output_gradient(place):
    x = problem([65], [65], heads=4, heads_kv=4, dim=64, dtype=torch.bfloat16)
    dout, _ = gradients_of(x)
    want = run(place.backend, x, dout, None)
    shifted = torch.empty(dout.numel() + 1, dtype=dout.dtype)[1:].view(dout.shape).copy_(dout)
    wide = torch.empty(*dout.shape[:-1], 65, dtype=dout.dtype)[..., :64].copy_(dout)
    for other in (shifted, wide, torch.ones(()).bfloat16().expand(dout.shape)):
        got = run(place.backend, x, other, None)
        assert all(getattr(got.grads, n).isfinite().all() for n in "qkv")
        if other is not shifted and other is not wide:
            continue
        for name in "qkv":
            assert torch.equal(getattr(got.grads, name), getattr(want.grads, name))
