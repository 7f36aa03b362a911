"""The only reader of TILEWISE_* environment variables, and the log that TILEWISE_LOG turns on."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import SettingError

#: Every variable that is read here; the doctor names any other TILEWISE_* as unknown.
VARIABLES = (
    "TILEWISE_CHECK",
    "TILEWISE_BACKEND",
    "TILEWISE_LOG",
    "TILEWISE_CACHE",
    "TILEWISE_CACHE_DIR",
    "TILEWISE_CACHE_MB",
    "TILEWISE_LOCK_SECONDS",
    "TILEWISE_KERNELS",
)
TOPICS = frozenset({"plan", "compile"})


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        check: TILEWISE_CHECK=1 checks the values of cu_seqlens, seqused, page_table and block lists on every device.
            On a GPU that synchronises; on the CPU these checks always run, since they cost nothing there.
        backend: TILEWISE_BACKEND=NAME uses that backend wherever a call names none.
        log: TILEWISE_LOG=plan,compile names the topics that are logged, once per problem.
        cache: TILEWISE_CACHE=0 neither reads nor writes compiled kernels on disk.
        cache_dir: TILEWISE_CACHE_DIR=DIR keeps them there; None is the platform's cache folder.
        cache_mb: TILEWISE_CACHE_MB=N bounds them to N MiB; the least recently used go first.
        lock_seconds: TILEWISE_LOCK_SECONDS=S: after waiting so long for another process that compiles the same
            kernel, compile it here without the disk.
        kernels: TILEWISE_KERNELS=DIR, a folder that `python -m tilewise precompile` wrote, or the name of an
            importable package that is one.
    """

    check: bool = False
    backend: str | None = None
    log: frozenset[str] = frozenset()
    cache: bool = True
    cache_dir: Path | None = None
    cache_mb: int = 1024
    lock_seconds: float = 120.0
    kernels: str | None = None

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the environment as it is now.

        Raises:
            SettingError: a variable holds what it cannot mean.
        """
        get = os.environ.get
        topics = frozenset(t.strip() for t in get("TILEWISE_LOG", "").split(",") if t.strip())
        folder = get("TILEWISE_CACHE_DIR")
        return cls(
            check=_flag("TILEWISE_CHECK", False),
            backend=get("TILEWISE_BACKEND") or None,
            log=topics,
            cache=_flag("TILEWISE_CACHE", True),
            cache_dir=Path(folder).expanduser() if folder else None,
            cache_mb=int(_number("TILEWISE_CACHE_MB", 1024)),
            lock_seconds=_number("TILEWISE_LOCK_SECONDS", 120.0),
            kernels=get("TILEWISE_KERNELS") or None,
        )


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text not in {"", "0", "1", "false", "true"}:
        raise SettingError(f"{name}: expected 0 or 1, got {text!r}")
    return text in {"1", "true"} if text else default


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise SettingError(f"{name}: expected a number of at least 0, got {text!r}")
    return value


@functools.cache
def settings() -> Settings:
    """Return the settings of this process, read once. `settings.cache_clear()` reads them again."""
    return Settings.from_environment()


_logged: set[tuple[str, object]] = set()


def log(topic: str, once: object, text: Callable[[], str]) -> None:
    """Write one line to stderr if TILEWISE_LOG names `topic`, once for each (topic, `once`) in a process."""
    if topic not in settings().log or (topic, once) in _logged:
        return
    _logged.add((topic, once))
    print(f"tilewise {topic}: {text()}", file=sys.stderr, flush=True)
