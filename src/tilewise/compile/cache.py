"""Compiled kernels on disk: one file a kernel, published whole or not at all, and never a reason to fail.

    ROOT/<fingerprint>/<digest>.so    the shared object, and after it MAGIC and the SHA-256 of all before
    ROOT/<fingerprint>/<digest>.*.tmp what a compiling process is writing; its lock's next holder removes it
    ROOT/locks/<two digits>.lock      empty; held through the kernel's file locks, so a killed holder frees it
    ROOT/hits, ROOT/misses            one byte for each, appended: their sizes are the counts

A file is published by `os.replace` from the same folder. Readers take no lock.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAGIC = b"tilewise kernel 1\n"
TRAILER = len(MAGIC) + 32

#: A temporary file this old belongs to nobody: no compilation takes an hour.
STALE_SECONDS = 3600.0


def sealed(body: bytes) -> bytes:
    """Return `body` with the checksum that `is_sealed` wants."""
    head = body + MAGIC
    return head + hashlib.sha256(head).digest()


def is_sealed(data: bytes) -> bool:
    """Say whether `data` is what `sealed` returned, every bit of it."""
    head, found = data[:-32], data[-32:]
    return len(data) > TRAILER and head.endswith(MAGIC) and hashlib.sha256(head).digest() == found


class DiskCache:
    """The kernels of one fingerprint under `root`.

    Args:
        root: the cache folder; made with mode 0700 on first write.
        fingerprint: names the subfolder.
        limit: bytes that all fingerprints together may take.
        lock_seconds: how long to wait for another holder of a kernel's lock.
    """

    def __init__(self, root: Path, fingerprint: str, limit: int, lock_seconds: float) -> None:
        self.root = root
        self.folder = root / fingerprint
        self.limit = limit
        self.lock_seconds = lock_seconds
        self._warned = False

    def path(self, digest: str) -> Path:
        """Return where the kernel `digest` is, or would be."""
        return self.folder / f"{digest}.so"

    def find(self, digest: str) -> Path | None:
        """Return the file of `digest`, checked bit by bit; None if there is none. A corrupt one is removed."""
        path = self.path(digest)
        try:
            if not self._is_ours(path):
                return None
            good = is_sealed(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warn(f"cannot read {path}: {error}")
            return None
        if good:
            self._touch(path)
            return path
        with suppress(OSError):
            path.unlink()
        return None

    @contextmanager
    def lock(self, digest: str) -> Iterator[bool]:
        """Hold the lock of `digest`, across threads and processes. False: not got; go on without the disk."""
        held = None
        try:
            self._make_folders()
            from filelock import FileLock, Timeout

            held = FileLock(self.root / "locks" / f"{digest[:2]}.lock", timeout=self.lock_seconds, mode=0o600)
            try:
                held.acquire()
            except Timeout:
                held = None
                self.warn(f"waited {self.lock_seconds:g} s for the lock of {digest[:12]}; compiling without the disk")
        except (OSError, NotImplementedError, ImportError) as error:
            held = None
            self.warn(f"cannot use {self.root}: {error}")
        try:
            yield held is not None
        finally:
            if held is not None:
                held.release()

    def publish(self, digest: str, write: Callable[[Path], None]) -> Path | None:
        """Return the file of `digest` after `write(path)` made its shared object. Call with the lock held.

        None if the disk would not take it; what `write` raises other than OSError passes through.
        """
        work = None
        try:
            for old in self.folder.glob(f"{digest}.*.tmp"):
                shutil.rmtree(old, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f"{digest}.", suffix=".tmp", dir=self.folder))
            made, whole = work / "kernel.so", work / "sealed.so"
            write(made)
            with whole.open("wb") as file:
                file.write(sealed(made.read_bytes()))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(whole, 0o600)
            os.replace(whole, self.path(digest))
        except OSError as error:
            self.warn(f"cannot write to {self.folder}: {error}")
            return None
        finally:
            if work is not None:
                shutil.rmtree(work, ignore_errors=True)
        self.evict()
        return self.path(digest)

    def evict(self) -> None:
        """Remove the least recently used kernels until the rest take at most 9/10 of the limit, if they exceed it."""
        with suppress(OSError):
            now = time.time()
            for old in self.root.glob("*/*.tmp"):
                with suppress(OSError):
                    if now - old.stat().st_mtime > STALE_SECONDS:
                        shutil.rmtree(old, ignore_errors=True)
            kernels = self.kernels()
            total = sum(size for _, size, _ in kernels)
            if total <= self.limit:
                return
            for _, size, path in kernels:
                if total <= self.limit * 9 // 10:
                    break
                with suppress(OSError):
                    path.unlink()
                    total -= size
                with suppress(OSError):
                    path.parent.rmdir()  # only if it was the last

    def kernels(self) -> list[tuple[float, int, Path]]:
        """Return (time of last use, bytes, file) of every kernel of every fingerprint, least recently used first."""
        found = []
        for path in self.root.glob("*/*.so"):
            with suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return sorted(found)

    def count(self, what: str) -> None:
        """Add one to "hits" or "misses"."""
        with suppress(OSError):
            handle = os.open(self.root / what, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(handle, b".")
            finally:
                os.close(handle)

    def counted(self, what: str) -> int:
        """Return how many "hits" or "misses" were counted."""
        try:
            return (self.root / what).stat().st_size
        except OSError:
            return 0

    def _make_folders(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix":
            stat = self.root.stat()
            if stat.st_uid != os.getuid():
                raise PermissionError(f"it belongs to user {stat.st_uid}, and kernels are code")
            if stat.st_mode & 0o077:
                os.chmod(self.root, 0o700)
        for folder in (self.folder, self.root / "locks"):
            folder.mkdir(mode=0o700, exist_ok=True)

    @staticmethod
    def _is_ours(path: Path) -> bool:
        """Say whether this user, and nobody else, can have written `path`: a shared object is code."""
        return os.name != "posix" or (path.stat().st_uid == os.getuid() and not path.stat().st_mode & 0o022)

    @staticmethod
    def _touch(path: Path) -> None:
        with suppress(OSError):
            os.utime(path)

    def warn(self, text: str) -> None:
        """Warn once; the next call may find the disk mended, so nothing is turned off."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"tilewise kernel cache: {text}. Kernels are compiled in this process instead.", stacklevel=3)


def default_root() -> Path:
    """Return the platform's cache folder for tilewise."""
    from platformdirs import user_cache_path

    return user_cache_path("tilewise", appauthor=False) / "kernels"


_disk: dict[tuple[object, ...], DiskCache] = {}
_making = threading.Lock()


def disk_cache() -> DiskCache | None:
    """Return the cache that the settings ask for; None where it is off or no folder for it is known."""
    from ..settings import settings
    from .fingerprint import fingerprint

    asked = settings()
    if not asked.cache:
        return None
    mark = (asked, fingerprint())
    with _making:
        if mark not in _disk:
            try:
                root = asked.cache_dir or default_root()
            except ImportError:
                return None  # precompiled kernels need no platformdirs, and a bare installation has nothing to cache
            _disk[mark] = DiskCache(root, mark[1], asked.cache_mb << 20, asked.lock_seconds)
        return _disk[mark]
