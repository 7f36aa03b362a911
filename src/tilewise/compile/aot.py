"""Ahead of time: which kernels a set of calls needs, and a folder of them, compiled in parallel without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..backends.sm90.backend import Sm90Backend
from ..normalise import Options, sequences
from ..problem import AttentionInputs
from . import native
from .cache import is_sealed, sealed
from .fingerprint import packages, sources
from .folder import FORMAT, MANIFEST, portable_digest
from .key import CompileKey
from .keytext import from_text, to_text
from .launch import build, export

#: Architecture -> the backend that compiles for it.
BACKENDS = {"sm_90a": Sm90Backend}

# fmt: off
#: Model family -> (query heads, K/V heads, head dim, head dim of values, windows beside unbounded, sink).
PRESETS: dict[str, tuple[tuple[int, int, int, int, tuple[int, ...], bool], ...]] = {
    "llama": ((32, 8, 128, 128, (), False), (64, 8, 128, 128, (), False), (32, 32, 128, 128, (), False),
              (32, 8, 64, 64, (), False)),
    "qwen": ((32, 8, 128, 128, (), False), (28, 4, 128, 128, (), False), (64, 4, 128, 128, (), False)),
    "mistral": ((32, 8, 128, 128, (4096,), False),),
    "gemma": ((8, 4, 256, 256, (1024,), False), (16, 8, 256, 256, (1024,), False), (32, 16, 128, 128, (1024,), False)),
    "deepseek": ((128, 128, 192, 128, (), False), (16, 16, 192, 128, (), False)),
    "gpt-oss": ((64, 8, 64, 64, (128,), True),),
    "bert": ((12, 12, 64, 64, (), False), (16, 16, 64, 64, (), False)),
}
# fmt: on

#: Fields of an entry of a spec file and their defaults; a list makes one call of each of its values.
FIELDS: dict[str, Any] = {
    "batch": 1,
    "seqlen_q": 1024,
    "seqlen_k": None,
    "heads": 32,
    "heads_kv": None,
    "head_dim": 128,
    "head_dim_v": None,
    "dtype": "bfloat16",
    "causal": False,
    "window_left": None,
    "window_right": None,
    "softcap": 0.0,
    "sink": False,
    "varlen": False,
    "seqused_k": False,
    "num_splits": 1,
    "pack_gqa": None,
    "direction": "forward",
}


def preset_entries(name: str) -> list[dict[str, Any]]:
    """Return the spec entries of a model family: dense and packed, prefill and decode, in bf16 and fp16.

    Raises:
        ValueError: no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    entries = []
    for heads, heads_kv, d, dv, windows, sink in PRESETS[name]:
        shape = {"heads": heads, "heads_kv": heads_kv, "head_dim": d, "head_dim_v": dv, "sink": sink}
        shape |= {"dtype": ["bfloat16", "float16"], "varlen": [False, True]}
        for seqlen_q, seqlen_k in ((1, 4096), (64, 4096), (512, 512), (4096, 4096), (16384, 16384)):
            # A whole-model call is causal; an encoder's is not. Lengths used so far (seqused_k) come with a cache.
            base = {**shape, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "seqused_k": [False, True]}
            entries.append({**base, "causal": False if name == "bert" else [True, seqlen_q > 1]})
            entries += [{**base, "causal": True, "window_left": w} for w in windows]
    return entries


def read_spec(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a JSON spec file: a list of objects with the names of `FIELDS`.

    Raises:
        ValueError: it is not one; OSError: it cannot be read.
    """
    try:
        entries = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ValueError(f"{path}: expected a list of objects")
    return entries


def calls(entry: dict[str, Any]) -> Iterator[tuple[AttentionInputs, str]]:
    """Yield the calls that a spec entry names, on tensors without storage, each with its direction."""
    if unknown := set(entry) - set(FIELDS):
        raise ValueError(f"spec: expected fields of {', '.join(FIELDS)}, got {', '.join(sorted(unknown))}")
    chosen: list[dict[str, Any]] = [{}]
    for name, default in FIELDS.items():
        value = entry.get(name, default)
        options = value if isinstance(value, list) else [value]
        chosen = [{**c, name: x} for c in chosen for x in options]
    for c in chosen:
        yield _call(c), c["direction"]


def _call(c: dict[str, Any]) -> AttentionInputs:
    batch, sq = c["batch"], c["seqlen_q"]
    sk, hk = c["seqlen_k"] or sq, c["heads_kv"] or c["heads"]
    d, dv = c["head_dim"], c["head_dim_v"] or c["head_dim"]
    dtype = getattr(torch, c["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected float16 or bfloat16, got {c['dtype']!r}")

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    lengths: dict[str, Any] = {}
    if c["varlen"]:
        q, k, v = empty(batch * sq, c["heads"], d), empty(batch * sk, hk, d), empty(batch * sk, hk, dv)
        starts = empty(batch + 1, dtype=torch.int32)
        lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": sq, "max_seqlen_k": sk}
    else:
        q, k, v = empty(batch, sq, c["heads"], d), empty(batch, sk, hk, d), empty(batch, sk, hk, dv)
    if c["seqused_k"]:
        lengths["seqused_k"] = empty(batch, dtype=torch.int32)
    sink = empty(c["heads"]) if c["sink"] is True else None
    options = Options(
        causal=c["causal"],
        window_size=(c["window_left"], c["window_right"]),
        softcap=float(c["softcap"]),
        learnable_sink=sink,
        num_splits=c["num_splits"],
        pack_gqa=c["pack_gqa"],
    )
    return options.apply(sequences(q, k, v, **lengths))


def keys(entries: Iterable[dict[str, Any]], arch: str) -> tuple[list[CompileKey], list[str]]:
    """Return the kernels for `entries` on `arch`, each once, and why calls were left out.

    Raises:
        ValueError: no backend compiles for `arch`, or an entry is wrong.
    """
    if arch not in BACKENDS:
        raise ValueError(f"arch: expected one of {', '.join(BACKENDS)}, got {arch!r}")
    backend = BACKENDS[arch]()
    found: dict[str, CompileKey] = {}
    refused: dict[str, None] = {}
    for entry in entries:
        for inputs, direction in calls(entry):
            problem = inputs.problem(direction)
            if reasons := backend.unsupported(problem):
                refused[f"{problem}: {'; '.join(reasons)}"] = None
                continue
            for key in backend.keys(inputs, direction):
                found[portable_digest(key)] = key
    return list(found.values()), list(refused)


def compile_to(text: str, folder: str) -> str:
    """Compile the key `text` into `folder`, whole or not at all; return its file name. Runs in a worker process."""
    key = from_text(text)
    name = f"{portable_digest(key)}.so"
    with tempfile.TemporaryDirectory(prefix=".work-", dir=folder) as work:
        made, whole = Path(work, "kernel.so"), Path(work, name)
        export(build(key), made)
        whole.write_bytes(sealed(made.read_bytes()))
        os.replace(whole, Path(folder, name))
    return name


def precompile(
    wanted: list[CompileKey], folder: Path, jobs: int, progress: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Make `folder` hold `wanted` beside what it already has; return what failed, text of key -> reason.

    Kernels of another version of tilewise in the folder are removed. `progress` hears of each kernel as it ends.

    Raises:
        RuntimeError: there is no linker or no runtime library here. OSError: the folder cannot be written.
    """
    from .. import __version__

    runtime = native.installed_runtime()
    if runtime is None or native.linker() is None:
        lacks = "the compiler (pip install 'tilewise[cuda]')" if runtime is None else "a linker (such as gcc)"
        raise RuntimeError(f"precompile needs {lacks}")
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, str] = {}
    old = _manifest(folder)
    if old.get("sources") == sources() and old.get("packages") == list(packages()):
        known = old.get("kernels", {})
    for path in folder.glob("*.so"):
        if path.stem not in known and path.name != native.RUNTIME:
            path.unlink()
    todo = []
    for key in wanted:
        digest = portable_digest(key)
        path = folder / f"{digest}.so"
        if path.is_file() and is_sealed(path.read_bytes()):
            progress(f"{key.kernel} {key.problem}")
        else:
            todo.append((digest, to_text(key), f"{key.kernel} {key.problem}"))
    done, failed = dict(known), {}
    # Spawned: the DSL's state must not be shared with a fork.
    with ProcessPoolExecutor(max(1, min(jobs, len(todo) or 1)), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(compile_to, text, str(folder)): (digest, text, words) for digest, text, words in todo}
        for future in as_completed(running):
            digest, text, words = running[future]
            try:
                future.result()
                done[digest] = text
            except Exception as error:  # one kernel that fails must not take the others with it
                failed[text] = f"{type(error).__name__}: {error}"
            progress(words)
    done |= {portable_digest(key): to_text(key) for key in wanted if (folder / f"{portable_digest(key)}.so").is_file()}
    if not (folder / native.RUNTIME).is_file() or (folder / native.RUNTIME).stat().st_size != runtime.stat().st_size:
        shutil.copyfile(runtime, folder / native.RUNTIME)
    body = {
        "format": FORMAT,
        "version": __version__,
        "sources": sources(),
        "packages": list(packages()),
        "kernels": dict(sorted(done.items())),
    }
    _write(folder / "__init__.py", '"""Precompiled kernels of tilewise; found through TILEWISE_KERNELS."""\n')
    _write(folder / MANIFEST, json.dumps(body, indent=1) + "\n")
    return failed


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
