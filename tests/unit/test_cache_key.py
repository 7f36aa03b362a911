"""Digests: each field counts, and the process does not. The memo: a hit never lets through what a miss refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import dispatch
from tilewise.backends.sm90.config import ForwardConfig
from tilewise.compile import memo
from tilewise.compile.folder import portable_digest
from tilewise.compile.key import CompileKey
from tilewise.compile.keytext import from_text, to_text
from tilewise.problem import AttentionProblem, TensorSig
from tilewise.target import Target

SIG = TensorSig("bfloat16", 4, (), True, False)
PROBLEM = AttentionProblem("forward", "bfloat16", 128, 128, False, SIG, SIG, SIG)
KEY = CompileKey("sm90.forward", PROBLEM, ForwardConfig(), Target("sm_90a", "4.8.1"))
SOURCE = Path(tilewise.__file__).parents[1]


def changes(value: object, path: str = ""):
    """Yield (path, copy of the dataclass with that one leaf changed), through nested dataclasses."""
    for f in fields(value):
        old, here = getattr(value, f.name), f"{path}.{f.name}"
        if is_dataclass(old):
            yield from ((p, replace(value, **{f.name: new})) for p, new in changes(old, here))
            continue
        if f.name in ("captures", "broadcast"):
            new = (SIG,) if f.name == "captures" else (1,)
        elif f.name == "block_size":
            new = (128, 64)
        elif old is None:
            new = True if f.name == "pack_gqa" else "x"
        elif isinstance(old, bool):
            new = not old
        else:
            new = old + (1 if isinstance(old, int) else "x")
        yield here, replace(value, **{f.name: new})


CHANGED = dict(changes(KEY))


def test_every_leaf_is_perturbed():
    assert len(CHANGED) == 3 + len(fields(ForwardConfig)) + len(fields(PROBLEM)) - 3 + 3 * len(fields(SIG))


@pytest.mark.parametrize("path", CHANGED)
def test_each_field_changes_the_digest(path):
    assert CHANGED[path].digest != KEY.digest
    assert (portable_digest(CHANGED[path]) == portable_digest(KEY)) == (path == ".target.compiler")


def test_all_digests_differ():
    assert len({k.digest for k in CHANGED.values()} | {KEY.digest}) == len(CHANGED) + 1


def test_the_digest_does_not_depend_on_the_hash_seed():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_cache_key import KEY, portable_digest\n"
        "from tilewise.compile.fingerprint import fingerprint\n"
        "print(KEY.digest, portable_digest(KEY), fingerprint())"
    )
    seen = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": seed}
        seen.add(
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        )
    assert len(seen) == 1 and KEY.digest in seen.pop()


@pytest.mark.parametrize("path", [p for p in CHANGED if p != ".target.compiler"])
def test_a_key_survives_its_text(path):
    key = replace(CHANGED[path], target=Target.of_arch(CHANGED[path].target.arch))
    assert from_text(to_text(key)) == key


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernel":"x"}', to_text(KEY).replace("tilewise.backends", "os")])
def test_other_text_is_no_key(text):
    with pytest.raises(ValueError, match="key: expected"):
        from_text(text)


# ---- memo
@pytest.fixture
def counted(monkeypatch):
    """A backend with a launch to keep, on the CPU; returns how often a launch was planned."""
    planned = []

    class Fake:
        name = "fake"

        def ready(self, x):
            planned.append(x)

            def launch(q, k, v):
                out = dispatch.backend("cpu").forward(x.replace(q=q, k=k, v=v))
                return out

            return launch

    monkeypatch.setattr(
        dispatch,
        "choose_for",
        lambda inputs, direction, *a: Fake() if direction == "forward" else dispatch.backend("cpu"),
    )
    monkeypatch.setattr(memo, "everywhere", True)
    memo.clear()
    yield planned
    memo.clear()


def qkv(n: int = 8, grad: bool = False):
    return [torch.randn(1, n, 2, 16, requires_grad=grad) for _ in range(3)]


def test_a_second_call_plans_nothing(counted):
    for _ in range(3):
        args = qkv()
        got, want = (
            tilewise.flash_attn_func(*args),
            dispatch.backend("cpu").forward(counted[0].replace(q=args[0], k=args[1], v=args[2])),
        )
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert len(counted) == 1


@pytest.mark.parametrize(
    "change",
    [{"causal": True}, {"window_size": (2, 0)}, {"softcap": 2.0}, {"softmax_scale": 0.5}, {"deterministic": True},
     {"pack_gqa": False}, {"num_splits": 2}],
    ids=str,
)  # fmt: skip
def test_each_option_is_a_plan_of_its_own(counted, change):
    args = qkv()
    tilewise.flash_attn_func(*args)
    tilewise.flash_attn_func(*args, **change)
    assert len(counted) == 2


def test_shape_stride_alignment_and_dtype_are_too(counted):
    q, k, v = qkv()
    tilewise.flash_attn_func(q, k, v)
    tilewise.flash_attn_func(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    tilewise.flash_attn_func(torch.randn(257)[1:].view(1, 8, 2, 16), k, v)
    tilewise.flash_attn_func(q[:, :4], k, v)
    tilewise.flash_attn_func(*(t.double() for t in (q, k, v)))
    assert len(counted) == 5


@pytest.mark.parametrize(
    "bad",
    [{"causal": 0}, {"softcap": False}, {"num_splits": True}, {"num_splits": 1.0}, {"deterministic": 0},
     {"window_size": (True, None)}, {"pack_gqa": 1}, {"softmax_scale": True}, {"causal": []}],
    ids=str,
)  # fmt: skip
def test_equal_but_wrong_arguments_are_refused_after_a_hit(counted, bad):
    args = qkv()
    for good in ({}, {"window_size": (1, None)}, {"pack_gqa": True}, {"softmax_scale": 1.0}):
        tilewise.flash_attn_func(*args, **good)
    with pytest.raises(TypeError, match=next(iter(bad))):
        tilewise.flash_attn_func(*args, **bad)


def test_wrong_tensors_are_refused_after_a_hit(counted):
    q, k, v = qkv()
    tilewise.flash_attn_func(q, k, v)
    with pytest.raises(TypeError, match="k: expected dtype"):
        tilewise.flash_attn_func(q, k.double(), v)
    with pytest.raises(ValueError, match="v: expected"):
        tilewise.flash_attn_func(q, k, v[:, :3])


def test_gradients_are_those_of_the_long_way(counted, monkeypatch):
    args = qkv(grad=True)
    found = []
    for fast in (True, True, False):
        monkeypatch.setattr(memo, "everywhere", fast)
        if not fast:
            monkeypatch.setattr(dispatch, "choose_for", lambda *a: dispatch.backend("cpu"))
        out, lse = tilewise.flash_attn_func(*args, causal=True)
        found.append(torch.autograd.grad(out.square().sum() + lse.sum(), args))
    for grads in found[:2]:
        for g, want in zip(grads, found[2], strict=True):
            torch.testing.assert_close(g, want)


def test_transforms_and_modes_take_the_long_way(counted):
    q, k, v = qkv()
    key = (q, k, v, None, False, (None, None), 0.0, 1, None, False, None)
    assert memo.signature(*key) is not None
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        assert memo.signature(*key) is None
    seen = []
    torch.func.vmap(lambda x: seen.append(memo.signature(x, *key[1:])) or x)(q[None])
    assert seen == [None]
