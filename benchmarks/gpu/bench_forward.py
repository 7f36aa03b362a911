"""Time the sm90 forward against flash-attn-4, A B A B in one process, sustained, medians of device events.

    python benchmarks/gpu/bench_forward.py [--tune] [--spread] [--rows SUBSTRING ...] [--budget 0.6] [--json FILE]

`--tune` also times changes of a row's configuration. `--spread` compiles the rows in processes of their own, all at
once, and times them one after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import datetime, timezone

import torch

from tilewise.backends.sm90 import backend as sm90
from tilewise.backends.sm90.config import SMEM_LIMIT, ForwardConfig, choose
from tilewise.problem import AttentionInputs


def dense(d, dv, h, hk, b, s, left=None, right=None):
    return {"d": d, "dv": dv, "h": h, "hk": hk, "b": b, "s": s, "left": left, "right": right}


def packed(lengths):
    return {"d": 128, "dv": 128, "h": 16, "hk": 16, "lengths": lengths, "left": None, "right": 0}


#: What `--tune` times beside the configuration in use: changes to it.
FREE = {"own_o": False, "direct": True}
LATE = {"pingpong": True, "late_turn": True}
BOUNDED = (
    {"section_mib": 16}, {"section_mib": 32}, {"section_mib": 16, "schedule": "dynamic"},
    {"section_mib": 16, "schedule": "dynamic", **FREE}, {"section_mib": 16, "schedule": "dynamic", **LATE},
    {"section_mib": 16, "schedule": "dynamic", **FREE, **LATE},
)  # fmt: skip
FULL = (LATE, {"schedule": "static", **FREE}, {"schedule": "static", **FREE, **LATE}, {"schedule": "dynamic", "cluster": 1, **FREE})
_draw = random.Random(0)
UNIFORM = [_draw.randint(64, 8192) for _ in range(24)]
ONE_LONG = [64] * 100 + [16384] + [64] * 100
ROWS = {
    "D128 H16 32x1k full": dense(128, 128, 16, 16, 32, 1024),
    "D128 H16 32x1k causal": dense(128, 128, 16, 16, 32, 1024, right=0),
    "D128 H16 8x4k full": dense(128, 128, 16, 16, 8, 4096),
    "D128 H16 8x4k causal": dense(128, 128, 16, 16, 8, 4096, right=0),
    "D128 H16 2x16k full": dense(128, 128, 16, 16, 2, 16384),
    "D128 H16 2x16k causal": dense(128, 128, 16, 16, 2, 16384, right=0),
    "D64 H32 4x8k full": dense(64, 64, 32, 32, 4, 8192),
    "D64 H32 4x8k causal": dense(64, 64, 32, 32, 4, 8192, right=0),
    "(192,128) H16 4x8k full": dense(192, 128, 16, 16, 4, 8192),
    "(192,128) H16 4x8k causal": dense(192, 128, 16, 16, 4, 8192, right=0),
    "D256 H8 4x8k full": dense(256, 256, 8, 8, 4, 8192),
    "D256 H8 4x8k causal": dense(256, 256, 8, 8, 4, 8192, right=0),
    "D96 H16 4x8k causal": dense(96, 96, 16, 16, 4, 8192, right=0),
    "D128 H32 Hk8 2x8k causal": dense(128, 128, 32, 8, 2, 8192, right=0),
    "D128 H16 Hk1 4x4k causal": dense(128, 128, 16, 1, 4, 4096, right=0),
    "D128 window (1023,0) 2x16k": dense(128, 128, 16, 16, 2, 16384, left=1023, right=0),
    "D64 H64 Hk8 window (127,0) 2x8k": dense(64, 64, 64, 8, 2, 8192, left=127, right=0),
    "packed 24 in 64..8192": packed(UNIFORM),
    "packed 512 of 64": packed([64] * 512),
    "packed 16k + 200 of 64": packed(ONE_LONG),
}  # fmt: skip


def inputs_of(row: dict) -> AttentionInputs:
    """Return random inputs of a row."""
    rand = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    lengths = row.get("lengths")
    lead = (sum(lengths),) if lengths else (row["b"], row["s"])
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda") if lengths else None
    top = max(lengths) if lengths else None
    return AttentionInputs(
        rand(*lead, row["h"], row["d"]), rand(*lead, row["hk"], row["d"]), rand(*lead, row["hk"], row["dv"]), row["d"] ** -0.5,
        cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=top, max_seqlen_k=top, window_left=row["left"], window_right=row["right"],
    )  # fmt: skip


def flops(row: dict) -> float:
    """Return useful operations: two multiply-adds a visible pair and channel."""
    total = 0.0
    for s in row.get("lengths") or [row["s"]] * row["b"]:
        pairs = s * s
        if row["right"] == 0:
            w = s if row["left"] is None else min(s, row["left"] + 1)
            pairs = s * w - w * (w - 1) / 2 if row["left"] is not None else s * s / 2
        total += pairs
    return 2.0 * row["h"] * total * (row["d"] + row["dv"])


def peer(inputs: AttentionInputs):
    """Return a call of flash-attn-4's forward on the same inputs."""
    from flash_attn.cute.interface import _flash_attn_fwd

    i = inputs
    causal = i.window_left is None and i.window_right == 0
    return lambda: _flash_attn_fwd(
        i.q, i.k, i.v, cu_seqlens_q=i.cu_seqlens_q, cu_seqlens_k=i.cu_seqlens_k, max_seqlen_q=i.max_seqlen_q,
        max_seqlen_k=i.max_seqlen_k, causal=causal, window_size_left=i.window_left,
        window_size_right=None if causal else i.window_right, return_lse=True,
    )  # fmt: skip


def once(fn, n: int) -> float:
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(n):
        fn()
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b) / n


def interleaved(fns: dict, budget: float) -> dict[str, list[float]]:
    """Return times in ms, taken in turns for `budget` seconds a function."""
    for f in fns.values():
        once(f, 3)
    count = {k: max(1, int(8 / once(f, 2))) for k, f in fns.items()}
    times: dict[str, list[float]] = {k: [] for k in fns}
    end = time.time() + budget * len(fns)
    while time.time() < end:
        for k, f in fns.items():
            times[k].append(once(f, count[k]))
    return times


def matmul() -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return round(2 * 8192**3 / statistics.median(once(lambda: a @ a, 5) for _ in range(9)) / 1e9)


def candidates(row: dict, chosen: ForwardConfig, problem) -> dict[str, ForwardConfig]:
    """Return the changes of `chosen` that fit a block's shared memory, named by what changes."""
    found: dict[str, ForwardConfig] = {}
    for change in FULL if row["right"] is None else BOUNDED:
        config = replace(chosen, **change)
        if config != chosen and config not in found.values() and config.smem_bytes(problem) <= SMEM_LIMIT:
            found[" ".join(f"{k}={v}" for k, v in change.items())] = config
    return found


def measure(name: str, tune: bool, budget: float, lock) -> dict:
    """Compile and check a row's configurations, then time them and the peer while nothing else of ours runs."""
    fcntl.flock(lock, fcntl.LOCK_SH)
    row = ROWS[name]
    inputs, work = inputs_of(row), flops(row)
    fa4 = peer(inputs)
    problem = sm90.kernel_problem(inputs.problem())
    chosen = choose(problem, inputs.extents())
    configs = {"ours": chosen, **(candidates(row, chosen, problem) if tune else {})}
    want, fns, diff = fa4()[0].float(), {}, {}
    for label, config in configs.items():

        def call(config=config):
            sm90.choose = lambda *_: config
            return sm90.Sm90Backend().forward(inputs)

        try:
            got = call()[0].float()
            torch.cuda.synchronize()
            diff[label] = ((got - want).norm() / want.norm()).item()
            fns[label] = call
        except Exception as error:  # noqa: BLE001  (a configuration that cannot run is a result)
            print(name, label, config, str(error)[:200], flush=True)
    fcntl.flock(lock, fcntl.LOCK_UN)
    fcntl.flock(lock, fcntl.LOCK_EX)
    times = interleaved({**fns, "fa4": fa4}, budget)
    fcntl.flock(lock, fcntl.LOCK_UN)
    mid = {k: statistics.median(t) for k, t in times.items()}
    ratio = mid["fa4"] / mid["ours"]
    print(f"{name:34s} ours {work / mid['ours'] / 1e9:.0f} fa4 {work / mid['fa4'] / 1e9:.0f} ratio {ratio:.3f} diff {max(diff.values()):.0e}"
          + "".join(f"\n    {mid['fa4'] / mid[k]:.3f} {k}" for k in fns if k != "ours"), flush=True)  # fmt: skip
    return {"ratio": ratio, "ms": mid, "tflops": {k: work / t / 1e9 for k, t in mid.items()},
            "samples": {k: len(t) for k, t in times.items()}, "difference": diff, "configs": {k: asdict(configs[k]) for k in fns}}  # fmt: skip


def spread(names: list[str], args: argparse.Namespace, lock: str) -> dict:
    """Return the measurements of `names`, each from a process of its own."""
    parts = {n: tempfile.NamedTemporaryFile(suffix=".json") for n in names}
    command = [sys.executable, __file__, "--budget", str(args.budget), "--lock", lock, *(["--tune"] if args.tune else [])]
    children = [subprocess.Popen([*command, "--rows", n, "--json", f.name]) for n, f in parts.items()]
    for child in children:
        child.wait()
    rows: dict = {}
    for name, file in parts.items():
        text = open(file.name).read()
        if not text:
            raise RuntimeError(f"no result for {name}")
        rows |= json.loads(text)["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--budget", type=float, default=0.6)
    parser.add_argument("--lock", help="file that processes of one measurement share")
    parser.add_argument("--json")
    args = parser.parse_args()
    names = [n for n in ROWS if not args.rows or any(x in n for x in args.rows)]
    child = args.lock is not None
    report = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "gpu": torch.cuda.get_device_name(),
              "torch": torch.__version__, "command": " ".join(sys.argv)}  # fmt: skip
    if not child:
        report["matmul_before"] = matmul()
    with open(args.lock, "w") if child else tempfile.NamedTemporaryFile() as lock:
        report["rows"] = spread(names, args, lock.name) if args.spread else {n: measure(n, args.tune, args.budget, lock) for n in names}
    ratios = [r["ratio"] for r in report["rows"].values()]
    report["geomean"] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    if not child:
        report["matmul_after"] = matmul()
        print(f"geomean {report['geomean']:.3f}, lowest {min(ratios):.3f}, matmul {report['matmul_before']} -> {report['matmul_after']}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(report, f, indent=1)


if __name__ == "__main__":
    main()
