"""Wrong calls: the exception's type, and that its text names the argument and the rule."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise

HALF = torch.float16


def t(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense(q=None, k=None, v=None, **options):
    q, k, v = (t(2, 4, 4, 16) if x is None else x for x in (q, k, v))
    return tilewise.flash_attn_func(q, k, v, **options)


def packed(q=None, k=None, v=None, **options):
    q, k, v = (t(8, 4, 16) if x is None else x for x in (q, k, v))
    options = {"cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 3, 8)} | options
    return tilewise.flash_attn_varlen_func(q, k, v, **options)


def paged(**options):
    options = {"page_table": ints(0, 1).view(2, 1), "seqused_k": ints(2, 3)} | options
    return tilewise.flash_attn_varlen_func(t(2, 1, 4, 16), t(3, 4, 4, 16), t(3, 4, 4, 16), **options)


def cache(k_new=None, v_new=None, **options):
    options = {"cache_seqlens": ints(1, 2)} | options
    k, v = t(2, 8, 4, 16), t(2, 8, 4, 16)
    return tilewise.flash_attn_with_kvcache(t(2, 1, 4, 16), k, v, k_new, v_new, **options)


def kvcache(k=None, v=None):
    k, v = (t(2, 8, 4, 16) if x is None else x for x in (k, v))
    return tilewise.flash_attn_with_kvcache(t(2, 1, 4, 16), k, v, cache_seqlens=ints(1, 2))


def rotary(rows, **options):
    new = t(2, 2, 4, 16)
    return cache(new, new, rotary_cos=t(rows, 4), rotary_sin=t(rows, 4), **options)


def blocks(count=1, index=0, full=None):
    lists = [ints(count).view(1, 1, 1), ints(index).view(1, 1, 1, 1)]
    lists += [None, None] if full is None else [ints(full[0]).view(1, 1, 1), ints(full[1]).view(1, 1, 1, 1)]
    return dense(block_sparse_tensors=tilewise.BlockSparseTensors(*lists))


def sdpa(*args, **options):
    q, k, v = (t(2, 4, 5, 16) for _ in range(3))
    return tilewise.scaled_dot_product_attention(q, k, v, *args, **options)


def combine(out=None, lse=None, **options):
    out = t(3, 2, 5, 4, 8) if out is None else out
    return tilewise.flash_attn_combine(out, t(3, 2, 5, 4) if lse is None else lse, **options)


WRONG = [
    (lambda: dense(q=[1.0]), TypeError, "q: expected a tensor"),
    (lambda: dense(k=None, v="v"), TypeError, "v: expected a tensor"),
    (lambda: dense(q=t(4, 4, 16)), ValueError, "q: expected shape (B, Sq, H, D), got shape (4, 4, 16)"),
    (lambda: dense(k=t(2, 4, 16)), ValueError, "k: expected shape"),
    (lambda: dense(v=t(2, 4, 16)), ValueError, "v: expected shape"),
    (lambda: dense(q=t(2, 4, 4, 16, dtype=torch.int64)), TypeError, "q: expected dtype"),
    (lambda: dense(q=t(2, 4, 4, 16, dtype=torch.complex64)), TypeError, "complex64"),
    (lambda: dense(k=t(2, 4, 4, 16, dtype=HALF)), TypeError, "k: expected dtype torch.float32 as in q"),
    (lambda: dense(v=t(2, 4, 4, 16, dtype=HALF)), TypeError, "v: expected dtype torch.float32 as in q"),
    (lambda: dense(k=t(2, 4, 4, 8)), ValueError, "k: expected head_dim 16 as in q, got 8"),
    (lambda: dense(*[t(2, 4, 4, 12)] * 3), ValueError, "multiple of 8"),
    (lambda: dense(*[t(2, 4, 4, 264)] * 3), ValueError, "up to 256"),
    (lambda: dense(*[t(2, 4, 4, 0)] * 3), ValueError, "q: expected a head_dim"),
    (lambda: dense(v=t(2, 4, 4, 20)), ValueError, "v: expected a head_dim"),
    (lambda: dense(k=t(2, 5, 4, 16)), ValueError, "v: expected leading sizes"),
    (lambda: dense(k=t(2, 4, 3, 16), v=t(2, 4, 3, 16)), ValueError, "multiple of the 3 heads of k, got 4"),
    (lambda: dense(k=t(2, 4, 0, 16), v=t(2, 4, 0, 16)), ValueError, "k: expected at least one head"),
    (lambda: dense(k=t(3, 4, 4, 16), v=t(3, 4, 4, 16)), ValueError, "k: expected batch 2"),
    (lambda: dense(k=t(2, 4, 4, 16).to("meta")), ValueError, "k: expected device cpu as q"),
    (lambda: dense(softmax_scale="1"), TypeError, "softmax_scale: expected a number"),
    (lambda: dense(softmax_scale=float("nan")), ValueError, "softmax_scale: expected a finite number"),
    (lambda: dense(causal=1), TypeError, "causal: expected a bool"),
    (lambda: dense(window_size=3), TypeError, "window_size: expected a pair"),
    (lambda: dense(window_size=(3,)), ValueError, "window_size: expected a pair"),
    (lambda: dense(window_size=(1.5, 0)), TypeError, "window_size left: expected an int or None"),
    (lambda: dense(window_size=(1, True)), TypeError, "window_size right: expected an int or None"),
    (lambda: dense(window_size=(2**31, 0)), ValueError, "window_size left"),
    (lambda: dense(window_size=(-3, 2)), ValueError, "window_size: expected left + right of at least 0"),
    (lambda: dense(window_size=(-3, 5), causal=True), ValueError, "window_size: expected left + right"),
    (lambda: dense(learnable_sink=[0.0]), TypeError, "learnable_sink: expected a tensor"),
    (lambda: dense(learnable_sink=t(4, 1)), ValueError, "learnable_sink: expected shape (H,)"),
    (lambda: dense(learnable_sink=t(3)), ValueError, "learnable_sink: expected shape (4,)"),
    (lambda: dense(learnable_sink=t(4, dtype=HALF)), TypeError, "learnable_sink: expected bfloat16, float32"),
    (lambda: dense(softcap=-1.0), ValueError, "softcap: expected a finite number of at least 0"),
    (lambda: dense(softcap=None), TypeError, "softcap: expected a number"),
    (lambda: dense(softcap=1.0, score_mod=lambda s, b, h, i, j: s), ValueError, "score_mod: expected no softcap"),
    (lambda: dense(num_splits=-1), ValueError, "num_splits: expected an int of at least 0, got -1"),
    (lambda: dense(num_splits=1.0), TypeError, "num_splits: expected an int"),
    (lambda: dense(pack_gqa=1), TypeError, "pack_gqa: expected a bool or None"),
    (lambda: dense(deterministic=None), TypeError, "deterministic: expected a bool"),
    (lambda: dense(score_mod=3), TypeError, "score_mod: expected a function"),
    (lambda: dense(mask_mod="m"), TypeError, "mask_mod: expected a function"),
    (lambda: dense(mask_mod=lambda b, h, i, j: i - j), TypeError, "mask_mod"),
    (lambda: dense(score_mod=lambda s, b: s), TypeError, "score_mod"),
    (lambda: dense(score_mod_bwd=lambda *a: a), ValueError, "score_mod_bwd"),
    (lambda: dense(aux_tensors=3), TypeError, "aux_tensors: expected a list"),
    (lambda: dense(aux_tensors=[3]), TypeError, "aux_tensors[0]: expected a tensor"),
    (lambda: dense(block_sparse_tensors=3), TypeError, "block_sparse_tensors: expected a BlockSparseTensors"),
    (lambda: dense(mask_block_cnt=ints(1).view(1, 1, 1)), ValueError, "mask_block_cnt"),
    (lambda: dense(backend="gpu"), ValueError, "backend: expected one of"),
    (lambda: dense(backend="sm90"), NotImplementedError, "not on a CUDA device"),
    (lambda: packed(q=t(2, 4, 4, 16)), ValueError, "q: expected shape (total_q, H, D)"),
    (lambda: packed(k=t(2, 4, 4, 16)), ValueError, "k: expected shape (total_k, Hk, D)"),
    (lambda: packed(cu_seqlens_q=torch.tensor([0, 3, 8])), TypeError, "cu_seqlens_q: expected int32, got torch.int64"),
    (lambda: packed(cu_seqlens_q=[0, 3, 8]), TypeError, "cu_seqlens_q: expected a tensor"),
    (lambda: packed(cu_seqlens_q=ints()), ValueError, "cu_seqlens_q: expected shape (B + 1,)"),
    (lambda: packed(cu_seqlens_k=ints(0, 8)), ValueError, "cu_seqlens_k: expected shape (3,)"),
    (lambda: packed(cu_seqlens_q=ints(1, 3, 8)), ValueError, "cu_seqlens_q: expected non-decreasing from 0"),
    (lambda: packed(cu_seqlens_q=ints(0, 5, 3)), ValueError, "cu_seqlens_q: expected non-decreasing from 0"),
    (lambda: packed(cu_seqlens_k=ints(0, 3, 9)), ValueError, "cu_seqlens_k: expected a last entry of at most 8"),
    (lambda: packed(max_seqlen_q="8"), TypeError, "max_seqlen_q: expected an int"),
    (lambda: packed(max_seqlen_k=-1), ValueError, "max_seqlen_k: expected an int of at least 0"),
    (lambda: packed(seqused_q=ints(1)), ValueError, "seqused_q: expected shape (B,)"),
    (lambda: packed(seqused_k=torch.tensor([1, 2])), TypeError, "seqused_k: expected int32"),
    (lambda: packed(seqused_k=ints(4, 2)), ValueError, "seqused_k: expected lengths from 0 to 3"),
    (lambda: packed(seqused_q=ints(-1, 2)), ValueError, "seqused_q: expected lengths"),
    (lambda: paged(seqused_k=None), ValueError, "page_table: expected seqused_k"),
    (lambda: paged(page_table=ints(0, 1)), ValueError, "page_table: expected shape (B, max_pages)"),
    (lambda: paged(page_table=ints(0, 1, 2).view(3, 1)), ValueError, "page_table: expected shape"),
    (lambda: paged(page_table=ints(0, 3).view(2, 1)), ValueError, "page_table: expected page numbers from 0 to 2"),
    (lambda: paged(page_table=ints(-1, 0).view(2, 1)), ValueError, "page_table: expected page numbers"),
    (lambda: paged(seqused_k=ints(2, 5)), ValueError, "seqused_k: expected lengths from 0 to 4"),
    (lambda: cache(cache_seqlens=ints(1, 9)), ValueError, "cache_seqlens: expected lengths up to 8"),
    (lambda: cache(cache_seqlens=1.5), TypeError, "cache_seqlens: expected an int"),
    (lambda: cache(cache_batch_idx=ints(0, 2)), ValueError, "cache_batch_idx: expected rows from 0 to 1"),
    (lambda: cache(k_new=t(2, 1, 4, 16)), ValueError, "v: expected both k and v"),
    (lambda: cache(t(2, 1, 4, 8), t(2, 1, 4, 16)), ValueError, "k: expected shape (2, Snew, 4, 16)"),
    (lambda: cache(t(2, 1, 4, 16, dtype=HALF), t(2, 1, 4, 16)), TypeError, "k: expected dtype torch.float32"),
    (lambda: cache(t(2, 1, 4, 16), t(2, 2, 4, 16)), ValueError, "v: expected 1 rows as in k"),
    (lambda: cache(rotary_cos=t(8, 4)), ValueError, "rotary_sin: expected both tables"),
    (lambda: cache(rotary_cos=t(8, 4), rotary_sin=t(8, 4)), ValueError, "rotary_cos: expected k and v"),
    (lambda: cache(cache_seqlens=ints(1, -1)), ValueError, "cache_seqlens: expected lengths of at least 0"),
    (lambda: cache(*[t(2, 2, 4, 16)] * 2, cache_seqlens=ints(1, 7)), ValueError, "after the append, got 7 + 2"),
    (lambda: cache(cu_seqlens_q=[0, 1, 2]), ValueError, "q: expected shape (total_q, H, D)"),
    (lambda: rotary(3), ValueError, "rotary_cos: expected at least 4 rows, one per position, got 3"),
    (lambda: kvcache(k=t(2, 8, 4, 8)), ValueError, "k_cache: expected head_dim 16 as in q, got 8"),
    (lambda: kvcache(v=t(2, 9, 4, 16)), ValueError, "v_cache: expected leading sizes (2, 8, 4) as in k_cache"),
    (lambda: kvcache(v=t(2, 8, 4, 16, dtype=HALF)), TypeError, "v_cache: expected dtype torch.float32 as in q"),
    (lambda: blocks(count=2), ValueError, "mask_block_cnt: expected counts from 0 to 1"),
    (lambda: blocks(count=-1), ValueError, "mask_block_cnt: expected counts from 0 to 1"),
    (lambda: blocks(index=1), ValueError, "mask_block_idx: expected key blocks from 0 to 0"),
    (lambda: blocks(full=(1, -1)), ValueError, "full_block_idx: expected key blocks from 0 to 0"),
    (lambda: sdpa(dropout_p=0.1), NotImplementedError, "dropout_p: expected 0"),
    (lambda: sdpa(torch.ones(5, 5, dtype=torch.bool), is_causal=True), ValueError, "attn_mask: expected None"),
    (lambda: sdpa(ints(1)), TypeError, "attn_mask: expected a bool or floating tensor"),
    (lambda: sdpa(torch.ones(4, 5, dtype=torch.bool)), ValueError, "attn_mask: expected a shape that broadcasts"),
    (lambda: combine(out=[1]), TypeError, "out_partial: expected a tensor"),
    (lambda: combine(out=t(3, 5)), ValueError, "out_partial: expected shape"),
    (lambda: combine(out=t(3, 2, 5, 4, 8, dtype=HALF)), TypeError, "out_partial: expected float32"),
    (lambda: combine(lse=t(3, 2, 5, 3)), ValueError, "lse_partial: expected shape"),
    (lambda: combine(out_dtype=torch.int32), TypeError, "out_dtype: expected a floating dtype"),
    (lambda: combine(seqused=ints(1)), ValueError, "seqused: expected shape (B,)"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_call(number):
    call, kind, text = WRONG[number]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


def test_failed_append_leaves_the_cache():
    k, v = t(2, 8, 4, 16), t(2, 8, 4, 16)
    new = torch.ones(2, 2, 4, 16)
    with pytest.raises(ValueError, match="cache_seqlens"):
        tilewise.flash_attn_with_kvcache(t(2, 1, 4, 16), k, v, new, new, cache_seqlens=ints(1, 7))
    assert not k.any() and not v.any()


def test_the_same_without_asserts():
    """`python -O` removes assert statements; no check may be one."""
    code = """
from tests.unit.test_bad_input import WRONG
for number, (call, kind, text) in enumerate(WRONG):
    try:
        call()
    except kind as error:
        if text in str(error): continue
    raise SystemExit(f"call {number}: not {kind.__name__} with {text!r}")
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}"}
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
