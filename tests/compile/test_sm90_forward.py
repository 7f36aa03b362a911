"""Representative Hopper forwards compile without a GPU: no spills, no serialised wgmma, shared memory within its limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from tilewise.backends.sm90.config import SMEM_LIMIT, TUNED, ForwardConfig, tuned
from tilewise.problem import AttentionProblem, TensorSig


def problem(d: int = 128, dv: int | None = None, dtype: str = "bfloat16", grouped: bool = False, **features) -> AttentionProblem:
    sig = TensorSig(dtype, 4, (), True, False)
    return AttentionProblem("forward", dtype, d, dv or d, grouped, sig, sig, sig, **features)


PACKED = {"packed_q": True, "packed_k": True, "right": True}
CASES: dict[str, tuple[AttentionProblem, ForwardConfig | None]] = {
    "d64_causal": (problem(64, right=True), None),
    "d96_causal": (problem(96, right=True), None),
    "d128_full": (problem(128), None),
    "d128_long": (problem(128), ForwardConfig(2, 160, 2, schedule="static", cluster=2)),
    "short_rows": (problem(128, **PACKED), ForwardConfig(1, 64, 2, schedule="dynamic")),
    "d128_sections_direct": (problem(128, right=True), ForwardConfig(2, 128, 2, own_o=False, schedule="dynamic", direct=True, section_mib=16)),
    "d256_direct_late": (problem(256), ForwardConfig(2, 80, 2, own_o=False, schedule="static", pingpong=True, late_turn=True, cluster=2, direct=True)),
    "d128_causal": (problem(128, right=True), None),
    "d192_128_causal": (problem(192, 128, right=True), None),
    "d256_full": (problem(256), None),
    "odd_dims_everything": (
        problem(40, 72, "float16", seqused_q=True, seqused_k=True, left=True, softcap=True, sink="bfloat16", **PACKED), None,
    ),
    "window_packed_heads": (problem(64, left=True, right=True, grouped=True), replace(TUNED[64, 64][1], tile_n=80, pingpong=False, pack=8)),
    "packed_heads_packed_rows": (problem(128, grouped=True, **PACKED), replace(TUNED[128, 128][1], pack=4)),
}  # fmt: skip

BUILD = """
import os, sys
os.environ["CUTE_DSL_COMPILER_OPT"] = "warnings,remarks{ptx}"
from test_sm90_forward import CASES
from tilewise.backends.sm90.config import tuned
from tilewise.compile.key import CompileKey
from tilewise.compile.launch import build
from tilewise.target import Target
problem, config = CASES[sys.argv[1]]
build(CompileKey("sm90.forward", problem, config or tuned(problem), Target.of_arch("sm_90a")))
"""


@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(name: str, tmp_path) -> None:
    # A process of its own: the compiler writes its remarks to the file descriptor, and reads the environment at import.
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", BUILD, name], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert frames, "the compiler printed no resource report"
    assert all(numbers == ("0", "0", "0") for numbers in frames), frames
    assert not re.findall(r"\(C75\d\d\)", log), log[-3000:]


@pytest.mark.parametrize("name", CASES)
def test_shared_memory_fits(name: str) -> None:
    case, config = CASES[name]
    assert (config or tuned(case)).smem_bytes(case) <= SMEM_LIMIT


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dim_fits(d: int) -> None:
    for dv in (8, 64, d, 256):
        for right in (False, True):
            case = problem(d, dv, right=right)
            assert tuned(case).smem_bytes(case) <= SMEM_LIMIT
