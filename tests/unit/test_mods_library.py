"""The library of modifications against formulas written out, and the pictures."""

import builtins
import sys

import pytest
import torch

from tilewise import mods
from tilewise.mods.fingerprint import fingerprint
from tilewise.mods.trace import trace

B, H, M, N = 2, 3, 7, 9
b, h, i, j = (torch.arange(n).view([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate((B, H, M, N)))

IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 1]])
LENGTHS = torch.tensor([2, 5])
OFFSET = torch.tensor(2)

MASKS = {
    "causal": (mods.causal(), j <= i),
    "causal at the end": (mods.causal(N - M), j <= i + 2),
    "causal with a tensor offset": (mods.causal(OFFSET), j <= i + 2),
    "window": (mods.sliding_window(2), (j <= i) & (j >= i - 2)),
    "window of both sides": (mods.sliding_window(1, 3, offset=-1), (j <= i + 2) & (j >= i - 2)),
    "window bounded on the left": (mods.sliding_window(2, None), j >= i - 2),
    "window bounded on the right": (mods.sliding_window(None, 1), j <= i + 1),
    "window unbounded": (mods.sliding_window(None, None), (j >= 0) & (i >= 0)),
    "shifted window": (mods.sliding_window(-1, 4), (j >= i + 1) & (j <= i + 4)),
    "prefix": (mods.prefix_lm(3), (j < 3) | (j <= i)),
    "prefix per batch": (mods.prefix_lm(LENGTHS, 1), (j < LENGTHS[b]) | (j <= i + 1)),
    "prefix as a tensor": (mods.prefix_lm(LENGTHS[1]), (j < 5) | (j <= i)),
    "documents": (mods.document(IDS[0]), IDS[0][i] == IDS[0][j]),
    "documents per batch": (mods.document(IDS), IDS[b, i] == IDS[b, j]),
    "documents of queries and keys": (mods.document(IDS[0][:M], IDS[1]), IDS[0][i] == IDS[1][j]),
    "dilated": (mods.dilated(3, 2, 2), (j <= i + 2) & ((i + 2 - j) % 2 == 0) & (i + 2 - j < 6)),
    "and": (mods.and_masks(mods.causal(), mods.document(IDS)), (j <= i) & (IDS[b, i] == IDS[b, j])),
    "or": (mods.or_masks(mods.causal(-3), mods.document(IDS)), (j <= i - 3) | (IDS[b, i] == IDS[b, j])),
    "not": (mods.not_masks(mods.causal(), mods.sliding_window(None, 3)), j > i + 3),
    "and of none": (mods.and_masks(), (i >= 0) & (j >= 0)),
    "or of none": (mods.or_masks(), (i < 0) & (j < 0)),
}


@pytest.mark.parametrize("mask, want", MASKS.values(), ids=MASKS.keys())
def test_masks(mask, want):
    modifier, captures = trace(mask, "mask")
    got = modifier.apply_mask(*map(torch.arange, (B, H, M, N)), captures)
    assert torch.equal(got, want.expand(B, H, M, N))
    assert fingerprint(mask) is not None, "traced again on every call"


SLOPES = torch.rand(H, dtype=torch.float64, requires_grad=True)
TABLE = torch.randn(H, 7, dtype=torch.float64, requires_grad=True)
SCORE = torch.randn(B, H, M, N, dtype=torch.float64, requires_grad=True)

SCORES = {
    "alibi": (mods.alibi(SLOPES, 2), SCORE - SLOPES[h] * (i + 2 - j).abs(), (SCORE, SLOPES)),
    "relative bias": (mods.relative_bias(TABLE), SCORE + TABLE[h, (j - i).clamp(-3, 3) + 3], (SCORE, TABLE)),
    "relative bias of all heads": (
        mods.relative_bias(TABLE[1]),
        SCORE + TABLE[1][(j - i).clamp(-3, 3) + 3],
        (SCORE, TABLE),
    ),
    "relative bias at the end": (
        mods.relative_bias(TABLE, OFFSET),
        SCORE + TABLE[h, (j - i - 2).clamp(-3, 3) + 3],
        (SCORE, TABLE),
    ),
    "softcap": (mods.softcap(0.7), 0.7 * torch.tanh(SCORE / 0.7), (SCORE,)),
}


@pytest.mark.parametrize("fn, want, inputs", SCORES.values(), ids=SCORES.keys())
def test_scores_and_their_gradients(fn, want, inputs):
    modifier, captures = trace(fn, "score", score_dtype=torch.float64)
    got = modifier.apply_score(SCORE, *map(torch.arange, (B, H, M, N)), captures)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    gradients = [torch.autograd.grad(x, inputs, grad, retain_graph=True) for x in (got, want)]
    torch.testing.assert_close(*gradients)
    assert fingerprint(fn) is not None, "traced again on every call"


def test_a_tensor_offset_may_change_without_another_modifier():
    first, second = (trace(mods.causal(torch.tensor(n)), "mask") for n in (0, 3))
    assert first[0] is second[0]
    assert second[0].apply_mask(*map(torch.arange, (1, 1, 4, 9)), second[1]).sum() == 4 + 5 + 6 + 7


def test_alibi_slopes_of_the_paper():
    assert mods.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    torch.testing.assert_close(mods.alibi_slopes(16), 2 ** (-0.5 * torch.arange(1, 17)))
    twelve = mods.alibi_slopes(12)
    assert twelve.tolist()[:8] == [2.0**-n for n in range(1, 9)]
    torch.testing.assert_close(twelve[8:], mods.alibi_slopes(16)[::2][:4])


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: mods.causal(1.5), TypeError, "offset: expected an int, got 1.5"),
        (lambda: mods.causal(torch.zeros(())), TypeError, "offset: expected a tensor of integers"),
        (lambda: mods.sliding_window(True), TypeError, "left: expected an int, got True"),
        (lambda: mods.sliding_window(1, -2), ValueError, r"left, right: expected left \+ right >= 0, got 1 \+ -2"),
        (lambda: mods.prefix_lm("4"), TypeError, "prefix_length: expected an int, got '4'"),
        (lambda: mods.document([0, 1]), TypeError, r"ids: expected a tensor of integers, got \[0, 1\]"),
        (lambda: mods.document(SLOPES), TypeError, "ids: expected a tensor of integers, got a tensor of shape"),
        (lambda: mods.document(IDS[None]), ValueError, "ids: expected rank 1 or 2, got shape"),
        (lambda: mods.dilated(4, 0), ValueError, "dilation: expected at least 1, got 0"),
        (lambda: mods.alibi(IDS), ValueError, "slopes: expected rank 1, got shape"),
        (lambda: mods.alibi(IDS[0]), TypeError, "slopes: expected a tensor of floating-point numbers"),
        (lambda: mods.relative_bias(torch.zeros(3, 4)), ValueError, "table: expected an odd last dimension"),
        (lambda: mods.softcap(0.0), ValueError, "value: expected a positive number, got 0.0"),
        (lambda: mods.softcap("1"), TypeError, "value: expected a float, got '1'"),
        (lambda: mods.alibi_slopes(0), ValueError, "heads: expected at least 1, got 0"),
        (lambda: mods.and_masks(mods.causal(), 3), TypeError, "masks: expected mask functions"),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ---- pictures
def picture(path):
    import matplotlib.image

    return torch.from_numpy(matplotlib.image.imread(path).copy())[..., :3]


def test_show_draws_what_is_visible(tmp_path):
    shares = []
    for left in (20, 200):
        path = tmp_path / f"{left}.png"
        mods.show(mods.sliding_window(left), 1, 1, 256, 256, path=path, block_size=(32, 32))
        image = picture(path)
        dark = (image - torch.tensor([0x08, 0x51, 0x9C]) / 255).abs().amax(-1) < 0.02
        light = (image - torch.tensor([0x9E, 0xCA, 0xE1]) / 255).abs().amax(-1) < 0.02
        half = image.shape[1] // 2
        shares.append((dark[:, :half].float().mean(), light[:, :half].float().mean(), dark[:, half:].float().mean()))
    assert shares[0][0] < 0.001 < shares[1][0]  # full blocks only in the wide window
    assert all(partial > 0.05 for _, partial, _ in shares)
    assert shares[0][2] < shares[1][2] / 3  # the mask itself


def test_show_has_panels_for_what_the_mask_depends_on(tmp_path):
    one, many = tmp_path / "one.svg", tmp_path / "many.svg"
    mods.show(mods.causal(), 2, 4, 300, 2000, path=one)
    mods.show(lambda b, h, q, k: q - k > h * 8, 2, 4, 300, 2000, path=many)
    assert many.read_text().count("<image") == 4 * one.read_text().count("<image") == 8


def test_show_without_matplotlib(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="show: expected matplotlib, which is not installed"):
        mods.show(mods.causal(), 1, 1, 8, 8, path=tmp_path / "x.png")


def test_show_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="show: expected sizes of at least 1, got B=1, H=1, Sq=0, Sk=8"):
        mods.show(mods.causal(), 1, 1, 0, 8, path=tmp_path / "x.png")


def test_importing_mods_loads_no_compiler_and_no_matplotlib():
    import subprocess

    program = (
        "import sys, torch; before = set(sys.modules)\n"
        "import tilewise.mods\n"
        "new = set(sys.modules) - before\n"
        "print([m for m in new if m.startswith(('matplotlib', 'cutlass', 'sympy', 'torch._dynamo'))])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"
