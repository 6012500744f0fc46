# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false
"""Sums whose order is a tree of pairs, as in ``gpu_functions.py``: text that kernels get a copy of."""

import triton
import triton.language as tl


# However the elements lie in threads: each sum is of two numbers, which are the same in either order.
@triton.jit
def branches_in_pairs(x, levels: tl.constexpr):
    """Of ``x`` [n] the sums of 2 ** levels neighbours each, [n / 2 ** levels]."""
    for _ in tl.static_range(levels):
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), axis=1)
    return x


@triton.jit
def behind(a, b):
    """``b`` [n] behind ``a`` [n], in the threads that they are in."""
    return tl.reshape(tl.permute(tl.join(a, b), [1, 0]), [2 * a.shape[0]])


# The first step brings what each warp has into the lanes of every warp, so that the others need no barrier.
@triton.jit
def sum_in_pairs(x, levels: tl.constexpr):
    """Of ``x`` [2 ** levels], of which warps have a few elements each."""
    if levels > 0:
        first, second = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        x = branches_in_pairs(first + second, levels - 1)
    return tl.sum(x, axis=0)


@triton.jit
def both(a, b, c, d):
    """The sums of two pairs."""
    return a + c, b + d


# ``sum_in_pairs`` of one behind the other takes a barrier for all warps where this takes one for each level, and in
# kernels whose registers hold a row it spilled 470 bytes of a thread, where this spills none.
@triton.jit
def sum_both_in_pairs(x, y, levels: tl.constexpr):
    """Of ``x`` [2 ** levels] and ``y`` behind it, of which warps have one element each."""
    for _ in tl.static_range(levels):
        x, y = tl.reduce((tl.reshape(x, [x.shape[0] // 2, 2]), tl.reshape(y, [y.shape[0] // 2, 2])), 1, both)
    return tl.sum(x, axis=0) + tl.sum(y, axis=0)


@triton.jit
def sum_columns_in_pairs(x, levels: tl.constexpr):
    """Of each column of ``x`` [2 ** levels, columns]."""
    for _ in tl.static_range(levels):
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def either(a, b):
    """Of two that are the same."""
    return a


# What is left of a row goes back to all of its lanes, step by step, in the layout that each step had. Else Triton would
# compute what is made of it, whole rows, in the layout of what is left, in which every thread has all of a row.
@triton.jit
def sum_rows_in_pairs(x, levels: tl.constexpr):
    """Of each row of ``x`` [rows, 2 ** levels]."""
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(levels):
        x = tl.sum(tl.reshape(x, [rows, x.shape[1] // 2, 2]), axis=2)
    for _ in tl.static_range(levels):
        x = tl.reshape(tl.broadcast_to(x[:, :, None], [rows, x.shape[1], 2]), [rows, 2 * x.shape[1]])
    return tl.reduce(x, 1, either)
