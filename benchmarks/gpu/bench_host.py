"""From call to launch on a Hopper GPU: host time, warm start, CUDA graphs, streams, and running without the DSL.

    python benchmarks/gpu/bench_host.py [--json FILE]

Needs tilewise[cuda] and a linker; flash-attn-4 is measured beside it where it is installed. Every part that fails is
reported, the others still run; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
SHAPE = (1, 128, 4, 128)


def host_time() -> dict[str, object]:
    """Host microseconds of a call, ours and the peer's by turns in one process; medians of 15 runs of 200 calls."""
    import torch

    from tilewise import flash_attn_func

    functions = {"tilewise": flash_attn_func}
    notes = {}
    try:
        from flash_attn.cute.interface import flash_attn_func as peer

        functions["flash-attn-4"] = peer
    except Exception as error:  # the peer's import compiles and looks for devices: any error means it is not here
        notes["flash-attn-4"] = f"not measured: {type(error).__name__}: {error}"
    found: dict[str, object] = dict(notes)
    for grad in (False, True):
        q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3))
        times: dict[str, list[float]] = {name: [] for name in functions}
        with torch.set_grad_enabled(grad):
            for f in functions.values():
                f(q, k, v)
            for _ in range(15):
                for name, f in functions.items():
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(200):
                        f(q, k, v)
                    times[name].append((time.perf_counter() - start) / 200 * 1e6)
                    torch.cuda.synchronize()
        for name, runs in times.items():
            found[f"{name} {'with grad' if grad else 'no_grad'} us"] = round(statistics.median(runs), 2)
    return found


WARM = """
import json, sys, time
for name in json.loads(sys.argv[1]): sys.modules[name] = None
import torch
q, k, v = (torch.randn((1, 128, 4, 128), device="cuda", dtype=torch.bfloat16) for _ in range(3))
(q @ q.transpose(-1, -2)).sum().item()
start = time.perf_counter()
import tilewise
imported = time.perf_counter()
with torch.no_grad(): out, lse = tilewise.flash_attn_func(q, k, v)
torch.cuda.synchronize()
end = time.perf_counter()
want = torch.nn.functional.scaled_dot_product_attention(*(t.float().transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
error = (out.float() - want).abs().max().item()
assert error < 0.02, error
print(json.dumps({"import ms": (imported - start) * 1e3, "first call ms": (end - imported) * 1e3, "error": error,
                  "DSL imported": sys.modules.get("cutlass") is not None}))
"""


def fresh(blocked: tuple[str, ...] = (), **environment: str) -> dict[str, object]:
    """Run one call in a process of its own; `blocked` modules cannot be imported there."""
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environment}
    command = [sys.executable, "-c", WARM, json.dumps(blocked)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in found.items()}


def warm_start() -> dict[str, object]:
    """First call of a new process: cold, then three times from the disk cache."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"cold": fresh(TILEWISE_CACHE_DIR=folder)}
        runs = [fresh(TILEWISE_CACHE_DIR=folder) for _ in range(3)]
    assert not any(r["DSL imported"] for r in runs), "a cached kernel imported the DSL"
    return {**found, "warm": runs}


def without_compiler() -> dict[str, object]:
    """Precompile, then call where neither the DSL nor a linker can be found; a kernel that is missing is named."""
    from tilewise.compile.aot import keys, precompile

    with tempfile.TemporaryDirectory() as folder:
        wanted, refused = keys([{"heads": 4, "seqlen_q": 128}], "sm_90a")
        assert wanted and not refused, refused
        start = time.perf_counter()
        failed = precompile(wanted, Path(folder), os.cpu_count() or 1)
        assert not failed, failed
        seconds = time.perf_counter() - start
        bare = {"TILEWISE_KERNELS": folder, "PATH": "", "TILEWISE_CACHE": "0"}
        blocked = ("cutlass", "nvidia_cutlass_dsl", "platformdirs", "rich")
        found = {"precompile s": round(seconds, 1), "run": fresh(blocked, **bare)}
        for path in Path(folder).glob("*.so"):
            if path.name != "libcute_dsl_runtime.so":
                path.unlink()
        try:
            fresh(blocked, **bare)
        except RuntimeError as error:
            assert "python -m tilewise precompile --key" in str(error), error
        else:
            raise AssertionError("a missing kernel did not raise")
    return found


def graph() -> dict[str, object]:
    """Capture a call with seqused, change the lengths in place, replay: as the same call made afresh."""
    import torch

    from tilewise import flash_attn_varlen_func

    q, k, v = (torch.randn(4, 256, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    used = torch.full((4,), 256, device="cuda", dtype=torch.int32)

    def call():
        return flash_attn_varlen_func(q, k, v, seqused_k=used, causal=True)

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out, lse = call()
        worst = 0.0
        for lengths in ([256, 256, 256, 256], [256, 17, 128, 200], [33, 256, 64, 255]):
            used.copy_(torch.tensor(lengths, dtype=torch.int32))
            q.normal_()
            captured.replay()
            want, want_lse = call()
            assert torch.equal(lse, want_lse), lengths
            worst = max(worst, (out.float() - want.float()).abs().max().item())
            assert worst == 0.0, (lengths, worst)
    return {"lengths replayed": 3, "difference from a fresh call": worst}


def streams() -> dict[str, object]:
    """On a side stream: a slow kernel writes q before the call, a reader takes the result after; no waits between."""
    import torch

    from tilewise import flash_attn_func

    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    fresh_q, kept = torch.randn_like(q), torch.empty_like(q)
    with torch.no_grad():
        want = flash_attn_func(fresh_q, k, v)[0]
        flash_attn_func(q, k, v)
        torch.cuda.synchronize()
        side, hosts = torch.cuda.Stream(), []
        for _ in range(5):
            q.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)  # some 50 ms
                q.copy_(fresh_q)
                start = time.perf_counter()
                out = flash_attn_func(q, k, v)[0]
                hosts.append((time.perf_counter() - start) * 1e6)
                kept.copy_(out)
                del out
            torch.cuda.synchronize()
            assert torch.equal(kept, want)
    assert min(hosts) < 5_000, f"the host waited for the stream: {hosts} us"
    return {"host us behind a slow kernel": round(statistics.median(hosts), 1)}


def reduce_overhead() -> dict[str, object]:
    """torch.compile(mode="reduce-overhead") gives what an eager call gives."""
    import torch

    from tilewise import flash_attn_func

    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0] * 2, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            assert torch.equal(compiled(q, k, v).clone(), flash_attn_func(q, k, v, causal=True)[0] * 2)
    return {"calls": 4}


def main() -> int:
    """Run every part, print and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there, in JSON")
    given = parser.parse_args()
    sys.path.insert(0, str(SOURCE))
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TILEWISE_CACHE_DIR", folder)
        import torch

        results: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        bad = 0
        for part in (host_time, warm_start, without_compiler, graph, streams, reduce_overhead):
            try:
                results[part.__name__] = part()
            except Exception:
                bad = 1
                results[part.__name__] = {"failed": traceback.format_exc()[-2500:]}
            print(part.__name__, json.dumps(results[part.__name__], indent=1), flush=True)
            if given.json:
                given.json.write_text(json.dumps(results, indent=1) + "\n")
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
