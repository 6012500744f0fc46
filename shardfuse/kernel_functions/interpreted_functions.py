# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportUndefinedVariable=false, reportGeneralTypeIssues=false
"""What kernels call under Triton's interpreter, which runs no assembly, in place of ``gpu_functions.py``'s."""

import triton
import triton.language as tl


@triton.jit
def power_of_two(x):
    return tl.exp2(x)


@triton.jit
def quick_reciprocal(x):
    return 1.0 / x


@triton.jit
def rounded_product(a, b):
    return a * b


@triton.jit
def wide_product(a, b):
    return a.to(tl.uint64) * b


@triton.jit
def laid_out_as(index, loaded):
    return index


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def to_bfloat16(x):
    """Round float32 to the nearest bfloat16, ties to even, by hand: Triton's interpreter truncates."""
    b = x.to(tl.int32, bitcast=True)
    y = ((b + 0x7FFF + ((b >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, y, x)


@triton.jit
def store_by_all(ptr, value, there):
    tl.store(ptr, value, mask=there != 0)
