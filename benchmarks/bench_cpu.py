"""tilewise on a CPU beside torch's scaled_dot_product_attention: public functions, ratios taken in one process.

    python benchmarks/bench_cpu.py [--json PATH] [--quick]

Each comparison runs A B A B ... with 2 threads and reports the ratio of medians; outputs are compared first.
Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from tilewise import flash_attn_func

Tensor = torch.Tensor


class Row(NamedTuple):
    """One measured quantity and what it must be. `value` and `target` share a unit; smaller is better."""

    name: str
    unit: str
    value: float
    target: float
    detail: str

    @property
    def passed(self) -> bool:
        return self.value <= self.target


def interleaved(a: Callable[[], object], b: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the median seconds of `a` and of `b`, run in turn after one warm-up of each."""
    a(), b()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, found in zip((a, b), seconds, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def tensors(batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of shape (batch, length, heads, dim)."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, dim, generator=g).to(dtype) for _ in range(3))
    return q, k, v


def forward_beside_sdpa(dtype: torch.dtype, causal: bool, length: int, rounds: int) -> Row:
    """Forward at (2, length, 8, 64): time relative to SDPA on the same layout."""
    q, k, v = tensors(2, length, 8, 64, dtype)

    def ours() -> Tensor:
        return flash_attn_func(q, k, v, causal=causal)[0]

    def torchs() -> Tensor:
        return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal).transpose(1, 2)

    torch.testing.assert_close(ours(), torchs())
    mine, theirs = interleaved(ours, torchs, rounds)
    name = f"forward {'causal' if causal else 'plain'} {str(dtype).removeprefix('torch.')} (2, {length}, 8, 64)"
    return Row(name, "x SDPA", mine / theirs, 1.15, f"{mine * 1e3:.0f} ms, SDPA {theirs * 1e3:.0f} ms")


def training_beside_sdpa(length: int, rounds: int) -> Row:
    """Forward and backward, causal fp32 at (2, length, 8, 64), relative to SDPA with autograd."""
    leaves = [t.requires_grad_() for t in tensors(2, length, 8, 64, torch.float32)]
    dout = torch.randn_like(leaves[0])

    def ours() -> list[Tensor]:
        return list(torch.autograd.grad(flash_attn_func(*leaves, causal=True)[0], leaves, dout))

    def torchs() -> list[Tensor]:
        out = scaled_dot_product_attention(*(t.transpose(1, 2) for t in leaves), is_causal=True).transpose(1, 2)
        return list(torch.autograd.grad(out, leaves, dout))

    torch.testing.assert_close(ours(), torchs(), rtol=1e-4, atol=1e-4)
    mine, theirs = interleaved(ours, torchs, rounds)
    name = f"forward + backward causal float32 (2, {length}, 8, 64)"
    return Row(name, "x SDPA", mine / theirs, 1.3, f"{mine * 1e3:.0f} ms, SDPA {theirs * 1e3:.0f} ms")


def window_beside_full(length: int, rounds: int) -> Row:
    """Window (255, 0) relative to the same call without it."""
    q, k, v = tensors(1, length, 8, 64, torch.float32)

    def narrow() -> Tensor:
        return flash_attn_func(q, k, v, window_size=(255, 0))[0]

    out = narrow()
    last = [t[:, -256:].transpose(1, 2) for t in (k, v)]
    want = scaled_dot_product_attention(q[:, -1:].transpose(1, 2), *last).transpose(1, 2)
    torch.testing.assert_close(out[:, -1:], want, rtol=1e-5, atol=1e-5)
    mine, full = interleaved(narrow, lambda: flash_attn_func(q, k, v), rounds)
    name = f"window (255, 0) float32 (1, {length}, 8, 64)"
    return Row(name, "x no window", mine / full, 1 / 8, f"{mine * 1e3:.0f} ms, without {full * 1e3:.0f} ms")


_PEAK = """
import pathlib, re, torch
from tilewise import flash_attn_func
torch.set_num_threads(2)

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

q = torch.randn(1, {length}, 8, 64)
flash_attn_func(q[:, :64], q[:, :64], q[:, :64], causal=True, softcap=30.0)
before = peak()
out, lse = flash_attn_func(q, q, q, causal=True, softcap=30.0)
print(peak() - before - (out.nbytes + lse.nbytes) // 1024)
"""


def peak_memory(length: int) -> Row:
    """Memory of a forward beyond its inputs and outputs, in a process of its own (Linux: read from /proc)."""
    code = _PEAK.format(length=length)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    scores = 8 * length**2 * 4 / 2**30
    name = f"extra memory, causal softcap float32 (1, {length}, 8, 64)"
    return Row(name, "MiB", int(done.stdout) / 1024, 200.0, f"the scores would take {scores:.1f} GiB")


def measurements(quick: bool) -> list[Callable[[], Row]]:
    """Return what to measure. `quick` shortens everything, to see that it runs: its ratios mean little."""
    length, long, rounds = (512, 4096, 2) if quick else (4096, 16384, 5)
    kinds = [(dtype, causal) for dtype in (torch.float32, torch.bfloat16) for causal in (False, True)]
    return [
        *(lambda d=d, c=c: forward_beside_sdpa(d, c, length, rounds) for d, c in kinds),  # type: ignore[misc]
        lambda: training_beside_sdpa(length, rounds),
        lambda: window_beside_full(long, min(rounds, 3)),
        lambda: peak_memory(long),
    ]


def rows(quick: bool) -> Iterator[Row]:
    """Yield the measured rows, with a progress bar."""
    todo = measurements(quick)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(todo))
        for measure in todo:
            yield measure()
            progress.advance(task)


def main() -> int:
    """Measure, print, and say with the exit status whether every target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there as well")
    parser.add_argument("--quick", action="store_true", help="short sequences, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(2)
    found = list(rows(options.quick))
    table = Table(title=f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads")
    for column in ("what", "measured", "target", "", "in detail"):
        table.add_column(column)
    for row in found:
        verdict = "[green]pass[/]" if row.passed else "[red]miss[/]"
        table.add_row(row.name, f"{row.value:.3g} {row.unit}", f"<= {row.target:.3g}", verdict, row.detail)
    Console(width=150).print(table)
    if options.json is not None:
        record = {
            "date": datetime.date.today().isoformat(),
            "command": "python " + " ".join(sys.argv),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "rows": [row._asdict() | {"passed": row.passed} for row in found],
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(row.passed for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
