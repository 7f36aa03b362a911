"""The closed list of operations a score_mod or mask_mod may use.

One table for every backend: an operation is either here, with one meaning, or an error that names it. The CPU runs
the torch operator itself on broadcast tensors; kernels attach their meaning to the same names.

Kinds:
    pointwise   one result per score, from operands of rank 0 (on captured tensors alone: any rank)
    index       reads an element of a captured tensor, by indices that may differ from score to score
    view        rearranges a captured tensor; not allowed on values that differ from score to score
    constant    makes a tensor from a Python number
"""

from __future__ import annotations

POINTWISE = "pointwise"
INDEX = "index"
VIEW = "view"
CONSTANT = "constant"

_POINTWISE = """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar
    neg.default reciprocal.default abs.default sign.default sgn.default square.default
    div.Tensor_mode div.Scalar_mode floor_divide.default floor_divide.Scalar
    remainder.Tensor remainder.Scalar remainder.Scalar_Tensor fmod.Tensor fmod.Scalar
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar sqrt.default rsqrt.default
    exp.default exp2.default expm1.default log.default log2.default log1p.default log10.default
    tanh.default sigmoid.default sin.default cos.default erf.default relu.default softplus.default silu.default
    floor.default ceil.default round.default trunc.default
    maximum.default minimum.default clamp.default clamp.Tensor clamp_min.default clamp_max.default
    clamp_min.Tensor clamp_max.Tensor
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar
    gt.Tensor gt.Scalar ge.Tensor ge.Scalar
    logical_and.default logical_or.default logical_xor.default logical_not.default
    bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar
    bitwise_not.default bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar __lshift__.Scalar __rshift__.Scalar
    isnan.default isinf.default isfinite.default
    where.self masked_fill.Scalar masked_fill.Tensor
    _to_copy.default clone.default detach.default alias.default
    zeros_like.default ones_like.default full_like.default
    tanh_backward.default sigmoid_backward.default threshold_backward.default
"""
_INDEX = "index.Tensor select.int"
_VIEW = """
    t.default transpose.int permute.default view.default reshape.default _unsafe_view.default unsqueeze.default
    squeeze.default squeeze.dim slice.Tensor expand.default
"""
_CONSTANT = """
    scalar_tensor.default full.default zeros.default ones.default new_full.default new_zeros.default new_ones.default
    lift_fresh_copy.default
"""

#: Kind of each operation, by name: "aten.add.Tensor" -> "pointwise".
OPS: dict[str, str] = {
    f"aten.{name}": kind
    for kind, names in ((POINTWISE, _POINTWISE), (INDEX, _INDEX), (VIEW, _VIEW), (CONSTANT, _CONSTANT))
    for name in names.split()
}
