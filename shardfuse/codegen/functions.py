"""Functions that kernels call on float32: faster than Triton's own, or of numbers that LLVM must not see."""

from __future__ import annotations

import torch

from ..ir.dtype import DataType
from ..ir.scalar import Number
from .arithmetic import literal

_ERF = '''@triton.jit
def erf(x):
    """Within 2 units of the last place: two polynomials cost less than one whose factors are chosen by range."""
    s = x * x
    p = 7.38772505428642e-05 * s - 0.000787125201895833
    p = p * s + 0.0051728649996221066
    p = p * s - 0.02684592269361019
    p = p * s + 0.11283404380083084
    p = p * s - 0.37612611055374146
    p = p * s + 0.12837916612625122
    t = tl.abs(x)
    q = -0.0015692294109612703 * t + 0.020572073757648468
    q = q * t - 0.12545013427734375
    q = q * t - 0.9480663537979126
    q = q * t - 1.6091419458389282
    q = q * t - 0.004762987140566111
    beyond = 1.0 - tl.exp2(q)
    return tl.where(t > 1.07, tl.where(x < 0, -beyond, beyond), p * x + x)
'''
"""``x + x * p(x * x)`` up to 1.07, ``1 - 2 ** q(|x|)`` beyond: minimax fits of each, to a fifth of a unit.

The gradient of GELU with a bias, 32768 x 4096 of bfloat16, took 393 us on an H200, with CUDA's erf 530.
"""
_ERF_FOR_ONE = '''@triton.jit
def erf_for_one(x):
    """Within 2e-7 of erf(x): what the sum with 1 keeps of it, for half of the instructions."""
    t = tl.abs(x)
    q = 0.00044550777755525254 - 4.535861044807678e-05 * t
    q = q * t - 0.0014894421546454008
    q = q * t - 0.0007746286511228268
    q = q * t + 0.0282536800770278
    q = q * t - 0.14848161456762746
    q = q * t - 0.9184163933699461
    q = q * t - 1.6279085930547157
    tail = power_of_two(q * t)
    return tl.where(x < 0, tail - 1.0, 1.0 - tail)
'''
"""``1 - 2 ** q(|x|)`` everywhere, a minimax fit to 2e-8.  The gradient of GELU with a bias, 8192 x 11008 of bfloat16,
took 144 us on an H200 so, with ``erf`` 160."""
_SIGMOID = '''@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); what is below 1e-38 is 0, which saves the care for denormals."""
    e = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
    )
'''
"""Of float32, 5 instructions where ``tl.sigmoid`` takes 13."""

_GELU = '''@triton.jit
def gelu(x):
    """``x * (1 + erf(x / sqrt(2))) / 2`` as ``max(x, 0) - |x| * Q(|x|)``, Q being the tail of the normal distribution.

    log2(Q) is a polynomial, within 8e-8 of it where that shows in float32: no branch, no cancellation below 0.  As in
    torch, gelu(-0.0) is -0.0 and gelu(-inf) NaN, a product of infinity and 0.
    """
    if x.dtype == tl.float64:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    a = tl.minimum(tl.abs(x), 20.0, propagate_nan=tl.PropagateNan.ALL)
    p = 5.615975994372731e-07 - 1.729416910314984e-08 * a
    p = p * a - 7.775032619213944e-06
    p = p * a + 5.792115567704092e-05
    p = p * a - 0.00021654119034831946
    p = p * a - 0.0001280514788028997
    p = p * a + 0.007097454004884976
    p = p * a - 0.052536700892759976
    p = p * a - 0.45919270384481475
    p = p * a - 1.151106894510457
    zero = tl.full([], -2147483648, tl.int32).to(tl.float32, bitcast=True)
    above = tl.maximum(zero, x, propagate_nan=tl.PropagateNan.ALL)
    below = tl.abs(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    return above - below * power_of_two(p * a - 1.0)
'''
_POWER_OF_TWO = '''@triton.jit
def power_of_two(x):
    """2^x; what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
'''
_PLAIN_POWER_OF_TWO = """@triton.jit
def power_of_two(x):
    return tl.exp2(x)
"""
_DENORMAL = '''@triton.jit
def denormal(bits):
    """The float32 of these bits, which LLVM does not see: it crashes where it folds a function of a denormal."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,r", [tl.full([], bits, tl.int32)], dtype=tl.float32, is_pure=True, pack=1
    )
'''
"""LLVM of Triton 3.6 and 3.7 ends the process where it simplifies ``pow(1e-40, x)`` or ``tan(1e-40)`` of float32."""

_ROUNDED_PRODUCT = '''@triton.jit
def rounded_product(a, b):
    """a * b, rounded before anything is added to it."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)
'''
"""libdevice's takes denormals for 0."""
_PLAIN_ROUNDED_PRODUCT = """@triton.jit
def rounded_product(a, b):
    return a * b
"""

_FUNCTIONS = {"erf": _ERF, "sigmoid": _SIGMOID}
_WITH_ASSEMBLY = ("sigmoid",)
"""What Triton's interpreter does not run."""
_OWN = {"erf_for_one": _ERF_FOR_ONE, "gelu": _GELU}
"""What forms call by these names: they call ``power_of_two``."""


def own_functions(form: str, dtype: DataType, *, interpret: bool) -> tuple[str, dict[str, str]]:
    """``form`` of an op whose type is ``dtype``, with these functions instead of Triton's, and those that it calls."""
    found: dict[str, str] = {}
    for name, function in _FUNCTIONS.items():
        if dtype is DataType.Float and f"tl.{name}(" in form and not (interpret and name in _WITH_ASSEMBLY):
            form = form.replace(f"tl.{name}(", f"{name}(")
            found[name] = function
    if form.startswith("rounded_product("):
        found["rounded_product"] = _PLAIN_ROUNDED_PRODUCT if interpret else _ROUNDED_PRODUCT
    called = {name: function for name, function in _OWN.items() if f"{name}(" in form}
    if called or "power_of_two(" in form:
        found["power_of_two"] = _PLAIN_POWER_OF_TWO if interpret else _POWER_OF_TWO
    return form, found | called


def number_text(value: Number, dtype: DataType, *, interpret: bool) -> tuple[str, dict[str, str]]:
    """``value`` as text of the type ``dtype``, and the function that the text calls."""
    if interpret or not dtype.is_floating or dtype is DataType.Double or isinstance(value, complex):
        return literal(value, dtype), {}
    single = torch.tensor(float(value), dtype=torch.float64, device="cpu").float()
    if not 0 < single.abs().item() < torch.finfo(torch.float32).tiny:
        return literal(value, dtype), {}
    return f"denormal({single.view(torch.int32).item()})", {"denormal": _DENORMAL}
