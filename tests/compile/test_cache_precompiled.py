"""The real compiler behind the cache: a killed compilation, a cold and a warm start, and running without it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

import tilewise
from tilewise.compile import native
from tilewise.compile.aot import keys, precompile
from tilewise.compile.cache import is_sealed
from tilewise.compile.keytext import to_text

if native.linker() is None:
    pytest.skip("no linker", allow_module_level=True)

SOURCE = Path(tilewise.__file__).parents[1]
GET = """
import json, sys
for name in json.loads(sys.argv[2]): sys.modules[name] = None
from tilewise.compile.keytext import from_text
from tilewise.compile import compile_kernel
print("up", flush=True)
kernel = compile_kernel(from_text(sys.argv[1]))
print(type(kernel).__name__, sys.modules.get("cutlass") is not None)
"""


def start(key, blocked="[]", **environment) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    command = [sys.executable, "-c", GET, to_text(key), blocked]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def one(causal: bool):
    found, refused = keys([{"heads": 4, "seqlen_q": 128, "head_dim": 64, "causal": causal}], "sm_90a")
    assert len(found) == 1 and not refused
    return found[0]


def test_killed_then_compiled_then_loaded(tmp_path):
    key, env = one(False), {"TILEWISE_CACHE_DIR": str(tmp_path / "cache")}
    for wait in (0.3, 1.5):
        child = start(key, **env)
        assert child.stdout.readline() == "up\n"
        time.sleep(wait)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    out, err = start(key, **env).communicate(timeout=120)
    assert out.split() in (["up", "Function", "True"], ["up", "Function", "False"]), err
    objects = list((tmp_path / "cache").glob("*/*.so"))
    assert len(objects) == 1 and is_sealed(objects[0].read_bytes())
    assert not list((tmp_path / "cache").glob("*/*.tmp"))
    out, err = start(key, **env).communicate(timeout=60)
    assert out.split() == ["up", "Function", "False"], err  # loaded, and the DSL not imported


def test_a_folder_runs_without_the_compiler_and_an_error_says_what_to_add(tmp_path):
    folder, here, absent = tmp_path / "kernels", one(False), one(True)
    assert precompile([here], folder, 1) == {}
    bare = {"TILEWISE_KERNELS": str(folder), "PATH": "", "TILEWISE_CACHE_DIR": str(tmp_path / "cache")}
    blocked = '["cutlass", "nvidia_cutlass_dsl", "platformdirs", "rich"]'
    out, err = start(here, blocked, **bare).communicate(timeout=60)
    assert out.split() == ["up", "Function", "False"], err
    _, err = start(absent, blocked, **bare).communicate(timeout=60)
    assert "MissingKernelError" in err
    line = next(x.strip() for x in err.splitlines() if "python -m tilewise precompile" in x)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, *shlex.split(line)[1:]], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for key in (here, absent):
        out, err = start(key, blocked, **bare).communicate(timeout=60)
        assert out.split() == ["up", "Function", "False"], err
    assert not (tmp_path / "cache").exists()
