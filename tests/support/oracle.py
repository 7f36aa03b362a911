"""The oracle: the reference in fp64 on the same rounded inputs, and comparisons with it."""

from typing import NamedTuple

import torch

from tilewise.backends.base import Backend
from tilewise.backends.cpu.reference import ReferenceBackend
from tilewise.problem import AttentionInputs, Gradients

from .cases import gradients_of, unused_rows
from .tolerance import LOW, assert_lse, assert_within

Tensor = torch.Tensor


class Result(NamedTuple):
    """What one call gives: out, lse, and the gradients."""

    out: Tensor
    lse: Tensor
    grads: Gradients


class _Plain(AttentionInputs):
    """A call of which the reference computes every step in the dtype of the inputs, as plain torch attention does."""

    @property
    def lse_dtype(self) -> torch.dtype:
        return self.q.dtype


def run(
    backend: Backend,
    x: AttentionInputs,
    dout: Tensor | None,
    dlse: Tensor | None,
    needs: tuple[bool, ...] | None = None,
) -> Result:
    """Return forward and backward of one call."""
    out, lse = backend.forward(x)
    return Result(out, lse, backend.backward(x, dout, dlse, out, lse, everything(x) if needs is None else needs))


def everything(x: AttentionInputs) -> tuple[bool, ...]:
    """Return `needs` that ask for every gradient there is."""
    return True, True, True, x.sink is not None, *(t.is_floating_point() for t in x.score_captures)


def exact(x: AttentionInputs, dout: Tensor | None, dlse: Tensor | None) -> Result:
    """Return the call in fp64."""
    up = {name: t.double() for name, t in x.tensors().items() if t.is_floating_point()}
    captures = tuple(t.double() if t.is_floating_point() else t for t in x.score_captures)
    grads = (None if g is None else g.double() for g in (dout, dlse))
    return run(ReferenceBackend(), x.replace(**up, score_captures=captures), *grads)


def plain(x: AttentionInputs, dout: Tensor | None, dlse: Tensor | None) -> Result:
    """Return the call with every step in the dtype of its inputs."""
    return run(ReferenceBackend(), _Plain(**vars(x)), dout, dlse)


def check(
    backend: Backend,
    x: AttentionInputs,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    with_lse_gradient: bool = True,
    roundings: float = 0,
) -> Result:
    """Run forward and backward, compare both with the oracle, and return them. `roundings` as in `assert_within`.

    Also asserts that unused rows of out, lse and the gradients hold exactly 0 and -inf.
    """
    if dout is None and dlse is None:
        dout, dlse = gradients_of(x, lse=with_lse_gradient)
    got, want = run(backend, x, dout, dlse), exact(x, dout, dlse)
    coarse = plain(x, dout, dlse) if x.q.dtype in LOW else None
    assert got.out.dtype == x.q.dtype and got.lse.dtype == x.lse_dtype
    slack = roundings, x.q.dtype
    assert_within("out", got.out, want.out, coarse and coarse.out, *slack)
    assert_lse(got.lse, want.lse)
    for name in ("q", "k", "v", "sink"):
        _compare(f"d{name}", *(r and getattr(r.grads, name) for r in (got, want, coarse)), *slack)
    for i in range(len(x.score_captures)):
        _compare(f"dcapture[{i}]", *(r and r.grads.score_captures[i] for r in (got, want, coarse)), *slack)
    assert_unused_rows(x, got)
    return got


def _compare(
    name: str, actual: Tensor | None, want: Tensor | None, coarse: Tensor | None, roundings: float, dtype: torch.dtype
) -> None:
    assert (actual is None) == (want is None), f"{name}: a gradient in one of backend and oracle only"
    if actual is not None and want is not None:
        assert_within(name, actual, want, coarse, roundings, dtype)


def assert_unused_rows(x: AttentionInputs, got: Result) -> None:
    """Assert that slots of no sequence hold out 0, lse -inf, gradients 0."""
    off_q, off_k = unused_rows(x)
    assert (got.out[off_q] == 0).all() and (got.lse.mT[off_q] == -torch.inf).all()
    for grad, off in ((got.grads.q, off_q), (got.grads.k, off_k), (got.grads.v, off_k)):
        assert grad is None or (grad[off] == 0).all()
