"""The compile key: every field matters, and what cannot be encoded is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest

from tilewise.backends.sm90.config import ForwardConfig
from tilewise.compile.key import CompileKey
from tilewise.problem import AttentionProblem, TensorSig
from tilewise.target import Target

SIG = TensorSig("bfloat16", 4, (), True, False)
KEY = CompileKey(
    "sm90.forward",
    AttentionProblem("forward", "bfloat16", 128, 128, False, SIG, SIG, SIG),
    ForwardConfig(),
    Target("sm_90a", "4.8.1"),
)


def changed(value: object) -> object:
    if isinstance(value, bool) or value is None:
        return not value
    return value + (type(value)(1) if isinstance(value, int) else "x")  # type: ignore[operator]


@pytest.mark.parametrize("name", [f.name for f in fields(ForwardConfig)])
def test_every_config_field_changes_the_digest(name: str) -> None:
    other = replace(KEY, config=replace(KEY.config, **{name: changed(getattr(KEY.config, name))}))
    assert other.digest != KEY.digest


@pytest.mark.parametrize("name", ["causal", "kernel", "arch", "compiler"])
def test_every_part_changes_the_digest(name: str) -> None:
    other = {
        "causal": replace(KEY, problem=replace(KEY.problem, right=True)),
        "kernel": replace(KEY, kernel="sm90.backward"),
        "arch": replace(KEY, target=replace(KEY.target, arch="sm_100a")),
        "compiler": replace(KEY, target=replace(KEY.target, compiler="4.9.0")),
    }[name]
    assert other.digest != KEY.digest


def test_equal_keys_have_equal_digests() -> None:
    assert replace(KEY).digest == KEY.digest


def test_what_cannot_be_encoded_is_refused() -> None:
    @dataclass(frozen=True)
    class Loose:
        options: object

    with pytest.raises(TypeError, match="frozen dataclass"):
        replace(KEY, config=Loose([1])).digest  # noqa: B018
