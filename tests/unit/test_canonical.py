"""The canonical encoding: equal for equal meaning, different for different, the same in every process."""

import math
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum, IntEnum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.canonical import digest, encode
from tilewise.problem import AttentionProblem, TensorSig


class Color(Enum):
    RED = 1
    BLUE = 2


class Size(IntEnum):
    RED = 1


@dataclass(frozen=True)
class Point:
    x: object
    y: object = 0


@dataclass(frozen=True)
class Pair:
    x: object
    y: object = 0


DIFFERENT = [
    *(None, True, False, 0, 1, -1, 10**30, 0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 5e-324),
    *(
        "",
        "1",
        "N",
        "(i1)",
        "s1:1",
        (),
        (None,),
        (1,),
        ("1",),
        (1, 2),
        ((1,), 2),
        (1, (2,)),
        ("i1,i2",),
        ("a", "b"),
        ("a,s1:b",),
    ),
    *(Color.RED, Color.BLUE, Size.RED, torch.float32, torch.bfloat16, torch.int64, "float32"),
    *(Point(1), Point(1.0), Point(1, 1), Pair(1), Point((1, 0)), Point(None), Point(Point(1)), Point("1,y=i0")),
]


def test_different_values_have_different_texts():
    texts = [encode(v) for v in DIFFERENT]
    assert len(set(texts)) == len(texts)
    assert len({digest(v) for v in DIFFERENT}) == len(texts)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(list(Color) + [torch.float16]),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.builds(Point, inner, inner),
    max_leaves=8,
)


def same(x, y):
    """Equality by type and meaning, written independently of the encoder."""
    if type(x) is not type(y):
        return False
    if isinstance(x, float):
        return (math.isnan(x) and math.isnan(y)) or (x == y and math.copysign(1, x) == math.copysign(1, y))
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, Point):
        return same((x.x, x.y), (y.x, y.y))
    return x == y


@given(_VALUES, _VALUES)
def test_texts_are_equal_exactly_for_equal_values(x, y):
    assert (encode(x) == encode(y)) == same(x, y)


@dataclass
class Mutable:
    x: int = 0


class Named(str):
    pass


@pytest.mark.parametrize(
    "value, name",
    [
        ([1], "builtins.list"),
        ({"a": 1}, "builtins.dict"),
        ({1}, "builtins.set"),
        (b"1", "builtins.bytes"),
        (1j, "builtins.complex"),
        (Mutable(), "Mutable"),
        (Named("a"), "Named"),
        (torch.zeros(1), "torch.Tensor"),
        (torch.Size([1]), "torch.Size"),
        (torch.device("cpu"), "torch.device"),
        (len, "builtin_function_or_method"),
        (int, "builtins.type"),
        (object(), "builtins.object"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: (1, v), Point], ids=["bare", "in a tuple", "in a dataclass"])
def test_anything_else_is_refused_by_name(value, name, wrap):
    with pytest.raises(TypeError, match=rf"value: expected None, bool, .*, got .*{name}"):
        encode(wrap(value))


def test_every_field_of_a_problem_counts():
    sig = TensorSig("bfloat16", 4, (), True, False)
    base = AttentionProblem("forward", "bfloat16", 128, 128, False, sig, sig, sig)
    changes = {
        "direction": "backward",
        "dtype": "float16",
        "q": TensorSig("bfloat16", 4, (0,), True, False),
        "sink": "float32",
        "captures": (sig,),
        "block_size": (128, 64),
        "pack_gqa": False,
        "left": True,
        "score_mod": "0" * 64,
        "mask_mod": "0" * 64,
    }
    digests = {digest(AttentionProblem(**{**base.__dict__, name: value})) for name, value in changes.items()}
    assert len(digests | {digest(base)}) == len(changes) + 1
    assert digest(base) == digest(AttentionProblem(**base.__dict__))


def test_the_digest_does_not_depend_on_the_process():
    program = (
        "from tilewise.canonical import digest; from tilewise.problem import TensorSig\n"
        "print(digest((None, True, 3, -0.5, 'text', TensorSig('bfloat16', 4, (1, 2), True, False))), end='')"
    )
    environments = [{"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)} for seed in ("0", "4242")]
    command = [sys.executable, "-c", program]
    seen = {subprocess.run(command, env=e, capture_output=True, text=True, check=True).stdout for e in environments}
    assert seen == {digest((None, True, 3, -0.5, "text", TensorSig("bfloat16", 4, (1, 2), True, False)))}
