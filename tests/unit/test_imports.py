"""Importing tilewise: cheap, without the DSL, without CUDA; arrows point one way; public names keep their order."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise
from tilewise import interface

SOURCE = Path(tilewise.__file__).parent


def fresh(code):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_cheap_and_needs_only_torch():
    code = """
import sys, time, torch
for name in ("cutlass", "tvm_ffi", "transformers", "matplotlib", "rich"): sys.modules[name] = None
start = time.process_time()
import tilewise
print(time.process_time() - start)
assert not torch.cuda.is_initialized()
tilewise.flash_attn_func(*(torch.randn(1, 4, 1, 8) for _ in range(3)))
"""
    assert min(float(fresh(code)) for _ in range(2)) < 0.3


def imported(path):
    """Return the absolute names of tilewise modules and of others that a file imports."""
    package = ("tilewise", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*base, *((node.module,) if node.module else ())))


FORBIDDEN = {
    "cute": ("torch", "tilewise.backends", "tilewise.api", "tilewise.ops", "tilewise.dispatch"),
    "mods": ("tilewise.api", "tilewise.ops", "tilewise.dispatch", "tilewise.backends", "cutlass"),
    "backends/cpu": ("tilewise.api", "tilewise.ops", "tilewise.dispatch", "tilewise.backends.sm90", "cutlass"),
    "backends/sm90": ("tilewise.api", "tilewise.ops", "tilewise.dispatch", "tilewise.backends.cpu"),
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_arrows(folder):
    files = sorted((SOURCE / folder).glob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            assert not any(name == f or name.startswith(f + ".") for f in FORBIDDEN[folder]), (path.name, name)


def positional(fn):
    return [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


SIGNATURES = {
    tilewise.flash_attn_func: "q k v softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa "
    "deterministic mask_mod full_block_cnt full_block_idx mask_block_cnt mask_block_idx",
    tilewise.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    "page_table softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod "
    "aux_tensors",
    tilewise.flash_attn_combine: "out_partial lse_partial out out_dtype cu_seqlens seqused return_lse",
    tilewise.flash_attn_with_kvcache: "q k_cache v_cache k v",
    tilewise.scaled_dot_product_attention: "query key value attn_mask dropout_p is_causal scale enable_gqa",
    interface._flash_attn_fwd: "q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k "
    "page_table softmax_scale causal softcap window_size_left window_size_right learnable_sink num_splits pack_gqa "
    "score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors",
    interface._flash_attn_bwd: "q k v out dout lse softmax_scale causal softcap window_size_left window_size_right "
    "cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k deterministic dq dk dv score_mod "
    "score_mod_bwd mask_mod aux_tensors block_sparse_tensors",
}


@pytest.mark.parametrize("fn", SIGNATURES, ids=lambda f: f.__name__)
def test_argument_order(fn):
    assert positional(fn) == SIGNATURES[fn].split()
