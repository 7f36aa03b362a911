"""The disk cache under faults: killed writers, damaged files, full and read-only folders, concurrent starts."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("filelock")

from tilewise.compile import launch, native
from tilewise.compile.cache import DiskCache, is_sealed, sealed
from tilewise.compile.key import CompileKey
from tilewise.problem import AttentionProblem, TensorSig
from tilewise.settings import settings
from tilewise.target import Target

DIGEST = "ab" * 32
BODY = bytes(range(256)) * 64
SIG = TensorSig("bfloat16", 4, (), True, False)
SOURCE = Path(launch.__file__).parents[2]


def cache(root: Path, limit: int = 1 << 20, seconds: float = 10.0) -> DiskCache:
    return DiskCache(root / "cache", "f" * 16, limit, seconds)


def put(disk: DiskCache, digest: str = DIGEST, body: bytes = BODY) -> Path | None:
    with disk.lock(digest) as held:
        assert held
        return disk.publish(digest, lambda path: path.write_bytes(body) and None)


def files(disk: DiskCache) -> list[str]:
    return sorted(p.name for p in disk.folder.iterdir())


def test_what_is_published_is_found_and_private(tmp_path):
    disk = cache(tmp_path)
    assert disk.find(DIGEST) is None
    path = put(disk)
    assert path == disk.find(DIGEST) and path.read_bytes() == sealed(BODY)
    assert files(disk) == [path.name]
    for folder in (disk.root, disk.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_open_root_is_closed(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    disk = cache(tmp_path)
    put(disk)
    assert stat.S_IMODE(disk.root.stat().st_mode) == 0o700


def test_a_file_others_can_write_is_not_loaded(tmp_path):
    disk = cache(tmp_path)
    put(disk).chmod(0o666)
    assert disk.find(DIGEST) is None


def test_every_truncation_and_bit_flip_is_noticed(tmp_path):
    disk, good, rng = cache(tmp_path), sealed(BODY), random.Random(0)
    damaged = [good[:n] for n in (0, 1, 31, 32, len(good) - 1, *(rng.randrange(len(good)) for _ in range(50)))]
    for _ in range(200):
        i = rng.randrange(len(good) * 8)
        damaged.append(good[: i // 8] + bytes([good[i // 8] ^ 1 << i % 8]) + good[i // 8 + 1 :])
    damaged += [good + b"x", good + good, BODY]
    path = put(disk)
    for data in damaged:
        assert not is_sealed(data)
    for data in damaged[::20]:
        path.write_bytes(data)
        path.chmod(0o600)
        assert disk.find(DIGEST) is None and not path.exists()
        assert put(disk) == path == disk.find(DIGEST)


WRITER = """
import sys, time
from pathlib import Path
from tilewise.compile.cache import DiskCache
disk = DiskCache(Path(sys.argv[1]), "f" * 16, 1 << 20, 10.0)
def slowly(path):
    with path.open("wb", buffering=0) as file:
        for i in range(64):
            file.write(bytes(range(256)))
            time.sleep(0.0005)
print("up", flush=True)
while True:
    with disk.lock("%s") as held:
        assert held
        disk.publish("%s", slowly)
""" % (DIGEST, DIGEST)  # fmt: skip

#: Without torch: fifty processes that import it would take minutes.
LIGHT = """
import sys, types
for name in ("tilewise", "tilewise.compile"):
    module = types.ModuleType(name); module.__path__ = [sys.argv[2] + "/" + name.replace(".", "/")]
    sys.modules[name] = module
"""


def test_fifty_killed_writers_leave_nothing_wrong(tmp_path):
    disk, rng = cache(tmp_path), random.Random(1)
    for _ in range(50):
        command = [sys.executable, "-c", LIGHT + WRITER, str(disk.root), str(SOURCE)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"up\n"
        time.sleep(rng.uniform(0.0, 0.15))
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        child.stdout.close()
        found = disk.find(DIGEST)
        assert found is None or found.read_bytes() == sealed(BODY)
    start = time.monotonic()
    assert put(disk) == disk.find(DIGEST)  # the killed holders' lock is free, and what they left is gone
    assert time.monotonic() - start < 2.0
    assert files(disk) == [f"{DIGEST}.so"]


def test_a_read_only_place_warns_once_and_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    disk = DiskCache(tmp_path / "file" / "cache", "f" * 16, 1 << 20, 1.0)  # root itself may write anywhere but here
    with pytest.warns(UserWarning, match="kernel cache.*cannot use"):
        with disk.lock(DIGEST) as held:
            assert not held
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with disk.lock(DIGEST) as held:
            assert not held
        assert disk.find(DIGEST) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_warns_once_and_leaves_nothing(tmp_path):
    disk = cache(tmp_path)

    def full(path):
        path.write_bytes(b"x" * 100)
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    with disk.lock(DIGEST), pytest.warns(UserWarning, match="No space left"):
        assert disk.publish(DIGEST, full) is None
    assert files(disk) == []
    with warnings.catch_warnings(), disk.lock(DIGEST):
        warnings.simplefilter("error")
        assert disk.publish(DIGEST, full) is None


def test_a_lock_that_is_not_freed_times_out(tmp_path):
    slow, quick = cache(tmp_path), cache(tmp_path, seconds=0.2)
    with slow.lock(DIGEST) as first:
        assert first
        with pytest.warns(UserWarning, match="waited 0.2 s"), quick.lock(DIGEST) as second:
            assert not second
    with quick.lock(DIGEST) as third:
        assert third


def test_the_least_recently_used_go_first(tmp_path):
    size = len(sealed(BODY))
    disk = cache(tmp_path, limit=10 * size)
    digests = [f"{i:02x}" * 32 for i in range(12)]
    for i, digest in enumerate(digests[:10]):
        os.utime(put(disk, digest), (i + 1, i + 1))
    assert disk.find(digests[0]) is not None  # used again: now the newest
    put(disk, digests[10])
    left = {p.stem for _, _, p in disk.kernels()}
    assert digests[0] in left and digests[10] in left and digests[1] not in left
    assert sum(n for _, n, _ in disk.kernels()) <= disk.limit


def test_stale_temporaries_of_dead_processes_go(tmp_path):
    disk = cache(tmp_path)
    put(disk)
    old, new = disk.folder / "cd.x.tmp", disk.folder / "ef.y.tmp"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (1, 1))
    put(disk)
    assert not old.exists() and new.exists()


# ---- the door above it, with a compiler that only counts
def key(**features) -> CompileKey:
    problem = AttentionProblem("forward", "bfloat16", 64, 64, False, SIG, SIG, SIG, **features)
    return CompileKey("sm90.forward", problem, None, Target("sm_90a", "test"))


class FakeCompiled:
    def __call__(self):
        return "in memory"


@pytest.fixture
def door(tmp_path, monkeypatch):
    """The real `compile_kernel` with a compiler, linker and loader that need no DSL; returns the list of builds."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "_compiled", {})
    settings.cache_clear()
    builds: list[CompileKey] = []

    def build(key):
        builds.append(key)
        time.sleep(0.05)
        return FakeCompiled()

    monkeypatch.setattr(launch, "build", build)
    monkeypatch.setattr(launch, "can_compile", lambda: True)
    monkeypatch.setattr(launch, "export", lambda compiled, target: target.write_bytes(BODY) and None)
    monkeypatch.setattr(native, "load", lambda path, runtime=None: lambda: Path(path).read_bytes())
    yield builds
    settings.cache_clear()


def test_eight_threads_compile_once_and_a_restart_not_at_all(door, monkeypatch):
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(launch.compile_kernel(key()))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(door) == 1 and len(found) == 8 and len(set(map(id, found))) == 1
    monkeypatch.setattr(launch, "_compiled", {})
    launch.compile_kernel(key())
    assert len(door) == 1
    launch.compile_kernel(key(right=True))
    assert len(door) == 2


def test_an_unlinkable_kernel_runs_from_memory(door, monkeypatch):
    def export(compiled, target):
        raise RuntimeError("no linker found")

    monkeypatch.setattr(launch, "export", export)
    with pytest.warns(UserWarning, match="no linker"):
        assert launch.compile_kernel(key())() == "in memory"


def test_the_cache_can_be_turned_off(door, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", "0")
    settings.cache_clear()
    launch.compile_kernel(key())
    assert len(door) == 1 and not (tmp_path / "cache").exists()


def test_a_child_forked_while_a_kernel_compiles_can_compile(door):
    thread = threading.Thread(target=lambda: launch.compile_kernel(key()))
    thread.start()
    while not door:
        time.sleep(0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        child = os.fork()
    if child == 0:
        try:
            launch.compile_kernel(key(right=True))
            os._exit(0)
        except BaseException:
            os._exit(1)
    thread.join()
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(done[1]) == 0 and done[0] == child


STARTER = """
import os, sys, threading, time
from pathlib import Path
from tilewise.compile import launch, native
from tilewise.compile.cache import DiskCache
sys.path.insert(0, sys.argv[1])
from test_cache import BODY, FakeCompiled, key
log = sys.argv[2]
def build(k):
    with open(log, "ab", buffering=0) as file: file.write(b".")
    time.sleep(0.2)
    return FakeCompiled()
launch.build, launch.can_compile = build, lambda: True
launch.export = lambda compiled, target: target.write_bytes(BODY) and None
native.load = lambda path, runtime=None: (lambda: Path(path).read_bytes())
ready = threading.Barrier(8)
def work():
    ready.wait()
    launch.compile_kernel(key())
children = []
for _ in range(7):
    pid = os.fork()
    if not pid:
        break
    children.append(pid)
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
if children and len(children) == 7:
    codes = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
    sys.exit(max(codes))
os._exit(0)
"""


def test_eight_processes_of_eight_threads_compile_once(tmp_path):
    log = tmp_path / "builds"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TILEWISE_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", STARTER, str(Path(__file__).parent), str(log)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert log.read_bytes() == b"."
