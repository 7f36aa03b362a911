"""Whole problems, drawn: every feature crossed with every other, tiled against the reference, forward and backward."""

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cases import gradients_of, problem, tiles
from tests.support.oracle import check
from tilewise.backends.cpu.backend import CpuBackend
from tilewise.mods import BlockSparseTensors, mask_mod, score_mod
from tilewise.problem import AttentionInputs

torch.set_num_threads(2)

TABLE = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
GROUPS = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(1))

SCORES = [
    score_mod(lambda s, b, h, i, j: s + TABLE[h, (i - j).abs()]),
    score_mod(lambda s, b, h, i, j: s * TABLE[h, i] + b * 0.1),
    score_mod(lambda s, b, h, i, j: torch.where(j == 2, -math.inf, s * 1.5)),
]
MASKS = [
    mask_mod(lambda b, h, i, j: (GROUPS[i] == GROUPS[j]) | (j < 3)),
    mask_mod(lambda b, h, i, j: j <= i + h),
]
BOUNDS = st.one_of(st.none(), st.integers(-6, 12), st.just(10**6))


@st.composite
def problems(draw: st.DrawFn, dtypes: list[torch.dtype]) -> AttentionInputs:
    """Draw one call. Modifiers exclude softcap, and mask_mod excludes a band, as in the contract."""
    lengths = st.lists(st.integers(0, 40), min_size=1, max_size=4)
    len_q = draw(lengths)
    len_k = draw(st.one_of(st.just(len_q), st.lists(st.integers(0, 40), min_size=len(len_q), max_size=len(len_q))))
    heads_kv, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    heads = heads_kv * group
    options: dict = {"num_splits": draw(st.sampled_from([1, 1, 0, 2, 5]))}
    kind = draw(st.sampled_from(["none", "softcap", "score_mod"]))
    if kind == "softcap":
        options["softcap"] = draw(st.sampled_from([0.5, 4.0]))
    elif kind == "score_mod":
        score = draw(st.sampled_from(SCORES))
        options |= {"score_mod": score.modifier, "score_captures": score.captures}
    if draw(st.booleans()):
        options["sink"] = torch.randn(heads, generator=torch.Generator().manual_seed(7))
    if draw(st.integers(0, 2)) == 0:
        mask = draw(st.sampled_from(MASKS))
        options |= {"mask_mod": mask.modifier, "mask_captures": mask.captures}
    else:
        left, right = draw(BOUNDS), draw(st.one_of(st.just(0), BOUNDS))
        if left is None or right is None or left + right >= 0:
            options |= {"window_left": left, "window_right": right}
    if draw(st.integers(0, 2)) == 0:
        m, n = draw(st.sampled_from([(16, 16), (8, 32), (5, 7)]))
        shape = (draw(st.sampled_from([1, len(len_q)])), draw(st.sampled_from([1, heads])), -(-40 // m), -(-40 // n))
        states = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        options["block_sparse"] = BlockSparseTensors.from_map(states, (m, n))
    dim = draw(st.sampled_from([8, 16, 24]))
    return problem(
        len_q, len_k, heads=heads, heads_kv=heads_kv, dim=dim, dim_v=draw(st.sampled_from([dim, 8, 32])),
        dtype=draw(st.sampled_from(dtypes)), layout_q=draw(st.sampled_from(["dense", "packed"])),
        layout_k=draw(st.sampled_from(["dense", "packed", "paged"])), used=draw(st.booleans()),
        page_size=draw(st.sampled_from([1, 4, 7])), seed=draw(st.integers(0, 999)), **options,
    )  # fmt: skip


SIZES = st.tuples(st.sampled_from([3, 16, 256]), st.sampled_from([5, 16, 512]), st.sampled_from([64, 4096, 2**20]))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems([torch.float64]), SIZES, st.booleans())
def test_exact(x, size, lse_gradient):
    with tiles(*size):
        check(CpuBackend(), x, *gradients_of(x, lse=lse_gradient))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems([torch.float32, torch.bfloat16, torch.float16]), SIZES, st.booleans())
def test_rounded(x, size, lse_gradient):
    with tiles(*size):
        check(CpuBackend(), x, *gradients_of(x, lse=lse_gradient), roundings=4)
