"""tilewise inside PyTorch's machinery."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilewise


def qkv(s=33, dtype=torch.float32, grad=True):
    torch.manual_seed(0)
    return [torch.randn(2, s, 4, 16, dtype=dtype, requires_grad=grad) for _ in range(3)]


def test_gradcheck():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: tilewise.flash_attn_func(q, k, v, causal=True, learnable_sink=s), (q, k, v, sink)
    )


def test_compile_five_lengths_one_graph():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: tilewise.flash_attn_func(q, k, v, causal=True)[0] * 2,
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for s in (17, 33, 64, 100, 128):
        x = qkv(s)
        got, want = compiled(*x), tilewise.flash_attn_func(*x, causal=True)[0] * 2
        assert torch.equal(got, want)
        for a, b in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x), strict=True):
            # The compiled graph hands the backward a dense gradient where eager has an expanded one.
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return tilewise.flash_attn_func(q, k, v, causal=True)[0]

    x = qkv(grad=False)
    program = torch.export.export(Attention(), tuple(x))
    assert torch.equal(program.module()(*x), tilewise.flash_attn_func(*x, causal=True)[0])


def test_opcheck():
    q, k, v = qkv(grad=False)
    call = (q, k, v, None, [None] * 5, [], [], 0.25, 0.0, None, 0, None, None, 1, ";;;;0;")
    torch.library.opcheck(torch.ops.tilewise.forward.default, call)
    out, lse = torch.ops.tilewise.forward(*call)
    torch.library.opcheck(torch.ops.tilewise.backward.default, (*call, out, None, out, lse, [True] * 4))


def test_autocast_casts_to_its_dtype():
    x = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = tilewise.flash_attn_func(*x)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in x)


def test_checkpoint_and_saved_tensor_hooks():
    x = qkv()
    want = torch.autograd.grad(tilewise.flash_attn_func(*x)[0].sum(), x)
    got = torch.autograd.grad(checkpoint(tilewise.flash_attn_func, *x, use_reentrant=False)[0].sum(), x)
    with torch.autograd.graph.save_on_cpu():
        kept = torch.autograd.grad(tilewise.flash_attn_func(*x)[0].sum(), x)
    for a, b, c in zip(want, got, kept, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize(
    "options, pairs", [({}, 33 * 33), ({"causal": True}, 33 * 34 // 2), ({"window_size": (3, 0)}, 33 * 4 - 6)]
)
def test_flops_count_visible_pairs(options, pairs):
    x = qkv()
    with FlopCounterMode(display=False) as counter:
        tilewise.flash_attn_func(*x, **options)[0].sum().backward()
    assert counter.get_total_flops() == 2 * 4 * pairs * 2 * (32 + 80)


def test_double_backward_is_an_error():
    x = qkv()
    (dq,) = torch.autograd.grad(tilewise.flash_attn_func(*x)[0].sum(), x[0], create_graph=True)
    with pytest.raises(tilewise.DoubleBackwardError, match="double backward"):
        dq.sum().backward()


def test_meta():
    out, lse = tilewise.flash_attn_func(*(torch.empty(2, 5, 4, 16, device="meta") for _ in range(3)))
    assert out.is_meta and out.shape == (2, 5, 4, 16) and lse.shape == (2, 4, 5)
