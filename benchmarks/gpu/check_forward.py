"""Check the sm90 forward against fp64 on a GPU: named and drawn cases, poisoned outputs and padding, two equal runs.

    python benchmarks/gpu/check_forward.py [--cases 1500] [--workers 12] [--small] [--set FIELD=VALUE ...] [--json FILE]

Each case is compared by the rule of the contract: the error of out may be twice that of plain PyTorch attention in the
input dtype plus 1e-5, that of lse 1e-4; rows that see no key must be exactly 0 and -inf. `--small` runs one small case
of each feature in this process, for compute-sanitizer. `--set` changes fields of every configuration, where the
result still fits a block's shared memory.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from ast import literal_eval
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

import torch

from tilewise.backends.sm90 import backend as sm90
from tilewise.backends.sm90.backend import Sm90Backend
from tilewise.backends.sm90.config import SMEM_LIMIT, choose
from tilewise.problem import AttentionInputs

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    """One call, by its sizes and options. `lengths_q`/`lengths_k` make that side packed."""

    d: int = 128
    dv: int = 128
    dtype: str = "bfloat16"
    batch: int = 2
    sq: int = 200
    sk: int = 300
    heads: int = 4
    heads_kv: int = 2
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    used_q: bool = False
    used_k: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    sink: str | None = None
    pack: bool | None = None
    layout: str = "plain"  # plain | fused | heads_first | odd
    tail: int = 0  # rows after the last packed sequence
    scale: float | None = None
    peak: float = 1.0
    seed: int = 0


def tensor(case: Case, rows: tuple[int, ...], heads: int, d: int, gen: torch.Generator) -> torch.Tensor:
    """Return random values of shape (*rows, heads, d) in the layout that the case asks for."""
    dtype = getattr(torch, case.dtype)
    make = lambda *s: (torch.randn(*s, generator=gen, device="cuda") * case.peak).to(dtype)  # noqa: E731
    if case.layout == "fused":
        return make(*rows, heads, d + 16)[..., 8 : d + 8]
    if case.layout == "heads_first":
        return make(*rows[:-1], heads, rows[-1], d).transpose(-2, -3)
    if case.layout == "odd":
        return make(*rows, heads, d + 3)[..., 1 : d + 1]
    return make(*rows, heads, d)


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def build(case: Case) -> AttentionInputs:
    """Return the inputs of a case, with NaN wherever nothing may be read."""
    gen = torch.Generator("cuda").manual_seed(case.seed)
    draw = random.Random(case.seed)
    rows_q = (case.batch, case.sq) if case.lengths_q is None else (sum(case.lengths_q) + case.tail,)
    rows_k = (case.batch, case.sk) if case.lengths_k is None else (sum(case.lengths_k) + case.tail,)
    q = tensor(case, rows_q, case.heads, case.d, gen)
    k = tensor(case, rows_k, case.heads_kv, case.d, gen)
    v = tensor(case, rows_k, case.heads_kv, case.dv, gen)
    full_q = case.lengths_q or (case.sq,) * case.batch
    full_k = case.lengths_k or (case.sk,) * case.batch
    used_q = [draw.randint(0, n) for n in full_q] if case.used_q else None
    used_k = [draw.randint(0, n) for n in full_k] if case.used_k else None
    for t, packed, used, full, side in (
        (k, case.lengths_k, used_k, full_k, 1), (v, case.lengths_k, used_k, full_k, 1), (q, case.lengths_q, used_q, full_q, 0)
    ):  # fmt: skip
        at = 0
        for b, n in enumerate(full):
            part = t[at : at + n] if packed else t[b]
            if used is not None:
                part[used[b] :] = NAN
            at += n
        if packed:
            t[at:] = NAN
    ints = lambda x: None if x is None else torch.tensor(x, dtype=torch.int32, device="cuda")  # noqa: E731
    sink = None
    if case.sink:
        sink = (torch.randn(case.heads, generator=gen, device="cuda") * 2).to(getattr(torch, case.sink))
    return AttentionInputs(
        q, k, v, case.scale if case.scale is not None else case.d**-0.5,
        cu_seqlens_q=None if case.lengths_q is None else starts(case.lengths_q),
        cu_seqlens_k=None if case.lengths_k is None else starts(case.lengths_k),
        seqused_q=ints(used_q), seqused_k=ints(used_k), softcap=case.softcap,
        max_seqlen_q=None if case.lengths_q is None else max(case.lengths_q),
        window_left=case.left, window_right=case.right, sink=sink, pack_gqa=case.pack,
    )  # fmt: skip


def attend(q, k, v, inputs: AttentionInputs, dtype: torch.dtype):
    """Return (out (Sq, H, Dv), lse (H, Sq)) of one sequence, computed in `dtype` throughout."""
    group = q.shape[1] // k.shape[1]
    q, k, v = [t.to(dtype).transpose(0, 1) for t in (q, k, v)]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = (q @ k.transpose(-1, -2)) * inputs.softmax_scale
    if inputs.softcap:
        s = inputs.softcap * torch.tanh(s / inputs.softcap)
    sq, sk = q.shape[1], k.shape[1]
    at = torch.arange(sq, device=q.device)[:, None] + sk - sq
    j = torch.arange(sk, device=q.device)[None]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if inputs.window_left is not None:
        seen &= j >= at - inputs.window_left
    if inputs.window_right is not None:
        seen &= j <= at + inputs.window_right
    s = s.masked_fill(~seen, -INF)
    every = s
    if inputs.sink is not None:
        every = torch.cat([s, inputs.sink.to(dtype)[:, None, None].expand(-1, sq, 1)], -1)
    lse = torch.logsumexp(every, -1) if every.shape[-1] else torch.full(s.shape[:2], -INF, device=q.device, dtype=dtype)
    p = torch.exp(s - lse.masked_fill(lse == -INF, 0)[..., None])
    return (p @ v).transpose(0, 1), lse


def run_case(case: Case) -> str | None:
    """Return what is wrong with a case, or None."""
    inputs = build(case)
    results = []
    for _ in range(2):
        out = torch.full(inputs.out_shape, NAN, dtype=inputs.q.dtype, device="cuda")
        lse = torch.full(inputs.lse_shape, NAN, dtype=torch.float32, device="cuda")
        results.append(Sm90Backend().forward(inputs, out, lse))
    (out, lse), (again, lse_again) = results
    if not (torch.equal(out.view(torch.int16), again.view(torch.int16)) and torch.equal(lse.view(torch.int32), lse_again.view(torch.int32))):
        return "two runs differ"
    full_q = case.lengths_q or (case.sq,) * case.batch
    full_k = case.lengths_k or (case.sk,) * case.batch
    at_q = at_k = 0
    for b, (nq, nk) in enumerate(zip(full_q, full_k, strict=True)):
        uq = nq if inputs.seqused_q is None else int(inputs.seqused_q[b])
        uk = nk if inputs.seqused_k is None else int(inputs.seqused_k[b])
        q = inputs.q[at_q : at_q + nq] if case.lengths_q else inputs.q[b]
        k = inputs.k[at_k : at_k + nk] if case.lengths_k else inputs.k[b]
        v = inputs.v[at_k : at_k + nk] if case.lengths_k else inputs.v[b]
        o = out[at_q : at_q + nq] if case.lengths_q else out[b]
        ell = lse[:, at_q : at_q + nq] if case.lengths_q else lse[b]
        at_q, at_k = at_q + nq, at_k + nk
        if not bool((o[uq:] == 0).all()) or not bool((ell[:, uq:] == -INF).all()):
            return f"sequence {b}: rows that do not count are not 0, -inf"
        if uq == 0:
            continue
        want, want_lse = attend(q[:uq], k[:uk], v[:uk], inputs, torch.float64)
        plain, _ = attend(q[:uq], k[:uk], v[:uk], inputs, inputs.q.dtype)
        got, got_lse = o[:uq].double(), ell[:, :uq].double()
        allowed = 2 * (plain.double() - want).abs().max().item() + 1e-5
        error = (got - want).abs().max().item()
        if not error <= allowed:
            return f"sequence {b} ({uq}x{uk}): out off by {error:.2e}, allowed {allowed:.2e}"
        none = want_lse == -INF
        if not torch.equal(none, got_lse == -INF):
            return f"sequence {b}: -inf in other places"
        off = (got_lse - want_lse)[~none].abs()
        limit = 1e-4 + 1e-6 * want_lse[~none].abs()
        if off.numel() and not bool((off <= limit).all()):
            return f"sequence {b}: lse off by {off.max().item():.2e}"
        unseen = (attend(q[:uq], k[:uk], v[:uk], inputs.replace(sink=None), torch.float64)[1] == -INF).transpose(0, 1)
        if not bool((o[:uq][unseen] == 0).all()):
            return f"sequence {b}: a row without keys is not 0"
    if case.lengths_q and not (bool((out[at_q:] == 0).all()) and bool((lse[:, at_q:] == -INF).all())):
        return "rows after the last sequence are not 0, -inf"
    return None


NAMED = {
    "plain": Case(), "one_tile": Case(sq=128, sk=128), "one_key": Case(sk=1), "one_query": Case(sq=1, right=0),
    "odd_tail": Case(sq=333, sk=777, heads=3, heads_kv=1), "causal": Case(sq=300, right=0),
    "causal_more_queries": Case(sq=700, sk=300, right=0), "causal_more_keys": Case(sq=130, sk=900, right=0),
    "window": Case(sq=600, sk=600, left=127, right=0), "window_both": Case(sq=600, sk=600, left=64, right=63),
    "shifted_left": Case(sq=600, sk=600, left=-3, right=200), "shifted_right": Case(sq=600, sk=600, left=200, right=-5),
    "far_bounds": Case(left=2**31 - 2, right=2**31 - 2), "softcap": Case(softcap=15.0, peak=3.0, right=0),
    "softcap_50": Case(softcap=50.0, peak=3.0), "sink": Case(sink="bfloat16", right=0), "sink_fp32": Case(sink="float32"),
    "sink_empty": Case(sq=300, sk=20, sink="bfloat16", right=0), "used": Case(used_q=True, used_k=True, right=0),
    "packed": Case(lengths_q=(5, 0, 130, 257), lengths_k=(70, 3, 0, 257), batch=4, right=0, tail=9),
    "packed_q": Case(lengths_q=(5, 0, 130), batch=3), "packed_k": Case(lengths_k=(5, 0, 130), batch=3, right=0),
    "packed_used": Case(lengths_q=(50, 64, 130), lengths_k=(90, 10, 300), batch=3, used_q=True, used_k=True, tail=70),
    "packed_many": Case(lengths_q=tuple(range(70)), lengths_k=tuple(range(70, 0, -1)), batch=70, right=0),
    "packed_pack": Case(lengths_q=(5, 0, 130), lengths_k=(70, 3, 257), batch=3, right=0, pack=True, heads=8, heads_kv=2),
    "pack": Case(pack=True, heads=8, heads_kv=1, right=0), "pack_window": Case(d=64, dv=64, pack=True, heads=16, sq=300, left=100, right=0),
    "mqa": Case(heads=8, heads_kv=1), "fused": Case(layout="fused"), "heads_first": Case(layout="heads_first", right=0),
    "odd": Case(layout="odd"), "negative_scale": Case(scale=-0.1, right=0), "zero_scale": Case(scale=0.0, right=0),
    "fp16": Case(dtype="float16", right=0), "long": Case(sq=2000, sk=3000, right=0),
    "clusters": Case(sq=1100, sk=700), "clusters_used": Case(sq=1300, sk=300, used_q=True, used_k=True, batch=3),
    "clusters_packed_k": Case(sq=1025, lengths_k=(5, 0, 700), batch=3), "clusters_256": Case(d=256, dv=256, sq=1100, sk=600),
    "clusters_192": Case(d=192, dv=128, sq=1100, sk=600, heads=6), "beyond_8k": Case(sq=1100, sk=9000),
    "beyond_8k_causal": Case(sq=300, sk=9000, right=0), "short_rows": Case(sq=60, sk=500, right=0),
    "short_rows_256": Case(d=256, dv=256, sq=60, sk=500), "mqa_window": Case(d=64, dv=64, heads=16, heads_kv=2, sq=700, sk=900, left=127, right=0),
    **{f"d{d}_{dv}": Case(d=d, dv=dv, right=0, sq=300, sk=333) for d, dv in
       ((8, 8), (40, 72), (64, 64), (72, 96), (96, 96), (104, 120), (192, 128), (200, 256), (256, 256), (256, 64), (64, 256))},
    **{f"full_d{d}_{dv}": Case(d=d, dv=dv, sq=500, sk=1033) for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))},
}  # fmt: skip

SMALL = (
    "clusters_used short_rows pack_window causal window sink_empty packed_used packed_pack softcap full_d64_64"
).split()


def drawn(seed: int) -> Case:
    """Draw a case. Features come from few patterns so that few kernels are compiled; sizes are free."""
    r = random.Random(seed)
    d, dv = r.choice([(64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (64, 64), (128, 128)])
    pattern = r.choice(["dense", "causal", "band", "packed", "packed_used", "mixed_q", "mixed_k", "cap", "sink", "pack", "used"])
    batch = r.randint(1, 5)
    lengths = lambda top: tuple(r.choice([0, 1, r.randint(1, 64), r.randint(1, top)]) for _ in range(batch))  # noqa: E731
    heads_kv = r.choice([1, 2, 3])
    kw: dict = dict(d=d, dv=dv, batch=batch, sq=r.choice([1, r.randint(1, 100), r.randint(1, 900)]), sk=r.randint(1, 1100),
                    heads_kv=heads_kv, heads=heads_kv * r.choice([1, 2, 3, 4]), seed=seed, pack=False)  # fmt: skip
    if pattern == "causal":
        kw |= dict(right=0, layout=r.choice(["plain", "fused", "heads_first", "odd"]))
    if pattern == "band":
        left = r.randint(-50, 400)
        kw |= dict(left=left, right=r.randint(-left, 300 + max(-left, 0)))
    if pattern in ("packed", "packed_used", "mixed_q"):
        kw |= dict(lengths_q=lengths(500), tail=r.choice([0, 0, 5, 200]))
    if pattern in ("packed", "packed_used", "mixed_k"):
        kw |= dict(lengths_k=lengths(700))
    if pattern in ("packed", "packed_used"):
        kw |= dict(right=r.choice([0, 0, 7]))
    if pattern in ("packed_used", "used"):
        kw |= dict(used_q=True, used_k=True)
    if pattern == "cap":
        kw |= dict(softcap=r.choice([1.0, 15.0, 30.0, 50.0]), peak=r.choice([1.0, 3.0]), right=0, dtype="float16")
    if pattern == "sink":
        kw |= dict(sink="bfloat16", right=0, left=r.randint(0, 300))
    if pattern == "pack":
        kw |= dict(heads=heads_kv * r.choice([4, 8]), pack=True, right=0)
    return Case(**kw)


def change_configurations(changes: dict) -> None:
    """Make the backend run changed configurations in this process."""

    def changed(problem, extents):
        config = choose(problem, extents)
        other = replace(config, **changes)
        return other if other.smem_bytes(problem) <= SMEM_LIMIT else config

    sm90.choose = changed


def worker(cases: list[tuple[str, Case]]) -> list[tuple[str, str | None]]:
    torch.cuda.init()
    done = []
    for name, case in cases:
        try:
            done.append((name, run_case(case)))
        except Exception as error:  # noqa: BLE001  (a failed case is a result)
            done.append((name, f"{type(error).__name__}: {str(error)[:300]} at {traceback.format_exc().splitlines()[-3:-1]}"))
            if "CUDA" in str(error):
                break
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--small", nargs="*", metavar="NAME", help="of these named cases, or of one a feature")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", dest="changes")
    parser.add_argument("--json")
    args = parser.parse_args()
    began = time.time()
    changes = {}
    for change in args.changes:
        field, value = change.split("=")
        changes[field] = value if value.isalpha() and value not in ("True", "False") else literal_eval(value)
    named = [(n, c) for n, c in NAMED.items()]
    if args.small is not None:
        pick = args.small or SMALL
        change_configurations(changes)
        results = worker([(n, NAMED[n]) for n in pick])
    else:
        cases = named + [(f"drawn_{i}", drawn(i)) for i in range(max(args.cases - len(named), 0))]
        groups: dict[tuple, list] = {}
        for name, case in cases:
            kind = (case.d, case.dv, case.dtype, case.lengths_q is None, case.lengths_k is None, case.used_q, case.softcap != 0,
                    case.left is None, case.right is None, case.sink, case.pack and case.heads // case.heads_kv)  # fmt: skip
            groups.setdefault(kind, []).append((name, case))
        with get_context("spawn").Pool(args.workers, change_configurations, (changes,)) as pool:
            results = [x for part in pool.imap_unordered(worker, list(groups.values()), chunksize=1) for x in part]
        print(f"{len(groups)} kinds")
    bad = [(n, w) for n, w in results if w]
    for name, what in sorted(bad)[:40]:
        print("FAIL", name, what, asdict(NAMED[name]) if name in NAMED else "")
    print(f"{len(results) - len(bad)} passed, {len(bad)} failed, {len(named)} named, {time.time() - began:.0f} s", flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"passed": len(results) - len(bad), "failed": len(bad), "failures": bad}, f, indent=1)


if __name__ == "__main__":
    main()
