"""score_mod and mask_mod: forward, derivative, gradients of captured tensors."""

import math

import pytest
import torch

from tests.support.cases import gradients_of, problem
from tests.support.oracle import check, run
from tilewise.mods import mask_mod, score_mod

BIAS = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
DOCS = torch.arange(128) // 11


def score(fn):
    traced = score_mod(fn)
    return {"score_mod": traced.modifier, "score_captures": traced.captures}


def mask(fn):
    traced = mask_mod(fn)
    return {"mask_mod": traced.modifier, "mask_captures": traced.captures}


SCORES = {
    "relative bias": lambda s, b, h, i, j: s + BIAS[h, (i - j).abs()],
    "key scale": lambda s, b, h, i, j: s * BIAS[h, j],
    "cap": lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0),
    "square, by batch": lambda s, b, h, i, j: s * s * 0.1 + b * 0.2 - h * 0.01,
    "constant": lambda s, b, h, i, j: BIAS[h, i] + j * 0.01,
    "minus infinity": lambda s, b, h, i, j: torch.where(j > i + 3, -math.inf, s),
}
MASKS = {
    "documents": lambda b, h, i, j: DOCS[i] == DOCS[j],
    "prefix": lambda b, h, i, j: (j <= i) | (j < 5),
    "by head": lambda b, h, i, j: (i + j) % (h + 1) == 0,
    "by batch": lambda b, h, i, j: j >= b * 20,
    "none": lambda b, h, i, j: j > 1000,
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_score_mods(place, name, dtype):
    check(place.backend, problem([45, 20], [45, 60], dtype=dtype, window_right=0, **score(SCORES[name])))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_mask_mods(place, name, layout):
    check(place.backend, problem([45, 45, 8], [45, 45, 30], layout_q=layout, layout_k=layout, **mask(MASKS[name])))


@pytest.mark.parametrize("layout_k", ["dense", "packed", "paged"])
def test_both(place, layout_k):
    """Positions are those within the sequence, however it is stored; gradients reach the bias."""
    x = problem(
        [31, 9],
        [50, 9],
        layout_q="packed",
        layout_k=layout_k,
        sink=torch.randn(4),
        **score(SCORES["relative bias"]),
        **mask(MASKS["prefix"]),
    )
    got = check(place.backend, x)
    assert got.grads.score_captures[0].abs().sum() > 0


def test_a_mask_equals_the_band_that_it_spells(place):
    """The backward sees the mask too: never gradients of the unmasked problem."""
    plain = problem([64], [64], dim=64, heads_kv=4, window_right=0)
    masked = problem([64], [64], dim=64, heads_kv=4, **mask(lambda b, h, i, j: j <= i))
    dout, _ = gradients_of(plain)
    want, got = run(place.backend, plain, dout, None), run(place.backend, masked, dout, None)
    for name in ("q", "k", "v"):
        torch.testing.assert_close(getattr(got.grads, name), getattr(want.grads, name), rtol=1e-5, atol=1e-5)


def test_invisible_nan_reaches_no_captured_tensor(place):
    """One key that nobody sees lies between keys that are seen, so its tile is read."""
    x = problem([20], [40], **score(SCORES["key scale"]), **mask(lambda b, h, i, j: j != 15))
    x.k[:, 15] = torch.nan
    x.v[:, 15] = torch.nan
    got = run(place.backend, x, *gradients_of(x))
    assert got.out.isfinite().all()
    assert got.grads.score_captures[0].isfinite().all() and got.grads.q.isfinite().all()
    assert (got.grads.k[:, 15] == 0).all() and (got.grads.v[:, 15] == 0).all()


def test_a_bf16_bias_gathers_its_gradient_in_fp32(place):
    """Thousands of terms per entry: summed in bf16 they would stall."""
    bias = torch.zeros(4, dtype=torch.bfloat16)
    x = problem([200], [200], **score(lambda s, b, h, i, j: s * (1 + bias[h])))
    check(place.backend, x)
