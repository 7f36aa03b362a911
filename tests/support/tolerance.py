"""How far a result may lie from the exact one.

fp16, bf16 inputs: the largest error is at most twice that of plain torch attention run in the input dtype, plus 1e-5.
fp32 inputs: 1e-5 of the largest exact value (at least 1). fp64: 1e-10 of it. A result that is kept in a lower dtype
than the inputs, as the gradient of a bf16 sink, has one rounding of its own.
lse: 1e-4 absolute, 1e-9 for fp64. Infinities must match exactly, and a NaN must be a NaN in both.
"""

import torch

Tensor = torch.Tensor

LOW = (torch.float16, torch.bfloat16)
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}


def error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest absolute error over the finite elements."""
    finite = exact.isfinite()
    off = (actual.double() - exact.double())[finite].abs()
    return float(off.max()) if off.numel() else 0.0


def assert_special_values(name: str, actual: Tensor, exact: Tensor) -> None:
    """Assert equal shapes, and infinities and NaN in the same places."""
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)} is not {tuple(exact.shape)}"
    special = ~exact.isfinite()
    torch.testing.assert_close(
        ~actual.isfinite(), special, msg=lambda m: f"{name}: finite elsewhere than the oracle: {m}"
    )
    torch.testing.assert_close(actual.double()[special], exact.double()[special], equal_nan=True, rtol=0, atol=0)


def assert_within(
    name: str,
    actual: Tensor,
    exact: Tensor,
    plain: Tensor | None,
    roundings: float = 0,
    dtype: torch.dtype | None = None,
) -> None:
    """Assert the bound on out or a gradient. `plain` is given for fp16 and bf16 inputs, and for those alone.

    `roundings` of the peak in `dtype` are allowed on top of twice the error of plain attention: in a problem of a few
    numbers that error can be 0 by luck.
    """
    assert_special_values(name, actual, exact)
    values = exact[exact.isfinite()].abs()
    peak = max(1.0, float(values.max()) if values.numel() else 0.0)
    if plain is not None:
        bound = 2 * error(plain, exact) + 1e-5 + roundings * torch.finfo(dtype or actual.dtype).eps * peak
    else:
        bound = RELATIVE.get(actual.dtype, torch.finfo(actual.dtype).eps) * peak
    got = error(actual, exact)
    assert got <= bound, f"{name}: error {got:.3g} exceeds {bound:.3g} ({actual.dtype})"


def assert_lse(actual: Tensor, exact: Tensor) -> None:
    """Assert the bound on lse."""
    assert_special_values("lse", actual, exact)
    got, bound = error(actual, exact), 1e-9 if actual.dtype == torch.float64 else 1e-4
    assert got <= bound, f"lse: error {got:.3g} exceeds {bound:.3g}"
