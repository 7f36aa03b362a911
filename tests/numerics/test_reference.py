"""The reference against sums written out row by row, and its gradients against finite differences."""

import math

import pytest
import torch

from tests.support.cases import problem
from tilewise.backends.cpu.reference import attention
from tilewise.mods import mask_mod, score_mod


def by_hand(q, k, v, visible, scale, sink=None, change=lambda s, h, i, j: s):
    """One sequence, (Sq, H, D): Python loops over rows and keys in double precision."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for h in range(q.shape[1]):
        for i in range(q.shape[0]):
            terms = [
                (math.exp(change(scale * float(q[i, h] @ k[j, h // group]), h, i, j)), v[j, h // group])
                for j in range(k.shape[0])
                if visible(i, j)
            ]
            total = sum(w for w, _ in terms) + (0.0 if sink is None else math.exp(float(sink[h])))
            if total:
                lse[h, i] = math.log(total)
            for w, row in terms:
                out[i, h] += w / total * row
    return out, lse


@pytest.mark.parametrize("left, right", [(None, None), (None, 0), (2, 0), (0, 2), (3, -2), (-1, 4)])
@pytest.mark.parametrize("len_q, len_k", [(5, 9), (9, 5), (7, 7), (1, 4)])
def test_band(left, right, len_q, len_k):
    x = problem([len_q], [len_k], dtype=torch.float64, window_left=left, window_right=right)
    o = len_k - len_q

    def visible(i, j):
        return (left is None or j >= i + o - left) and (right is None or j <= i + o + right)

    out, lse = attention(x)
    want_out, want_lse = by_hand(x.q[0], x.k[0], x.v[0], visible, x.softmax_scale)
    torch.testing.assert_close(out[0], want_out)
    torch.testing.assert_close(lse[0], want_lse)


@pytest.mark.parametrize("layout_q", ["dense", "packed"])
@pytest.mark.parametrize("layout_k", ["dense", "packed", "paged"])
def test_layouts_sink_softcap(layout_q, layout_k):
    lens_q, lens_k = [3, 0, 6], [5, 4, 0]
    x = problem(
        lens_q, lens_k, dtype=torch.float64, layout_q=layout_q, layout_k=layout_k, used=True, window_right=0,
        softcap=1.5, sink=torch.tensor([0.3, -1.0, 2.0, 0.0]),
    )  # fmt: skip
    out, lse = attention(x)
    for b, (n, m) in enumerate(zip(lens_q, lens_k, strict=True)):
        start = 0 if x.cu_seqlens_q is None else int(x.cu_seqlens_q[b])
        mine = slice(start, start + n)
        q = (x.q[b] if layout_q == "dense" else x.q)[mine]
        if layout_k == "paged":
            k, v = (t[x.page_table[b].clamp(min=0)].flatten(0, 1)[:m] for t in (x.k, x.v))
        else:
            first = 0 if x.cu_seqlens_k is None else int(x.cu_seqlens_k[b])
            k, v = ((t[b] if layout_k == "dense" else t)[first : first + m] for t in (x.k, x.v))
        want = by_hand(
            q, k, v, lambda i, j, n=n, m=m: j <= i + m - n, x.softmax_scale, x.sink,
            lambda s, h, i, j: 1.5 * math.tanh(s / 1.5),
        )  # fmt: skip
        torch.testing.assert_close((out[b] if layout_q == "dense" else out)[mine], want[0])
        torch.testing.assert_close((lse[b] if layout_q == "dense" else lse)[:, mine], want[1])
    assert out.isfinite().all()


def test_modifiers():
    bias = torch.randn(4, 12, dtype=torch.float64)
    parity = torch.arange(12) % 2
    score = score_mod(lambda s, b, h, i, j: s * 0.5 + bias[h, j])
    mask = mask_mod(lambda b, h, i, j: (parity[i] == parity[j]) | (h == 1))
    x = problem(
        [6], [9], dtype=torch.float64, score_mod=score.modifier, score_captures=score.captures,
        mask_mod=mask.modifier, mask_captures=mask.captures,
    )  # fmt: skip
    out, lse = attention(x)
    for h in range(4):
        want = by_hand(
            x.q[0], x.k[0], x.v[0], lambda i, j, h=h: parity[i] == parity[j] or h == 1, x.softmax_scale,
            change=lambda s, h, i, j: s * 0.5 + float(bias[h, j]),
        )  # fmt: skip
        torch.testing.assert_close(out[0, :, h], want[0][:, h])
        torch.testing.assert_close(lse[0, h], want[1][h])


def test_gradients_against_finite_differences():
    x = problem(
        [4, 0, 5],
        [6, 3, 2],
        heads=2,
        heads_kv=1,
        dim=8,
        dtype=torch.float64,
        poison=False,
        window_right=0,
        layout_k="packed",
    )
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]

    def call(q, k, v, sink):
        out, lse = attention(x.replace(q=q, k=k, v=v, sink=sink))
        return out, torch.where(lse.isfinite(), lse, 0)

    assert torch.autograd.gradcheck(call, (*leaves, sink))
