"""Random numbers as Triton text: the words of ``ops.random``, hence the same numbers.

A uniform number is bit for bit torch's.  A normal one is as near to it as logarithms and cosines are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from ..ir.dtype import DataType
from ..ir.expr import Expr
from ..ir.op import RandomKind
from ..ir.scalar import Scalar
from ..ops.random import BITS, below
from . import narrow
from .arithmetic import literal

_PHILOX = '''@triton.jit
def philox(seed, offset, index):
    """Philox 4x32-10: four random words for the key ``seed`` and the counter ``(index, offset)``."""
    seed, offset = tl.full([], seed, tl.int64), tl.full([], offset, tl.int64)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    c2, c3 = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32)
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3
'''
"""One 64-bit product for what ``tl.philox`` takes two instructions for."""
_FRACTION = '''@triton.jit
def fraction(high, low):
    """In [0, 1), of 53 bits of two words."""
    bits = (high.to(tl.uint64) << 21) | (low >> 11).to(tl.uint64)
    return bits.to(tl.float64) * tl.full([], 1.1102230246251565e-16, tl.float64)
'''
_UNIFORM = '''@triton.jit
def uniform(seed, offset, index, BITS: tl.constexpr):
    """In [0, 1), of as many bits as the type holds below 1."""
    word, _, _, _ = philox(seed, offset, index)
    return (word >> (32 - BITS)).to(tl.float32) * (1.0 / (1 << BITS))
'''
_UNIFORM_DOUBLE = '''@triton.jit
def uniform_double(seed, offset, index):
    """In [0, 1)."""
    high, low, _, _ = philox(seed, offset, index)
    return fraction(high, low)
'''
_NORMAL = '''@triton.jit
def normal(seed, offset, index):
    """Mean 0, deviation 1, by Box and Muller."""
    u, v, _, _ = philox(seed, offset, index)
    u = (u >> 8).to(tl.float32) * 5.960464477539063e-08
    v = (v >> 8).to(tl.float32) * 5.960464477539063e-08
    return tl.sqrt(-2.0 * tl.log(1.0 - u)) * tl.cos(6.283185307179586 * v)
'''
_NORMAL_DOUBLE = '''@triton.jit
def normal_double(seed, offset, index):
    """Mean 0, deviation 1, by Box and Muller."""
    a, b, c, d = philox(seed, offset, index)
    turns = tl.full([], 6.283185307179586, tl.float64) * fraction(c, d)
    return tl.sqrt(-2.0 * tl.log(1.0 - fraction(a, b))) * tl.cos(turns)
'''


@dataclass
class Drawn:
    """``steps``: names and texts, the last of them the value; ``helpers``: the functions that they call."""

    steps: list[tuple[str, str]]
    helpers: dict[str, str] = field(default_factory=dict[str, str])


def draw(expr: Expr, kind: RandomKind, name: str, index: str, numbers: Sequence[str], *, interpret: bool) -> Drawn:
    """``index``: of the unsharded tensor, 64-bit.  ``numbers``: texts of the op's four operands."""
    dtype = expr.output.dtype
    first, second, seed, offset = numbers
    is_double = dtype is DataType.Double
    helpers = {"philox": _PHILOX, **({"fraction": _FRACTION} if is_double else {})}
    function = f"{kind}_double" if is_double else kind
    call = f"{function}({seed}, {offset}, {index}"
    helpers |= narrow.helpers(dtype, interpret=interpret)
    if kind == "normal":
        helpers[function] = _NORMAL_DOUBLE if is_double else _NORMAL
        text = f"{first} + {second} * {call})"
        return Drawn(
            [(name, narrow.rounded(text, dtype, interpret=interpret) if dtype.is_low_precision else text)], helpers
        )
    helpers[function] = _UNIFORM_DOUBLE if is_double else _UNIFORM
    call += ")" if is_double else f", {BITS[dtype.torch]})"
    low, high = (float(cast(float, cast(Scalar, v).value)) for v in expr.inputs[:2])
    if (low, high) == (0.0, 1.0):
        return Drawn([(name, call)], helpers)
    # the product is rounded before the sum, as torch has it: no contraction
    text = f"{literal(low, dtype.compute)} + libdevice.mul_rn({name}_unit, {literal(high - low, dtype.compute)})"
    text = narrow.rounded(text, dtype, interpret=interpret) if dtype.is_low_precision else text
    steps = [(f"{name}_unit", call), (f"{name}_wide", text)]
    if high > low:
        end = torch.tensor(high, dtype=dtype.torch, device="cpu")
        ends = [literal(t.double().item(), dtype.compute) for t in (end, below(end, low))]
        steps.append((name, f"tl.where({name}_wide >= {ends[0]}, {ends[1]}, {name}_wide)"))
    else:
        steps[-1] = (name, steps[-1][1])
    return Drawn(steps, helpers)
