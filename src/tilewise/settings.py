"""The only reader of TILEWISE_* environment variables."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        check: TILEWISE_CHECK=1 checks the values of cu_seqlens, seqused, page_table and block lists on every device.
            On a GPU that synchronises; on the CPU these checks always run, since they cost nothing there.
        backend: TILEWISE_BACKEND=NAME uses that backend wherever a call names none.
        log: TILEWISE_LOG=plan,compile,... names the topics that are logged, once per problem.
    """

    check: bool = False
    backend: str | None = None
    log: frozenset[str] = frozenset()

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the environment as it is now."""
        get = os.environ.get
        flag = get("TILEWISE_CHECK", "0").strip().lower()
        if flag not in {"", "0", "1", "false", "true"}:
            raise ValueError(f"TILEWISE_CHECK: expected 0 or 1, got {flag!r}")
        topics = frozenset(t.strip() for t in get("TILEWISE_LOG", "").split(",") if t.strip())
        return cls(check=flag in {"1", "true"}, backend=get("TILEWISE_BACKEND") or None, log=topics)


@functools.cache
def settings() -> Settings:
    """Return the settings of this process, read once. `settings.cache_clear()` reads them again."""
    return Settings.from_environment()
