"""What torch has for each pointwise op, written down for tests: not the table that shardfuse runs by.

Most ops have the name of torch's function. ``TYPES`` says of each op on which types torch has it: tests compare it with
the types that they find, so that no op and no type is dropped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

Kind = Literal["same", "float", "test", "logical", "where", "real", "complex", "step"]
"""What becomes of operands.

same: they are promoted; float: integers become float32; test: the result has one type for all; logical: they become
bool; where: the first is a bool; real: complex numbers give real ones; complex: they are the parts of a complex number;
step: the result is the next number of the type itself.
"""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
NUMBERS = (*FLOATS, *INTEGERS)
ALL = (*NUMBERS, torch.bool)


@dataclass(frozen=True)
class Reference:
    """``call`` on tensors; on operands of ``types`` torch has the op, on others it does not."""

    call: Callable[..., torch.Tensor]
    kind: Kind
    types: tuple[torch.dtype, ...]


def _by_name(names: str, kind: Kind, types: tuple[torch.dtype, ...]) -> dict[str, Reference]:
    return {name: Reference(getattr(torch, name), kind, types) for name in names.split()}


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return functional.softplus(x, beta=1, threshold=20)


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    """As torch's gradient, whose ``1 + erf`` keeps no digits where x is negative, has it by ``erfc``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    density = (-(wide**2) / 2).exp() / math.sqrt(2 * math.pi)
    found = torch.erfc(-wide * math.sqrt(0.5)) / 2 + wide * density
    return found.to(x.dtype if x.is_floating_point() else torch.float32)


def _imag(x: torch.Tensor) -> torch.Tensor:
    return x.imag if x.is_complex() else torch.zeros_like(x)


def _shifted_with_zeros(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Python's integers: as if ``x`` were unsigned; beyond the bits of the type nothing is left."""
    both = torch.broadcast_tensors(x, n)
    dtype = torch.result_type(x, n)
    if dtype not in INTEGERS:
        raise TypeError(f"{dtype} has no bits to shift")
    bits = 8 * dtype.itemsize
    found = [
        0 if k < 0 else (int(v) % (1 << bits)) >> int(k)
        for v, k in zip(*(t.flatten().tolist() for t in both), strict=True)
    ]
    signed = [v - (1 << bits) if dtype is not torch.uint8 and v >> (bits - 1) else v for v in found]
    return torch.tensor(signed, dtype=dtype, device=x.device).reshape(both[0].shape)


def _philox_uniform(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Element by element in Python's integers, as ``triton.language.random`` has it."""
    both = torch.broadcast_tensors(seed, index)
    if seed.is_floating_point() or index.is_floating_point():
        raise TypeError("keys and counters are integers")
    found = [
        _first_word(int(k) % (1 << 64), int(i) % (1 << 32))
        for k, i in zip(*(t.flatten().tolist() for t in both), strict=True)
    ]
    folded = [w if w < 1 << 31 else (1 << 32) - 1 - w for w in found]
    scale = torch.tensor(4.6566127342e-10, dtype=torch.float32)
    return (torch.tensor(folded, dtype=torch.int32, device=seed.device).float() * scale).reshape(both[0].shape)


def _first_word(seed: int, index: int) -> int:
    """Of Philox 4x32-10, for the counter (index, 0, 0, 0)."""
    c, k = [index, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As torch's GPU kernel and its scalars on a CPU; its vectors there fuse a product and a sum that may overflow."""
    apart = torch.sub(end, start)
    from_end = torch.sub(end, torch.mul(apart, torch.rsub(weight, 1)))
    return torch.where(torch.lt(torch.abs(weight), 0.5), torch.add(start, torch.mul(weight, apart)), from_end)


def _threshold(x: torch.Tensor, bound: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.le(x, bound), value, x)


def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.add(x, torch.mul(value, torch.mul(a, b)))


def _erfcinv(x: torch.Tensor) -> torch.Tensor:
    """Of a small x 1 - x has lost it: by torch's other inverse, of the normal distribution's integral."""
    kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    root = math.sqrt(2)
    found = torch.where(x == 1, 0.0, torch.special.ndtri(x.double() / 2) / -root)
    return found.to(kind)


REFERENCES: dict[str, Reference] = {
    **_by_name("neg relu floor ceil trunc round", "same", NUMBERS),
    **_by_name("abs", "real", NUMBERS),
    **_by_name("real", "real", ALL),
    **_by_name("square add mul maximum minimum", "same", ALL),
    **_by_name("frac", "same", FLOATS),
    **_by_name("sub fmod remainder pow", "same", NUMBERS),
    **_by_name("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid", "float", ALL),
    **_by_name("sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh", "float", ALL),
    **_by_name("erf erfc erfinv lgamma digamma atan2 copysign", "float", ALL),
    **_by_name("hypot", "float", FLOATS),
    **_by_name("isnan isinf isfinite isposinf isneginf isreal signbit eq ne lt le gt ge", "test", ALL),
    **_by_name("logical_not logical_and logical_or logical_xor", "logical", ALL),
    **_by_name("bitwise_not bitwise_and bitwise_or bitwise_xor", "same", (*INTEGERS, torch.bool)),
    **_by_name("gcd bitwise_left_shift bitwise_right_shift", "same", INTEGERS),
    **_by_name("nextafter", "step", FLOATS),
    **_by_name("where", "where", ALL),
    **_by_name("complex", "complex", FLOATS[:2]),
    "sign": Reference(torch.sgn, "same", ALL),
    "conj": Reference(lambda x: torch.conj(x).resolve_conj(), "same", ALL),
    "imag": Reference(_imag, "real", ALL),
    "erfcinv": Reference(_erfcinv, "float", ALL),
    "silu": Reference(functional.silu, "float", FLOATS),
    "gelu": Reference(functional.gelu, "float", FLOATS),
    "gelu_slope": Reference(_gelu_slope, "float", ALL),
    "gelu_tanh": Reference(lambda x: functional.gelu(x, approximate="tanh"), "float", FLOATS),
    "softplus": Reference(_softplus, "float", FLOATS),
    "div": Reference(torch.div, "float", ALL),
    "trunc_div": Reference(lambda a, b: torch.div(a, b, rounding_mode="trunc"), "same", NUMBERS),
    "floor_div": Reference(lambda a, b: torch.div(a, b, rounding_mode="floor"), "same", NUMBERS),
    "logical_right_shift": Reference(_shifted_with_zeros, "same", INTEGERS),
    "philox_uniform": Reference(_philox_uniform, "test", (*INTEGERS, torch.bool)),
    "lerp": Reference(_lerp, "same", NUMBERS),
    "threshold": Reference(_threshold, "same", ALL),
    "addcmul": Reference(_addcmul, "same", ALL),
}
