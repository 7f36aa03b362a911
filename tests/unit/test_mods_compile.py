"""Mods inside torch.compile and torch.export: captured tensors stay live inputs, numbers are guarded."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise.mods as mods
from tilewise.mods.trace import lookup, trace


def _apply(x, digest, captures):
    return lookup(digest).apply_score(x, *map(torch.arange, x.shape), captures)


@torch.library.custom_op("tilewise_test::modified", mutates_args=())
def modified(x: torch.Tensor, digest: str, captures: list[torch.Tensor]) -> torch.Tensor:
    """Stands for attention: finds the modifier by digest and applies it to `x` as scores."""
    return _apply(x, digest, captures).clone()


@modified.register_fake
def _(x, digest, captures):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    x, ctx.digest, captures = inputs
    ctx.save_for_backward(x, *captures)


def _backward(ctx, grad):
    with torch.enable_grad():
        x, *captures = (t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors)
        gradients = torch.autograd.grad(_apply(x, ctx.digest, captures), (x, *captures), grad)
    return gradients[0], None, list(gradients[1:])


modified.register_autograd(_backward, setup_context=_setup)


def use(x, fn, aux=None):
    modifier, captures = trace(fn, "score", aux)
    return modified(x, modifier.digest, list(captures))


TABLE = torch.randn(3)
TRACED = mods.score_mod(lambda s, b, h, q, k: s + TABLE[h] * (q - k))
SCALE = 2.0


def make(w, t):
    return lambda s, b, h, q, k: s * w + t[h] * (q - k) + TABLE[h] * SCALE


def from_outside(x, t, w):
    return use(x, make(w, t))


def defined_inside(x, t, w):
    def mod(s, b, h, q, k):
        return s * w + t[h] * (q - k) + TABLE[h] * SCALE

    return use(x, mod)


def computed_inside(x, t, w):
    t = torch.exp(t) + 1
    return use(x, lambda s, b, h, q, k: s * w + t[h])


def aux(x, t, w):
    return use(x, lambda s, b, h, q, k, tensors: s * w + tensors[0][h] + tensors[1][h], [t, TABLE])


def in_place(x, t, w):
    def mod(s, b, h, q, k):
        s.mul_(w)
        s += t[h]
        return s

    return use(x, mod)


def traced(x, t, w):
    return use(x * w + t[None, :, None, None], TRACED)


FUNCTIONS = [from_outside, defined_inside, computed_inside, aux, in_place, traced]


def compiled(fn, backend="aot_eager", **kw):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=counter, **kw), counter


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_compiled_equals_eager_with_gradients_of_captured_tensors(fn):
    run, counter = compiled(fn)
    for _ in range(3):  # new tensors, same graph
        x, t = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(3, requires_grad=True)
        out, want = run(x, t, 2.0), fn(x, t, 2.0)
        torch.testing.assert_close(out, want)
        grad = torch.randn_like(out)
        torch.testing.assert_close(torch.autograd.grad(out, (x, t), grad), torch.autograd.grad(want, (x, t), grad))
    assert counter.frame_count == 1


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_changes_are_seen_without_a_stale_graph(fn):
    run, _ = compiled(fn)
    x, t = torch.randn(2, 3, 4, 5), torch.randn(3)
    for w in (2.0, 3.0, 4.0, 2.0):
        torch.testing.assert_close(run(x, t, w), fn(x, t, w))
    before = TABLE.clone()
    try:
        TABLE.mul_(2)
        torch.testing.assert_close(run(x, t, 2.0), fn(x, t, 2.0))
        globals()["SCALE"] = 5.0
        torch.testing.assert_close(run(x, t, 2.0), fn(x, t, 2.0))
    finally:
        TABLE.copy_(before)
        globals()["SCALE"] = 2.0


def _by_row(x, t):
    return use(x, lambda s, b, h, q, k: s + t[q] * SCALE)


def _by_size(x, t):
    return use(x, lambda s, b, h, q, k: s + t.shape[0])


def _by_view(x, t):
    return use(x, lambda s, b, h, q, k: s + t.view(-1, 1)[q, 0])


@pytest.mark.parametrize("fn, graphs", [(_by_row, 1), (_by_size, 5), (_by_view, 5)])
def test_new_lengths_compile_again_only_if_the_mod_reads_them(fn, graphs):
    run, counter = compiled(fn, "eager", dynamic=True)
    for n in (6, 7, 8, 9, 10):
        x, t = torch.randn(2, 3, n, 5), torch.randn(n)
        torch.testing.assert_close(run(x, t), fn(x, t))
    assert counter.frame_count == graphs


def test_a_mask_inside():
    def fn(x, ids):
        modifier, captures = trace(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), "mask")
        return x * len(modifier.digest), captures[0] + 1

    run, _ = compiled(fn)
    torch.testing.assert_close(run(torch.ones(2), torch.tensor([1, 2])), (torch.full((2,), 64.0), torch.tensor([2, 3])))


class Biased(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(3))
        self.scale = 2.0

    def forward(self, x):
        def mod(s, b, h, q, k):
            return s * self.scale + self.bias[h] * (q - k) + TABLE[h]

        return use(x, mod)


def test_a_module_attribute():
    module = Biased()
    run, counter = compiled(module)
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(run(x), module(x))
    run(x).sum().backward()
    got, module.bias.grad = module.bias.grad, None
    module(x).sum().backward()
    torch.testing.assert_close(got, module.bias.grad)
    with torch.no_grad():
        module.bias.mul_(3)
    torch.testing.assert_close(run(x), module(x))
    assert counter.frame_count == 1
    module.scale = 0.5
    torch.testing.assert_close(run(x), module(x))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    module, x = Biased(), torch.randn(2, 3, 4, 5)
    program = torch.export.export(module, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), module(x))
    assert "bias" in str(program.graph_signature.parameters)


def test_a_torch_that_does_not_fit_is_told_the_public_way(monkeypatch):
    import tilewise.mods.dynamo as module

    def missing():
        raise ImportError("cannot import name 'speculate_subgraph'")

    torch._dynamo.reset()
    monkeypatch.setattr(module, "_variable_class", missing)
    monkeypatch.delitem(
        torch._dynamo.variables.higher_order_ops._hop_name_to_variable_class, module._NAME, raising=False
    )
    run, _ = compiled(defined_inside)
    with pytest.raises(Exception, match=r"outside the compiled region with tilewise\.mods\.score_mod\(fn\)"):
        run(torch.randn(2, 3, 4, 5), torch.randn(3), 2.0)
    torch.testing.assert_close(
        compiled(traced)[0](torch.ones(1, 3, 1, 1), TABLE, 2.0), traced(torch.ones(1, 3, 1, 1), TABLE, 2.0)
    )


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_derivative_of_ones_own_is_refused_not_dropped():
    run, _ = compiled(lambda x: use(x, lambda s, b, h, q, k: _StraightThrough.apply(s)))
    with pytest.raises(Exception, match=r"score_mod: .*got a torch\.autograd\.Function"):
        run(torch.randn(1, 1, 2, 2, requires_grad=True))
