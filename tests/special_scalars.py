"""Numbers that are written down or come with a call: infinities, NaN, -0.0, extremes, NumPy's scalars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from special_values import SIGN_OF_ZERO, assert_special, special_values

from shardfuse import DataType, FusionDefinition
from shardfuse.errors import OperandError
from shardfuse.executor.options import Backend

Number = int | float | bool

LITERALS: tuple[Any, ...] = (
    0.0, -0.0, 0, 1, -1, True, 0.5, 1e308, -1e308, 1e39, 1e-320, 1e-40, 3.4028234663852886e38, math.inf, -math.inf,
    math.nan, 2**63 - 1, -(2**63), 2**24 + 1, np.float64(2.5), np.float64(-0.0), np.float32(1.5), np.float16(0.5),
    np.int64(3), np.int8(-2), np.bool_(True),
)  # fmt: skip
BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "pow",
    "eq",
    "lt",
    "fmod",
    "atan2",
    "copysign",
    "logical_or",
)


def torch_number(value: Any) -> Number:
    return value.item() if isinstance(value, np.generic) else value


def check_literals(name: str, dtype: torch.dtype, backend: Backend, device: str = "cpu") -> None:
    """A float tensor with each literal, on either side: as with a tensor of one element of what the op computes in."""
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan], dtype=dtype, device=device)
    compute = torch.float64 if dtype is torch.float64 or name.startswith("logical") else torch.float32
    with FusionDefinition(backend=backend) as fd:
        t = fd.from_pytorch(x)
        for v in LITERALS:
            fd.add_output(getattr(fd.ops, name)(t, v))
            fd.add_output(getattr(fd.ops, name)(v, t))
    found = iter(fd.execute([x]))
    function = getattr(torch, "true_divide" if name == "div" else name)
    for v in LITERALS:
        number = torch.tensor(torch_number(v), dtype=torch.float64, device=device).to(compute).expand(x.shape)
        for operands in ((x.to(compute), number), (number, x.to(compute))):
            eager = function(*operands)
            eager = eager.to(dtype) if eager.is_floating_point() else eager
            wide = function(*(t.double() for t in operands))
            assert_special(
                f"{name} of {dtype} and {v!r}", next(found), [eager], wide, list(operands),
                roundings=4, signs=name not in SIGN_OF_ZERO, smallest=1e-38,
            )  # fmt: skip


def check_full(dtype: DataType, backend: Backend, device: str = "cpu") -> None:
    x = torch.zeros(3, device=device)
    numbers = [float(v) for v in map(torch_number, LITERALS)]
    if dtype is DataType.BFloat16 and device == "cpu":  # the interpreter rounds its denormals to 0
        numbers = [v for v in numbers if not 0 < abs(v) < 1e-38]
    with FusionDefinition(backend=backend) as fd:
        fd.add_output(fd.ops.neg(fd.from_pytorch(x)))
        for v in numbers:
            fd.add_output(fd.ops.full([3], v, dtype))
    for v, found in zip(numbers, fd.execute([x])[1:], strict=True):
        want = torch.tensor(v, dtype=torch.float64, device=device).to(dtype.torch).expand(3)
        assert_special(f"full {v} in {dtype}", found, [want], want.double(), [x])


def check_complex_numbers(backend: Backend, device: str = "cpu") -> None:
    """Beside real and complex tensors, written down and with a call, also where the type does not hold them."""
    real = torch.tensor([1.0, -0.5, 0.0, 3.0], device=device)
    integers, complex_ones = real.to(torch.int64), torch.complex(real, real.flip(0))
    for x, number in itertools.product((real, integers, complex_ones), (1 + 2j, 1 + 0j, 1e300, 1e300 - 1j)):
        if not x.is_complex() and not isinstance(number, complex):
            continue
        with FusionDefinition(backend=backend) as fd:
            t, s = fd.from_pytorch(x), fd.define_scalar(dtype=DataType.ComplexDouble)
            for n in (number, s):
                for name in ("eq", "ne", "add", "mul", "div", "logical_and"):
                    fd.add_output(getattr(fd.ops, name)(t, n))
                fd.add_output(fd.ops.where(fd.ops.ne(t, 0.0), t, n))
        found = fd.execute([x, complex(number)])
        tensor = torch.tensor(number, dtype=torch.complex128, device=device).to(torch.complex64).expand(4)
        left = x.to(torch.complex64)
        wanted = [f(left, tensor) for f in (torch.eq, torch.ne, torch.add, torch.mul, torch.div, torch.logical_and)]
        for got, want in zip(found, 2 * [*wanted, torch.where(x != 0, left, tensor)], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)


def check_fills(backend: Backend, device: str = "cpu") -> None:
    """What stands beside or in a tensor is rounded to its type as by a cast, by torch's calls too."""
    for dtype, number in itertools.product((torch.float32, torch.bfloat16, torch.complex64), (1e300, -1e300, 0.1)):
        x = torch.zeros(4, dtype=dtype, device=device)
        index = torch.tensor([2], device=device)
        with FusionDefinition(backend=backend) as fd:
            t, i = fd.from_pytorch(x), fd.from_pytorch(index)
            fd.add_output(fd.ops.pad(t, [1, 0], number))
            fd.add_output(fd.ops.scatter(t, i, number, 0))
            fd.add_output(fd.ops.full([5], number, DataType.from_torch(dtype)))
        padded, scattered, full = fd.execute([x, index])
        value = torch.tensor(number, dtype=torch.float64, device=device).to(dtype)
        zeros = [0, 0, 0, 0]
        for got, want in ((padded, [value, *zeros]), (scattered, [0, 0, value, 0]), (full, 5 * [value])):
            assert got.dtype == dtype
            assert got.tolist() == [float(v) if v is not value else value.item() for v in want]


# --- numbers that come with a call -------------------------------------------------------------------------

ARGUMENTS: tuple[Any, ...] = (
    0.5, 0.0, -0.0, math.nan, math.inf, -math.inf, 3.0, -1e30, 1e-40, np.float64(0.5), np.float64(-0.0), True, 3,
    np.int64(3), np.float32(0.5), np.bool_(False),
)  # fmt: skip


def _softmax(ops: Any, x: Any, s: Any) -> Any:
    y = ops.mul(x, s)
    e = ops.exp(ops.sub(y, ops.max(y, [1], keepdim=True)))
    return ops.truediv(e, ops.sum(e, [1], keepdim=True))


WITH_SCALAR: dict[str, tuple[Callable[[Any, Any, Any], Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "mul": (lambda o, x, s: o.mul(x, s), lambda x, s: x * s),
    "of a negative": (lambda o, x, s: o.mul(x, o.neg(s)), lambda x, s: x * -s),
    "logical_and": (lambda o, x, s: o.logical_and(x, s), torch.logical_and),
    "logical_or": (lambda o, x, s: o.logical_or(x, s), torch.logical_or),
    "logical_xor": (lambda o, x, s: o.logical_xor(s, x), torch.logical_xor),
    "logical_not": (lambda o, x, s: o.logical_and(x, o.logical_not(s)), lambda x, s: x.bool() & ~s.bool()),
    "any": (lambda o, x, s: o.any(o.logical_and(x, s), [1]), lambda x, s: torch.logical_and(x, s).any(1)),
    "where": (lambda o, x, s: o.where(s, x, -0.0), lambda x, s: torch.where(s.bool(), x, -0.0)),
    "gt": (lambda o, x, s: o.gt(x, s), torch.gt),
    "softmax": (_softmax, lambda x, s: (x * s).softmax(1)),
    "full": (lambda o, x, s: o.add(o.full([2, 9], s, DataType.Float), x), lambda x, s: s + x),
    "times infinity": (lambda o, x, s: o.add(x, o.mul(s, math.inf)), lambda x, s: x + s * math.inf),
    "plus NaN": (lambda o, x, s: o.logical_or(x, o.isnan(o.add(s, math.nan))), lambda x, s: x.bool() | True),
    "threshold": (lambda o, x, s: o.threshold(x, s, s), lambda x, s: torch.where(x <= s, s, x)),
    "addcmul": (lambda o, x, s: o.addcmul(x, x, x, s), lambda x, s: x + s * (x * x)),
}


def check_scalars(name: str, backend: Backend, device: str = "cpu") -> None:
    """One definition, called with each number."""
    build, reference = WITH_SCALAR[name]
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 0.5, 104.0], device=device)
    x = torch.stack([x, torch.linspace(-3, 3, 9, device=device)])
    with FusionDefinition(backend=backend) as fd:
        t, s = fd.from_pytorch(x), fd.define_scalar(dtype=DataType.Double)
        fd.add_output(build(fd.ops, t, s))
    for v in ARGUMENTS:
        if device == "cuda" and name == "softmax" and abs(float(v)) > 1e5:
            continue  # a product that is contracted with the difference: docs/reliability.md, Numerics
        number = torch.tensor(float(v), dtype=torch.float64, device=device)
        eager, wide = reference(x, number.float()), reference(x.double(), number.float().double())
        (found,) = fd.execute([x, v])
        assert_special(f"{name} with {v!r}", found, [eager], wide, [number.expand(found.shape)], roundings=16)


NARROW = {
    DataType.Int32: (2**31, 2**40),
    DataType.Int8: (128, -200),
    DataType.UInt8: (256, -256),
    DataType.Int16: (-(2**15) - 1,),
}
"""Types of integers, and integers that each does not hold (negative ones wrap in an unsigned type)."""
_WITH_INTEGER: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda o, x, n: o.add(x, n),
    "lt": lambda o, x, n: o.lt(n, x),
    "where": lambda o, x, n: o.where(o.ne(x, 0), x, n),
    "clamp": lambda o, x, n: o.clamp(x, n, None),
    "full": lambda o, x, n: o.add(x, o.full([3], n, x.dtype)),
    "pad": lambda o, x, n: o.pad(x, [1, 0], n),
}
_COMES: dict[str, Callable[[Any, int], tuple[Any, list[int]]]] = {
    "constant": lambda fd, v: (v, []),
    "argument": lambda fd, v: (fd.define_scalar(dtype=DataType.Int), [v]),
    "computed": lambda fd, v: (fd.ops.add(fd.define_scalar(dtype=DataType.Int), 1), [v - 1]),
}


def check_integers_beyond(backend: Backend) -> None:
    """Refused wherever they come from, in the first call and behind one that was right; nothing is written."""
    for dtype, (name, build), (how, come) in itertools.product(NARROW, _WITH_INTEGER.items(), _COMES.items()):
        x = torch.tensor([0, 1, 2]).to(dtype.torch)
        for v in NARROW[dtype]:
            with FusionDefinition(backend=backend) as fd:
                t = fd.from_pytorch(x)
                number, arguments = come(fd, v)
                if how == "constant":
                    with pytest.raises(OperandError, match=f"ops.* is {v}, expected a number that {dtype.name}"):
                        build(fd.ops, t, number)
                    continue
                fd.add_output(build(fd.ops, t, number))
                fd.add_output(fd.ops.neg(t), alias_input=t)
            fits = [5 - v + n for n in arguments]
            for _ in range(2):
                with pytest.raises(
                    OperandError, match=rf"S\d+, is {v}, expected an integer that {dtype.name}"
                ) as found:
                    fd.execute([x, *arguments])
                assert f"{__file__.rpartition('/')[2]}:" in str(found.value), (name, how)
                assert x.tolist() == [0, 1, 2]
                fd.execute([x, *fits])
                torch.testing.assert_close(x, torch.tensor([0, -1, -2]).to(dtype.torch))
                x = torch.tensor([0, 1, 2]).to(dtype.torch)


def check_integers_at_the_ends(backend: Backend) -> None:
    """Those that a type just holds, and negative ones of an unsigned type, are torch's."""
    for dtype, come in itertools.product(NARROW, _COMES.values()):
        info = torch.iinfo(dtype.torch)
        x = torch.tensor([info.min, 0, 1, info.max]).to(dtype.torch)
        for v in (info.min or -info.max, -1 if info.min else -3, info.max):
            with FusionDefinition(backend=backend) as fd:
                t = fd.from_pytorch(x)
                number, arguments = come(fd, v)
                for name in ("add", "mul", "lt", "eq", "maximum"):
                    fd.add_output(getattr(fd.ops, name)(t, number))
            one = torch.tensor(v).to(dtype.torch).expand(4)
            wanted = [x + one, x * one, x < one, x == one, torch.maximum(x, one)]
            for got, want in zip(fd.execute([x, *arguments]), wanted, strict=True):
                assert got.dtype == want.dtype
                assert got.tolist() == want.tolist(), (dtype, v)


# --- tensors whose storage holds something else ------------------------------------------------------------


def check_lazy_bits(backend: Backend, device: str = "cpu") -> None:
    """The negative and the conjugate bit, which a kernel would not see."""
    g = torch.Generator().manual_seed(0)
    c = torch.complex(torch.randn(4, 8, generator=g), torch.randn(4, 8, generator=g)).to(device)
    plain = special_values(torch.float32).to(device)
    lazy = [c.conj().imag, torch._neg_view(plain), torch._neg_view(plain[::2])]
    for x in lazy:
        assert x.is_neg()
        with FusionDefinition(backend=backend) as fd:
            t = fd.from_pytorch(x)
            fd.add_output(fd.ops.neg(t))
            fd.add_output(fd.ops.add(t, 1.0))
        negative, more = fd.execute([x])
        here = x.resolve_neg()
        assert_special("neg", negative, [-here], -here.double(), [here])
        assert_special("add", more, [here + 1], here.double() + 1, [here], roundings=1)
    for x in (torch.conj(c), c.conj().t()):
        assert x.is_conj()
        with FusionDefinition(backend=backend) as fd:
            t = fd.from_pytorch(x)
            fd.add_output(fd.ops.mul(t, t))
            fd.add_output(fd.ops.imag(t))
        product, imaginary = fd.execute([x])
        here = x.resolve_conj()
        torch.testing.assert_close(product, here * here)
        assert torch.equal(imaginary, here.imag)
