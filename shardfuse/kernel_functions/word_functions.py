# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportUndefinedVariable=false, reportGeneralTypeIssues=false
"""16-bit values of a row, two in a word.  As ``gpu_functions.py`` is, this is copied into kernels, and not imported."""

import triton
import triton.language as tl


@triton.jit
def packed(x):
    """Pairs of 16-bit values, a word each."""
    low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0] // 2, 2]))
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)


@triton.jit
def unpacked_bf16(words):
    """The bfloat16 values of ``words``, in order."""
    low = (words << 16).to(tl.float32, bitcast=True)
    return tl.interleave(low, (words & -65536).to(tl.float32, bitcast=True))


@triton.jit
def unpacked_fp16(words):
    """The float16 values of ``words``, in order."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.interleave(low, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))


@triton.jit
def larger_bf16(a, b):
    """Of each value of the words; NaN if either is."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_f16(a, b):
    """Of each value of the words; NaN if either is."""
    return tl.inline_asm_elementwise(
        "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def again(words):
    """``words``, which the compiler takes for others: it widens them anew, and does not keep them wide."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=False, pack=1)
