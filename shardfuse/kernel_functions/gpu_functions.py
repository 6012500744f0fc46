# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportUndefinedVariable=false, reportGeneralTypeIssues=false
"""Functions that kernels call.  ``kernel_functions.texts_of`` copies them into kernels; nothing imports this file."""

import triton
import triton.language as tl

# Arithmetic of float32.


# ``x + x * p(x * x)`` up to 1.07, ``1 - 2 ** q(|x|)`` beyond: minimax fits of each, to a fifth of a unit.  The
# gradient of GELU with a bias, 32768 x 4096 of bfloat16, took 393 us on an H200, with CUDA's erf 530.
@triton.jit
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


# ``1 - 2 ** q(|x|)`` everywhere, a minimax fit to 2e-8.  The gradient of GELU with a bias, 8192 x 11008 of bfloat16,
# took 144 us on an H200 so, with ``erf`` 160.
@triton.jit
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


# Of float32, 5 instructions where ``tl.sigmoid`` takes 13.
@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); what is below 1e-38 is 0, which saves the care for denormals."""
    e = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
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


@triton.jit
def power_of_two(x):
    """2^x; what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


# LLVM of Triton 3.6 and 3.7 ends the process where it simplifies ``pow(1e-40, x)`` or ``tan(1e-40)`` of float32.
@triton.jit
def denormal(bits):
    """The float32 of these bits, which LLVM does not see: it crashes where it folds a function of a denormal."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,r", [tl.full([], bits, tl.int32)], dtype=tl.float32, is_pure=True, pack=1
    )


# libdevice's takes denormals for 0.
@triton.jit
def rounded_product(a, b):
    """a * b, rounded before anything is added to it."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


# Reductions: how two values are combined.


@triton.jit
def maximum(a, b):
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """The smaller; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a, b):
    return a * b


# Statistics: elements taken in, and parts merged.


@triton.jit
def exp(x):
    """For x of at most 0, in sums of 1 and more: what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def add_exponentials(top, total, x, axis: tl.constexpr):
    """(max, sum of exp(x - max)) of each lane, with its elements of ``x``, which lie along ``axis``, taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    return higher, total * exp(top - higher) + tl.sum(exp(x - tl.expand_dims(higher, axis)), axis)


@triton.jit
def add_weighted(top, total, mean, x, axis: tl.constexpr):
    """(max, sum of e = exp(x - max), sum of e * (x - max)) of each lane, with its elements of ``x`` taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    away = x - tl.expand_dims(higher, axis)
    e = exp(away)
    mean = weighted_from(top - higher, total, mean) + tl.sum(weighted(away, e), axis)
    return higher, total * exp(top - higher) + tl.sum(e, axis), mean


@triton.jit
def weighted(away, e):
    """A distance of -inf weighs nothing."""
    return tl.maximum(away, -3e38) * e


@triton.jit
def weighted_from(away, total, mean):
    """The sum of weighted distances as they are from ``away`` above; nothing where that is out of reach."""
    e = exp(away)
    return tl.where(e == 0, e, (total * away + mean) * e)


@triton.jit
def add_distances(n, total, top, x, axis: tl.constexpr):
    """(number, sum of x - max) of each lane, whose max was ``top``, with its elements of ``x`` taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    more = tl.sum(x - tl.expand_dims(higher, axis), axis)
    return n + x.shape[axis], total + (moved(n, top - higher) + more)


@triton.jit
def add_masked_distances(n, total, top, x, mask, count, axis: tl.constexpr):
    """(number, sum of x - max) of each lane, whose max was ``top``, with its ``count`` elements of ``x`` taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    more = tl.sum(tl.where(mask, x - tl.expand_dims(higher, axis), 0.0), axis)
    return n + count, total + (moved(n, top - higher) + more)


@triton.jit
def moved(n, by):
    """What n distances change by where what they are measured from does."""
    return tl.where(n > 0, n * by, 0.0)


@triton.jit
def add_moments(n, total, squares, x, axis: tl.constexpr):
    """(number, sum, sum of squared distances to the mean) of each lane, with its elements of ``x`` taken in."""
    count = tl.full([], x.shape[axis], x.dtype)
    own = tl.sum(x, axis)
    apart = x - tl.expand_dims(own * (1.0 / count), axis)
    return merge_moments(n, total, squares, count, own, tl.sum(apart * apart, axis))


@triton.jit
def add_masked_moments(n, total, squares, x, mask, count, axis: tl.constexpr):
    """(number, sum, sum of squared distances to the mean) of each lane, with its ``count`` elements taken in."""
    own = tl.sum(tl.where(mask, x, 0.0), axis)
    apart = tl.where(mask, x - tl.expand_dims(own / tl.maximum(count, 1.0), axis), 0.0)
    return merge_moments(n, total, squares, count, own, tl.sum(apart * apart, axis))


@triton.jit
def merge_moments(n, total, squares, count, own, within):
    """Those of n and of ``count`` elements as those of all of them."""
    apart = own * (1.0 / tl.maximum(count, 1.0)) - total * (1.0 / tl.maximum(n, 1.0))
    between = tl.where(n * count > 0, apart * apart * (n * count / (n + count)), 0.0)
    return n + count, total + own, squares + (within + between)


@triton.jit
def between(n, total, mean):
    """Squared distances to ``mean`` of n elements, each where their own mean is."""
    apart = total / tl.maximum(n, 1) - mean
    return n * apart * apart


@triton.jit
def square(x):
    return x * x


@triton.jit
def merged_moments(n, mean, squares, count, other_mean, other_squares):
    """(number, mean, squares around it) of two parts as those of both together."""
    share = count / (n + count)
    apart = other_mean - mean
    return n + count, mean + apart * share, squares + other_squares + apart * apart * n * share


@triton.jit
def squares_around(mean, x, shape: tl.constexpr):
    """Squared distances of each lane's elements of ``x`` to its mean."""
    apart = tl.reshape(x, shape) - mean[:, None]
    return apart * apart


# Random numbers.


# One 64-bit product for what ``tl.philox`` takes two instructions for.
@triton.jit
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


@triton.jit
def fraction(high, low):
    """In [0, 1), of 53 bits of two words."""
    bits = (high.to(tl.uint64) << 21) | (low >> 11).to(tl.uint64)
    return bits.to(tl.float64) * tl.full([], 1.1102230246251565e-16, tl.float64)


@triton.jit
def uniform(seed, offset, index, BITS: tl.constexpr):
    """In [0, 1), of as many bits as the type holds below 1."""
    word, _, _, _ = philox(seed, offset, index)
    return (word >> (32 - BITS)).to(tl.float32) * (1.0 / (1 << BITS))


@triton.jit
def uniform_double(seed, offset, index):
    """In [0, 1)."""
    high, low, _, _ = philox(seed, offset, index)
    return fraction(high, low)


@triton.jit
def normal(seed, offset, index):
    """Mean 0, deviation 1, by Box and Muller."""
    u, v, _, _ = philox(seed, offset, index)
    u = (u >> 8).to(tl.float32) * 5.960464477539063e-08
    v = (v >> 8).to(tl.float32) * 5.960464477539063e-08
    return tl.sqrt(-2.0 * tl.log(1.0 - u)) * tl.cos(6.283185307179586 * v)


@triton.jit
def normal_double(seed, offset, index):
    """Mean 0, deviation 1, by Box and Muller."""
    a, b, c, d = philox(seed, offset, index)
    turns = tl.full([], 6.283185307179586, tl.float64) * fraction(c, d)
    return tl.sqrt(-2.0 * tl.log(1.0 - fraction(a, b))) * tl.cos(turns)


# 16-bit values, two in a word.


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


# Programs of one launch that wait for one another.


@triton.jit
def arrive(ptr):
    """Come: how many have, ever, this program among them."""
    tl.debug_barrier()
    return tl.atomic_add(ptr, 1, sem="acq_rel") + 1


@triton.jit
def wait_for(ptr, come, count):
    """Wait until ``count`` have come, of whom ``come`` had: one thread asks, for all."""
    while (come - count).to(tl.int32) < 0:
        come = tl.atomic_add(ptr, 0, sem="acquire")


@triton.jit
def meet(ptr, count):
    """Come, and wait until ``count`` have."""
    wait_for(ptr, arrive(ptr), count)


@triton.jit
def meet_all(ptr):
    """Come, and wait until every program of this launch has: each launch adds as many to the count."""
    come = arrive(ptr)
    programs = tl.num_programs(0)
    wait_for(ptr, come, (come + programs - 1) // programs * programs)
    tl.debug_barrier()


@triton.jit
def is_last(ptr, programs):
    """Come: the last of so many?  Each launch adds as many to the count."""
    come = arrive(ptr)
    tl.debug_barrier()
    return come % programs == 0


# Of words that a count orders, or that the interpreter stores.
@triton.jit
def post(ptr, epoch, value):
    """Store 32 bits of ``value`` below ``epoch``: one word, so that neither is seen without the other."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(ptr, (epoch.to(tl.int64) << 32) | bits)


@triton.jit
def collect(ptr):
    """The bits of every member's word."""
    return (tl.load(ptr, volatile=True) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def prefetch(ptr):
    """Bring lines of memory into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )
