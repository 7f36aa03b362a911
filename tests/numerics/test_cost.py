"""What a call costs and guarantees besides its values: memory, skipped work, equal bits on every run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.cases import gradients_of, problem
from tests.support.oracle import everything, run
from tilewise.backends.cpu import fused, tiled
from tilewise.backends.cpu.backend import CpuBackend
from tilewise.backends.cpu.sequences import TILE_ELEMENTS, Sequences
from tilewise.backends.cpu.visibility import Visibility
from tilewise.mods import score_mod


def pairs_read(x):
    """Number of (row, key) pairs of the tiles that a call walks."""
    visibility = Visibility(x)
    return sum(
        (rows.stop - rows.start) * tile.positions.shape[0] * len(span.sequences)
        for span in Sequences(x).spans()
        for rows in visibility.query_tiles(span)
        for tile in visibility.key_tiles(span, rows, slice(0, span.len_k))
    )


def test_work_is_in_proportion_to_what_is_visible():
    x = problem([8192], [8192], heads=1, heads_kv=1, dim=8)
    full = pairs_read(x)
    assert full == 8192**2
    assert pairs_read(x.replace(window_right=0)) < 0.55 * full
    assert pairs_read(x.replace(window_left=255, window_right=0)) <= full / 15
    # A bound of 0 is a bound, and costs what a bound of 1 does.
    ahead = pairs_read(x.replace(window_left=127, window_right=1))
    assert pairs_read(x.replace(window_left=127, window_right=0)) <= ahead <= full / 15


def test_one_query_with_a_window_reads_the_window():
    x = problem([1], [131072], heads=1, heads_kv=1, dim=8, window_left=127, window_right=0)
    assert pairs_read(x) == 128


def test_tiles_are_bounded():
    x = problem([5000] * 3, [5000] * 3, heads=8, heads_kv=2, dim=8)
    for span in Sequences(x).spans():
        heads = span.heads.stop - span.heads.start
        assert len(span.sequences) * heads * span.tile_q * span.tile_k <= TILE_ELEMENTS


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of its memory from /proc (Linux)")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_score_matrix(direction):
    """At 16k tokens a matrix of scores would take 1 GiB; the process grows by less than 200 MiB."""
    code = f"""
import pathlib, re, torch
from tilewise.backends.cpu import tiled
from tilewise.problem import AttentionInputs
torch.set_num_threads(2)

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

q = torch.randn(1, 16384, 1, 32)
x = AttentionInputs(q, q, q, 0.2, window_right=0)
out, lse = torch.empty(x.out_shape), torch.empty(x.lse_shape)
small = AttentionInputs(q[:, :600], q[:, :600], q[:, :600], 0.2, window_right=0)
small_out, small_lse = torch.empty(small.out_shape), torch.empty(small.lse_shape)
tiled.forward(small, small_out, small_lse)
tiled.backward(small, small_out, None, small_out, small_lse, (True, True, True, False))
before = peak()
tiled.forward(x, out, lse)
if {direction == "backward"}:
    tiled.backward(x, out, None, out, lse, (True, True, True, False))
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 200 * 1024


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_equal_bits_on_every_run(heads_kv):
    bias = torch.randn(4, 300, requires_grad=True)
    traced = score_mod(lambda s, b, h, i, j: s + bias[h, (i - j).abs()])
    calls = [
        problem([300, 300], [300, 300], heads_kv=heads_kv, window_right=0),
        problem([300, 300], [300, 300], heads_kv=heads_kv, score_mod=traced.modifier, score_captures=traced.captures),
        problem([90, 90], [120, 120], layout_k="paged", page_size=16, window_left=30, sink=torch.randn(4)),
    ]
    for x in calls:
        dout, _ = gradients_of(x)
        first = run(CpuBackend(), x, dout, None)
        for _ in range(3):
            again = run(CpuBackend(), x, dout, None)
            assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)
            for name in ("q", "k", "v", "sink"):
                a, b = getattr(again.grads, name), getattr(first.grads, name)
                assert a is b is None or torch.equal(a, b)
            for a, b in zip(again.grads.score_captures, first.grads.score_captures, strict=True):
                assert torch.equal(a, b)
    assert torch.are_deterministic_algorithms_enabled() is False


PLAIN = {"heads_kv": 4}


@pytest.mark.parametrize(
    "expected, options",
    [
        (False, PLAIN),
        (True, PLAIN | {"window_right": 0}),
        (True, PLAIN | {"window_left": 39, "window_right": 0}),
        (False, PLAIN | {"window_left": 39, "window_right": 39}),
        (None, PLAIN | {"window_left": 38, "window_right": 0}),
        (None, PLAIN | {"window_right": 1}),
        (None, PLAIN | {"softcap": 1.0}),
        (None, PLAIN | {"sink": torch.zeros(4)}),
        (None, PLAIN | {"num_splits": 2}),
        (None, PLAIN | {"dim_v": 8}),
        (None, {"heads_kv": 2}),
        (None, PLAIN | {"layout_q": "packed"}),
        (None, PLAIN | {"used": True}),
    ],
)
def test_when_torchs_own_kernel_is_used(expected, options):
    assert fused.causal_or_none(problem(**options)) is expected


def test_one_causal_query_sees_every_key():
    assert fused.causal_or_none(problem([1], [40], heads_kv=4, window_right=0)) is False
    assert fused.causal_or_none(problem([20], [40], heads_kv=4, window_right=0)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("right", [None, 0])
def test_the_two_ways_agree(dtype, right):
    x = problem([130], [130], heads_kv=4, dtype=dtype, window_right=right)
    dout, _ = gradients_of(x)
    out, lse = CpuBackend().forward(x)
    assert fused.forward(x, None, None) is not None
    other, other_lse = torch.empty_like(out), torch.empty_like(lse)
    tiled.forward(x, other, other_lse)
    bits = torch.finfo(dtype).eps * 4
    torch.testing.assert_close(other, out, rtol=bits, atol=bits)
    torch.testing.assert_close(other_lse, lse, rtol=1e-6, atol=1e-4)
    one = fused.backward(x, dout, None, out, lse, everything(x))
    two = tiled.backward(x, dout, None, out, lse, everything(x))
    for name in "qkv":
        torch.testing.assert_close(getattr(two, name), getattr(one, name), rtol=8 * bits, atol=8 * bits)
