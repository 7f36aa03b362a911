"""The public functions against PyTorch's attention and the reference."""

import pytest
import torch
import torch.nn.functional as F

import tilewise
from tilewise import interface


def tensors(*shapes, dtype=torch.float64, grad=True):
    torch.manual_seed(0)
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes]


def close(a, b, tolerance=1e-12):
    assert a.shape == b.shape and a.dtype == b.dtype
    assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), (a - b).abs().max()


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "unbounded": {"window_size": (-1, 0), "causal": True},
    "softcap": {"softcap": 3.0},
    "splits": {"num_splits": 3},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 > 0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_dense_matches_reference(name):
    x = tensors((2, 33, 4, 16), (2, 37, 2, 16), (2, 37, 2, 24))
    ours = tilewise.flash_attn_func(*x, **OPTIONS[name])
    theirs = tilewise.flash_attn_func(*x, **OPTIONS[name], backend="reference")
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    grads = [torch.autograd.grad(o.sin().sum() + lse.nan_to_num(0, 0, 0).cos().sum(), x) for o, lse in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        close(a, b)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_matches_dense(name):
    q, k, v = tensors((2, 33, 4, 16), (2, 37, 2, 16), (2, 37, 2, 24))
    cu_q = torch.tensor([0, 33, 66], dtype=torch.int32)
    cu_k = torch.tensor([0, 37, 74], dtype=torch.int32)
    dense, _ = tilewise.flash_attn_func(q, k, v, **OPTIONS[name])
    packed, lse = tilewise.flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, 33, torch.tensor(37), **OPTIONS[name]
    )
    close(packed, dense.flatten(0, 1))
    assert lse.shape == (4, 66)


def test_functional_entry_points():
    q, k, v = tensors((2, 9, 4, 16), (2, 9, 4, 16), (2, 9, 4, 16))
    out, lse = interface._flash_attn_fwd(q, k, v, causal=True)
    dout = torch.randn_like(out)
    dq = torch.full_like(q, float("nan"))
    grads = interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=True, dq=dq)
    expected = torch.autograd.grad(tilewise.flash_attn_func(q, k, v, causal=True)[0], (q, k, v), dout)
    assert grads[0] is dq
    for a, b in zip(grads, expected, strict=True):
        close(a, b)
    buffer = torch.full_like(out, float("nan"))
    assert interface._flash_attn_fwd(q.detach(), k.detach(), v.detach(), out=buffer, causal=True)[1] is None
    close(buffer, out)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_sdpa_is_pytorchs(mask):
    q, k, v = tensors((2, 4, 9, 20), (2, 2, 13, 20), (2, 2, 13, 12))
    bias = torch.randn(4, 9, 13, dtype=torch.float64, requires_grad=True)
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(1, 1, 9, 13) > 0.5},
        "float": {"attn_mask": bias},
    }[mask]
    ours = tilewise.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    theirs = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    close(ours, theirs)
    wanted = (q, k, v, bias) if mask == "float" else (q, k, v)
    grads = [torch.autograd.grad(o.square().sum(), wanted) for o in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_combine_ignores_dead_splits():
    out, lse = tensors((3, 2, 5, 4, 8), (3, 2, 5, 4), dtype=torch.float32, grad=False)
    out[1], lse[1] = float("nan"), float("-inf")
    merged, total = tilewise.flash_attn_combine(out, lse)
    live = [0, 2]
    close(total, lse[live].logsumexp(0), 1e-6)
    close(merged, (out[live] * lse[live].softmax(0)[..., None]).sum(0), 1e-6)


def rotate(x, position, cos, sin, interleaved):
    """One row at a time, as the formula reads."""
    y = x.clone()
    half = cos.shape[1]
    for r in range(half):
        i, j = (2 * r, 2 * r + 1) if interleaved else (r, r + half)
        c, s = cos[position, r], sin[position, r]
        y[..., i], y[..., j] = x[..., i] * c - x[..., j] * s, x[..., i] * s + x[..., j] * c
    return y


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", ["dense", "indexed", "paged"])
def test_kvcache_appends_and_attends(kind, interleaved):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, h, 16, dtype=torch.float64) for h in (4, 2, 2))
    angle = torch.randn(32, 4, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    lengths = [5, 11]
    past = torch.randn(2, 2, 16, 2, 16, dtype=torch.float64)  # (k or v, sequence, row, head, dim)
    options = {}
    if kind == "paged":
        table = torch.tensor([[3, 1, 6, -1], [7, 2, 5, 4]], dtype=torch.int32)
        caches = torch.full((2, 8, 4, 2, 16), float("nan"), dtype=torch.float64)
        options["page_table"] = table
        places = [[(int(table[b, i // 4]), i % 4) for i in range(14) if table[b, i // 4] >= 0] for b in range(2)]
    else:
        rows = [0, 1] if kind == "dense" else [4, 2]
        caches = torch.full((2, 2 if kind == "dense" else 5, 16, 2, 16), float("nan"), dtype=torch.float64)
        places = [[(rows[b], i) for i in range(14)] for b in range(2)]
        if kind == "indexed":
            options["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
    for b in range(2):
        for i in range(lengths[b]):
            caches[:, places[b][i][0], places[b][i][1]] = past[:, b, i]
    out, _ = tilewise.flash_attn_with_kvcache(
        q, caches[0], caches[1], k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32), causal=True, **options,
    )  # fmt: skip
    for b in range(2):
        new = torch.stack([rotate(k[b, i], lengths[b] + i, cos, sin, interleaved) for i in range(3)])
        turned = torch.stack([rotate(q[b, i], lengths[b] + i, cos, sin, interleaved) for i in range(3)])
        keys = torch.cat((past[0, b, : lengths[b]], new))
        values = torch.cat((past[1, b, : lengths[b]], v[b]))
        expected, _ = tilewise.flash_attn_func(turned[None], keys[None], values[None], causal=True, backend="reference")
        close(out[b], expected[0])
        for i in range(3):
            page, row = places[b][lengths[b] + i]
            close(caches[0][page, row], new[i])
            close(caches[1][page, row], v[b, i])
