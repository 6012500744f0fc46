# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# pyright: reportAssignmentType=false
"""Kernels over lists of tensors.  ``kernel_text.py`` hands this text to Triton; nothing imports it.

A program works on one chunk of one tensor.  ``chunks[program]`` is the tensor's place in the list, and its row says
the rest:

    addresses[t] = parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq, master, step, (unused)
    facts[t] = elements, first program, dtypes of parameter and gradient, group
    factors[t] = 1 - lr * weight_decay, lr / bias correction 1, 1 / sqrt(bias correction 2), eps,
                 1 - beta1, beta2, 1 - beta2, sign
    groups[0] = max_norm, exponent of the norm, ...
    groups[1 + g] = lr, address of lr (or 0), beta1, beta2, eps, weight_decay, sign, is lr float64?

An address is 0 where there is no such tensor.  Rows lie in global memory, so that one compiled kernel serves any list.
"""

import triton
import triton.language as tl

# --- what kernel_text.py writes for each use ---
CHUNK = tl.constexpr(16384)
TILE = tl.constexpr(2048)
ORDER = tl.constexpr(2)
PARAMETERS = tl.constexpr(1)
GRADIENTS = tl.constexpr(1)
DOUBLE = tl.constexpr(False)
AMSGRAD = tl.constexpr(False)
MASTER = tl.constexpr(False)
CLIPS = tl.constexpr(False)
INTERPRETED = tl.constexpr(False)
# --- end ---

# Numbers in a row of addresses, factors or groups (``COLUMNS`` of tensor_lists.py), and in a row of facts.
COLUMNS = tl.constexpr(8)
FACTS = tl.constexpr(4)
# Places in the row ``groups[0]``.
MAX_NORM = tl.constexpr(0)
EXPONENT = tl.constexpr(1)
# Partial sums, and tensors, that the kernels of one program take at a time, in a loop over all of them.
PARTIALS = tl.constexpr(2048)
LISTED = tl.constexpr(256)
# Numbers of orders of norms (``order_of`` of gradient_norm.py).
INFINITY_NORM = tl.constexpr(0)
GENERAL_NORM = tl.constexpr(3)
COMPUTED = tl.constexpr(tl.float64 if DOUBLE.value else tl.float32)
ACCUMULATED = tl.constexpr(tl.float64 if DOUBLE.value or ORDER.value == 3 else tl.float32)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def read_as(address, offsets, stop, TYPE: tl.constexpr, FAST: tl.constexpr):
    """Elements at ``offsets`` below ``stop``.  FAST: all are, and the address is a multiple of 16 bytes."""
    pointer = address.to(tl.pointer_type(TYPE))
    if FAST:
        x = tl.load(tl.multiple_of(pointer, 16) + offsets)
    else:
        x = tl.load(pointer + offsets, mask=offsets < stop, other=0.0)
    if TYPE == tl.float64:
        y = x.to(COMPUTED)
    else:
        y = x.to(tl.float32).to(COMPUTED)
    return y


@triton.jit
def write_as(address, offsets, stop, x, TYPE: tl.constexpr, FAST: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    y = x
    if TYPE == tl.bfloat16 and INTERPRETED:  # whose own conversion truncates
        b = x.to(tl.float32).to(tl.int32, bitcast=True)
        r = ((b + 0x7FFF + ((b >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        y = tl.where(x == x, r, x.to(tl.float32))
    if FAST:
        tl.store(tl.multiple_of(pointer, 16) + offsets, y.to(TYPE))
    else:
        tl.store(pointer + offsets, y.to(TYPE), mask=offsets < stop)


@triton.jit
def read(address, offsets, stop, kind, KINDS: tl.constexpr, FAST: tl.constexpr):
    """``kind``: which of the types in the bits of KINDS; nothing is asked where there is one."""
    if KINDS == 1:
        x = read_as(address, offsets, stop, tl.float32, FAST)
    elif KINDS == 2:
        x = read_as(address, offsets, stop, tl.bfloat16, FAST)
    elif KINDS == 4:
        x = read_as(address, offsets, stop, tl.float16, FAST)
    elif KINDS == 8:
        x = read_as(address, offsets, stop, tl.float64, FAST)
    else:
        x = tl.zeros([TILE], COMPUTED)
        if KINDS & 1:
            if kind == 0:
                x = read_as(address, offsets, stop, tl.float32, FAST)
        if KINDS & 2:
            if kind == 1:
                x = read_as(address, offsets, stop, tl.bfloat16, FAST)
        if KINDS & 4:
            if kind == 2:
                x = read_as(address, offsets, stop, tl.float16, FAST)
    return x


@triton.jit
def write(address, offsets, stop, x, kind, KINDS: tl.constexpr, FAST: tl.constexpr):
    if KINDS == 1:
        write_as(address, offsets, stop, x, tl.float32, FAST)
    elif KINDS == 2:
        write_as(address, offsets, stop, x, tl.bfloat16, FAST)
    elif KINDS == 4:
        write_as(address, offsets, stop, x, tl.float16, FAST)
    elif KINDS == 8:
        write_as(address, offsets, stop, x, tl.float64, FAST)
    else:
        if KINDS & 1:
            if kind == 0:
                write_as(address, offsets, stop, x, tl.float32, FAST)
        if KINDS & 2:
            if kind == 1:
                write_as(address, offsets, stop, x, tl.bfloat16, FAST)
        if KINDS & 4:
            if kind == 2:
                write_as(address, offsets, stop, x, tl.float16, FAST)


@triton.jit
def accumulate(sums, x, exponent):
    if ORDER == 2:
        sums += x * x
    elif ORDER == 1:
        sums += tl.abs(x)
    elif ORDER == INFINITY_NORM:
        sums = larger(sums, tl.abs(x))
    else:
        sums += tl.exp(exponent * tl.log(tl.abs(x).to(tl.float64)))
    return sums


@triton.jit
def reduced(x):
    if ORDER == INFINITY_NORM:
        y = tl.reduce(x, 0, larger)
    else:
        y = tl.sum(x, 0)
    return y


@triton.jit
def norm_partials(addresses, facts, chunks, groups, partials):
    """One number for each chunk of a gradient: its sum of squares (of powers; its largest element)."""
    program = tl.program_id(0)
    t = tl.load(chunks + program)
    address = tl.load(addresses + t * COLUMNS + 1)
    elements = tl.where(address == 0, 0, tl.load(facts + t * FACTS))
    start = (program - tl.load(facts + t * FACTS + 1)) * CHUNK
    kind = (tl.load(facts + t * FACTS + 2) >> 4) & 15
    exponent = tl.load(groups + EXPONENT)
    sums = tl.zeros([TILE], ACCUMULATED)
    if (address % 16 == 0) & (start + CHUNK <= elements):
        for k in tl.static_range(0, CHUNK // TILE):
            offsets = start + k * TILE + tl.arange(0, TILE)
            sums = accumulate(sums, read(address, offsets, elements, kind, GRADIENTS, True), exponent)
    else:
        for first in range(start, tl.minimum(start + CHUNK, elements), TILE):
            offsets = first + tl.arange(0, TILE)
            sums = accumulate(sums, read(address, offsets, elements, kind, GRADIENTS, False), exponent)
    tl.store(partials + program, reduced(sums).to(tl.float64))


@triton.jit
def finish_norm(partials, total, count: tl.int64):
    """All partial numbers as one, in an order that is the same in every run.  One program."""
    lanes = tl.arange(0, PARTIALS)
    sums = tl.zeros([PARTIALS], tl.float64)
    for first in range(0, count, PARTIALS):
        x = tl.load(partials + first + lanes, mask=first + lanes < count, other=0.0)
        if ORDER == INFINITY_NORM:
            sums = larger(sums, x)
        else:
            sums = sums + x
    tl.store(total, reduced(sums))


@triton.jit
def prepare_steps(addresses, facts, groups, factors, count: tl.int64):
    """Count the steps of tensors with a gradient, and what each one's update multiplies by.  One program."""
    for first in range(0, count, LISTED):
        t = first + tl.arange(0, LISTED)
        mask = t < count
        mask = mask & (tl.load(addresses + t * COLUMNS + 1, mask=mask, other=0) != 0)
        group = groups + (1 + tl.load(facts + t * FACTS + 3, mask=mask, other=-1)) * COLUMNS
        integers = group.to(tl.pointer_type(tl.int64), bitcast=True)
        steps = tl.load(addresses + t * COLUMNS + 6, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(steps, mask=mask, other=0.0) + 1.0
        tl.store(steps, step, mask=mask)
        at = tl.load(integers + 1, mask=mask, other=0)
        is_double = tl.load(integers + 7, mask=mask, other=0)
        lr = tl.load(group, mask=mask, other=0.0)
        narrow = tl.load(at.to(tl.pointer_type(tl.float32)), mask=(at != 0) & (is_double == 0), other=0.0)
        wide = tl.load(at.to(tl.pointer_type(tl.float64)), mask=(at != 0) & (is_double != 0), other=0.0)
        lr = tl.where(at == 0, lr, tl.where(is_double != 0, wide, narrow.to(tl.float64)))
        beta1 = tl.load(group + 2, mask=mask, other=0.5)
        beta2 = tl.load(group + 3, mask=mask, other=0.5)
        exact = step.to(tl.float64)
        row = factors + t * COLUMNS
        tl.store(row, 1.0 - lr * tl.load(group + 5), mask=mask)
        tl.store(row + 1, lr / (1.0 - tl.exp(exact * tl.log(beta1))), mask=mask)
        tl.store(row + 2, 1.0 / tl.sqrt(1.0 - tl.exp(exact * tl.log(beta2))), mask=mask)
        tl.store(row + 3, tl.load(group + 4), mask=mask)
        tl.store(row + 4, 1.0 - beta1, mask=mask)
        tl.store(row + 5, beta2, mask=mask)
        tl.store(row + 6, 1.0 - beta2, mask=mask)
        tl.store(row + 7, tl.load(group + 6), mask=mask)


@triton.jit
def finish_norm_and_prepare(
    partials, total, addresses, facts, groups, factors, partial_count: tl.int64, count: tl.int64
):
    finish_norm(partials, total, partial_count)
    prepare_steps(addresses, facts, groups, factors, count)


@triton.jit
def norm_of(total, groups):
    x = tl.load(total)
    if ORDER == 2:
        x = tl.sqrt(x)
    elif ORDER == GENERAL_NORM:
        x = tl.exp(tl.log(x) / tl.load(groups + EXPONENT))
    return x


@triton.jit
def clipping(total, groups, norm, program):
    """What gradients are multiplied by.  Program 0 stores the norm.

    NaN where the norm is NaN, or infinite as the bound is, as torch has it.
    """
    found = norm_of(total, groups)
    if program == 0:
        tl.store(norm, found.to(COMPUTED))
    scale = tl.load(groups + MAX_NORM) / (found + 1e-6)
    return tl.where(scale > 1.0, 1.0, scale)


@triton.jit
def scale_gradients(addresses, facts, chunks, groups, total, norm):
    """Clip in place.  Where the norm is within bounds nothing is read."""
    program = tl.program_id(0)
    scale = clipping(total, groups, norm, program)
    if scale != 1.0:
        t = tl.load(chunks + program)
        address = tl.load(addresses + t * COLUMNS + 1)
        elements = tl.load(facts + t * FACTS)
        start = (program - tl.load(facts + t * FACTS + 1)) * CHUNK
        kind = (tl.load(facts + t * FACTS + 2) >> 4) & 15
        by = scale.to(COMPUTED)
        if (address % 16 == 0) & (start + CHUNK <= elements):
            for k in tl.static_range(0, CHUNK // TILE):
                offsets = start + k * TILE + tl.arange(0, TILE)
                x = read(address, offsets, elements, kind, GRADIENTS, True)
                write(address, offsets, elements, x * by, kind, GRADIENTS, True)
        else:
            for first in range(start, tl.minimum(start + CHUNK, elements), TILE):
                offsets = first + tl.arange(0, TILE)
                x = read(address, offsets, elements, kind, GRADIENTS, False)
                write(address, offsets, elements, x * by, kind, GRADIENTS, False)


@triton.jit
def ratio(x, y, correction, eps):
    """x / (sqrt(y) * correction + eps), each step rounded to nearest."""
    if DOUBLE:
        z = x / (tl.sqrt(y) * correction + eps)
    else:
        z = tl.div_rn(x, tl.sqrt_rn(y) * correction + eps)
    return z


@triton.jit
def update(
    offsets, elements, kinds, weight, gradient, first, second, largest, master, by, decay, rate, correction, eps,
    taken, kept, rest, FAST: tl.constexpr
):  # fmt: skip
    """AdamW on one tile.  Moments and masters are float32, of float64 parameters float64."""
    kind = kinds & 15
    WIDE: tl.constexpr = 8 if PARAMETERS == 8 else 1
    g = read(gradient, offsets, elements, kinds >> 4, GRADIENTS, FAST) * by
    if MASTER:
        if master != 0:
            p = read(master, offsets, elements, 0, WIDE, FAST)
        else:
            p = read(weight, offsets, elements, kind, PARAMETERS, FAST)
    else:
        p = read(weight, offsets, elements, kind, PARAMETERS, FAST)
    m = read(first, offsets, elements, 0, WIDE, FAST)
    v = read(second, offsets, elements, 0, WIDE, FAST)
    # a large share is counted from the gradient's side, as by torch's lerp: all of it (beta1 = 0) leaves nothing of m
    m = tl.where(taken < 0.5, m, g) + (g - m) * tl.where(taken < 0.5, taken, taken - 1.0)
    v = v * kept + (g * g) * rest
    top = v
    if AMSGRAD:
        if largest != 0:
            top = larger(read(largest, offsets, elements, 0, WIDE, FAST), v)
            write(largest, offsets, elements, top, 0, WIDE, FAST)
    p = p * decay - rate * ratio(m, top, correction, eps)
    write(first, offsets, elements, m, 0, WIDE, FAST)
    write(second, offsets, elements, v, 0, WIDE, FAST)
    if MASTER:
        if master != 0:
            write(master, offsets, elements, p, 0, WIDE, FAST)
    write(weight, offsets, elements, p, kind, PARAMETERS, FAST)


@triton.jit
def adamw(addresses, facts, chunks, factors, groups, total, norm):
    program = tl.program_id(0)
    t = tl.load(chunks + program)
    row, fact, factor = addresses + t * COLUMNS, facts + t * FACTS, factors + t * COLUMNS
    elements, kinds = tl.load(fact), tl.load(fact + 2)
    start = (program - tl.load(fact + 1)) * CHUNK
    weight, gradient, first, second = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    elements = tl.where(gradient == 0, 0, elements)
    largest, master = tl.load(row + 4), tl.load(row + 5)
    decay, rate = tl.load(factor).to(COMPUTED), tl.load(factor + 1).to(COMPUTED)
    correction, eps = tl.load(factor + 2).to(COMPUTED), tl.load(factor + 3).to(COMPUTED)
    taken, kept = tl.load(factor + 4).to(COMPUTED), tl.load(factor + 5).to(COMPUTED)
    rest, scale = tl.load(factor + 6).to(COMPUTED), tl.load(factor + 7)
    if CLIPS:
        clipped = clipping(total, groups, norm, program)
        only_measures = tl.load(groups + MAX_NORM) == float("inf")
        scale = scale * tl.where(only_measures, 1.0, clipped)
    by = scale.to(COMPUTED)
    together = weight | gradient | first | second | largest | master
    if (together % 16 == 0) & (start + CHUNK <= elements):
        for k in tl.static_range(0, CHUNK // TILE):
            offsets = start + k * TILE + tl.arange(0, TILE)
            update(
                offsets, elements, kinds, weight, gradient, first, second, largest, master, by, decay, rate,
                correction, eps, taken, kept, rest, True
            )  # fmt: skip
    else:
        for begin in range(start, tl.minimum(start + CHUNK, elements), TILE):
            offsets = begin + tl.arange(0, TILE)
            update(
                offsets, elements, kinds, weight, gradient, first, second, largest, master, by, decay, rate,
                correction, eps, taken, kept, rest, False
            )  # fmt: skip
