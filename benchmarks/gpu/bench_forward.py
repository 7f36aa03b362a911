"""Time the sm90 forward against flash-attn-4, A B A B in one process, sustained, medians of device events.

    python benchmarks/gpu/bench_forward.py [--tune] [--rows SUBSTRING ...] [--budget 0.6] [--json FILE]

`--tune` also times the other configurations listed for a row.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone

import torch

from tilewise.backends.sm90 import backend as sm90
from tilewise.backends.sm90.config import ForwardConfig, choose
from tilewise.problem import AttentionInputs

C = ForwardConfig


def dense(d, dv, h, hk, b, s, left=None, right=None, tune=()):
    return {"d": d, "dv": dv, "h": h, "hk": hk, "b": b, "s": s, "left": left, "right": right, "tune": tune}


def packed(lengths, tune=()):
    return {"d": 128, "dv": 128, "h": 16, "hk": 16, "lengths": lengths, "left": None, "right": 0, "tune": tune}


S, D = "static", "dynamic"
FULL128 = (
    C(2, 160, 2, schedule=S, cluster=2), C(2, 128, 2, schedule=S, pingpong=True),
    C(2, 128, 2, schedule=S, pingpong=True, cluster=2), C(2, 160, 2, schedule=D),
)
CAUSAL128 = (C(2, 128, 2, schedule=D), C(2, 128, 2, schedule=D, pingpong=True), C(2, 128, 2, schedule=D, lazy=True))
_draw = random.Random(0)
UNIFORM = [_draw.randint(64, 8192) for _ in range(24)]
ONE_LONG = [64] * 100 + [16384] + [64] * 100
ROWS = {
    "D128 H16 32x1k full": dense(128, 128, 16, 16, 32, 1024, tune=FULL128),
    "D128 H16 32x1k causal": dense(128, 128, 16, 16, 32, 1024, right=0, tune=CAUSAL128),
    "D128 H16 8x4k full": dense(128, 128, 16, 16, 8, 4096, tune=FULL128),
    "D128 H16 8x4k causal": dense(128, 128, 16, 16, 8, 4096, right=0, tune=CAUSAL128),
    "D128 H16 2x16k full": dense(128, 128, 16, 16, 2, 16384, tune=FULL128),
    "D128 H16 2x16k causal": dense(128, 128, 16, 16, 2, 16384, right=0, tune=CAUSAL128),
    "D64 H32 4x8k full": dense(64, 64, 32, 32, 4, 8192, tune=(C(3, 128, 3, schedule=S, lazy=True), C(3, 128, 3, schedule=D, lazy=True))),
    "D64 H32 4x8k causal": dense(64, 64, 32, 32, 4, 8192, right=0, tune=(C(3, 128, 3, schedule=D, lazy=True), C(3, 128, 3, schedule=D, lazy=True, pingpong=True))),
    "(192,128) H16 4x8k full": dense(192, 128, 16, 16, 4, 8192, tune=(C(2, 128, 2, own_o=False, pingpong=True, cluster=2), C(2, 128, 2, own_o=False, schedule=S, cluster=2))),
    "(192,128) H16 4x8k causal": dense(192, 128, 16, 16, 4, 8192, right=0, tune=(C(2, 128, 2, own_o=False, pingpong=True), C(2, 128, 2, own_o=False, schedule=D, pingpong=True, lazy=True))),
    "D256 H8 4x8k full": dense(256, 256, 8, 8, 4, 8192, tune=(C(2, 80, 2, own_o=False, pingpong=True), C(2, 80, 2, own_o=False, pingpong=True, cluster=2))),
    "D256 H8 4x8k causal": dense(256, 256, 8, 8, 4, 8192, right=0, tune=(C(2, 80, 2, own_o=False, pingpong=True), C(2, 80, 2, own_o=False, lazy=True, pingpong=True, schedule=D))),
    "D96 H16 4x8k causal": dense(96, 96, 16, 16, 4, 8192, right=0, tune=(C(3, 112, 2, own_o=False, schedule=D, pingpong=True), C(3, 112, 2, schedule=D), C(3, 112, 2, schedule=D, pingpong=True), C(2, 128, 2, schedule=D, pingpong=True))),
    "D128 H32 Hk8 2x8k causal": dense(128, 128, 32, 8, 2, 8192, right=0, tune=CAUSAL128[:2]),
    "D128 H16 Hk1 4x4k causal": dense(128, 128, 16, 1, 4, 4096, right=0, tune=CAUSAL128[:2]),
    "D128 window (1023,0) 2x16k": dense(128, 128, 16, 16, 2, 16384, left=1023, right=0, tune=(C(2, 128, 2, schedule=S), *CAUSAL128[:2])),
    "D64 H64 Hk8 window (127,0) 2x8k": dense(64, 64, 64, 8, 2, 8192, left=127, right=0, tune=(C(3, 128, 2, pack=8, schedule=S), C(3, 128, 2, pack=8, schedule=D), C(2, 128, 2, pack=8, schedule=S), C(2, 160, 2, pack=8, schedule=S), C(3, 80, 3, pack=8, schedule=S), C(2, 176, 1, pack=8, schedule=S))),
    "packed 24 in 64..8192": packed(UNIFORM, CAUSAL128[:2]),
    "packed 512 of 64": packed([64] * 512, (C(1, 64, 1, own_o=False), C(1, 64, 2, schedule=D), C(2, 128, 2, schedule=D))),
    "packed 16k + 200 of 64": packed(ONE_LONG, CAUSAL128[:2]),
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--budget", type=float, default=0.6)
    parser.add_argument("--json")
    args = parser.parse_args()
    report = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "gpu": torch.cuda.get_device_name(),
              "torch": torch.__version__, "command": " ".join(sys.argv), "matmul_before": matmul(), "rows": {}}  # fmt: skip
    ratios = []
    for name, row in ROWS.items():
        if args.rows and not any(x in name for x in args.rows):
            continue
        inputs, work = inputs_of(row), flops(row)
        fa4 = peer(inputs)
        problem = sm90.kernel_problem(inputs.problem())
        configs = {"ours": choose(problem, inputs.extents())}
        if args.tune:
            configs |= {f"v{i}": c for i, c in enumerate(row["tune"])}
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
                print(name, label, config, str(error)[:200])
        times = interleaved({**fns, "fa4": fa4}, args.budget)
        mid = {k: statistics.median(t) for k, t in times.items()}
        ratio = mid["fa4"] / mid["ours"]
        ratios.append(ratio)
        print(f"{name:34s} " + " ".join(f"{k} {work / t / 1e9:.0f}" for k, t in mid.items()) + f" | ratio {ratio:.3f}"
              + (" best {:.3f} {}".format(*max((mid["fa4"] / mid[k], k) for k in fns)) if args.tune else "")
              + f" diff {max(diff.values()):.0e}", flush=True)  # fmt: skip
        report["rows"][name] = {"ratio": ratio, "ms": mid, "tflops": {k: work / t / 1e9 for k, t in mid.items()},
                                "samples": {k: len(t) for k, t in times.items()}, "difference": diff,
                                "configs": {k: asdict(configs[k]) for k in fns}}  # fmt: skip
    report["geomean"] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    report["matmul_after"] = matmul()
    print(f"geomean {report['geomean']:.3f}, lowest {min(ratios):.3f}, matmul {report['matmul_before']} -> {report['matmul_after']}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(report, f, indent=1)


if __name__ == "__main__":
    main()
