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


# ``exp(-x * x) * t * p(t)`` with ``t = 1 / (1 + 0.3 |x|)``, a minimax fit to 2e-8: 17 instructions where CUDA's erfc
# takes 50, which are to its last places.
@triton.jit
def rough_erfc(x):
    """Within 1e-6 of erfc(x), relatively, within 3e-6 where that is below 0.01, 8e-6 below 1e-12; 0 below 1e-38."""
    t = quick_reciprocal(0.3 * tl.abs(x) + 1.0)
    p = 0.4856163263320923 - 0.12953302264213562 * t
    p = p * t - 0.5123977065086365
    p = p * t + 0.5478706359863281
    p = p * t - 0.09476646035909653
    p = p * t + 0.2149815708398819
    p = p * t + 0.14832298457622528
    p = p * t + 0.17071786522865295
    p = p * t + 0.16918782889842987
    tail = power_of_two(x * x * -1.4426950408889634) * (p * t)
    return tl.where(x < 0, 2.0 - tail, tail)


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


# The polynomial of ``rough_erfc``, and one exponential for both terms: 22 instructions; CUDA's erfc and exp take 70.
@triton.jit
def rough_gelu_slope(x):
    """The derivative of ``gelu``, each of its two terms as near as ``rough_erfc``; NaN at infinities, as in torch."""
    t = quick_reciprocal(0.21213203435596426 * tl.abs(x) + 1.0)
    p = 0.4856163263320923 - 0.12953302264213562 * t
    p = p * t - 0.5123977065086365
    p = p * t + 0.5478706359863281
    p = p * t - 0.09476646035909653
    p = p * t + 0.2149815708398819
    p = p * t + 0.14832298457622528
    p = p * t + 0.17071786522865295
    p = p * t + 0.16918782889842987
    e = power_of_two(x * x * -0.7213475204444817)
    tail = 0.5 * e * (p * t)
    return tl.where(x < 0, tail, 1.0 - tail) + x * (e * 0.3989422804014327)


@triton.jit
def power_of_two(x):
    """2^x; what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quick_reciprocal(x):
    """1 / x to a unit of the last place; of what is above 8e37 it is 0."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


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


# A store of Triton's moves what a warp has added up through shared memory first, so that other threads store it: 20
# barriers for the blocks of a row of 10240 elements.
@triton.jit
def store_by_all(ptr, value, there):
    """Store 32 bits where ``there``: each thread that has them does, the same bits in one transaction of a warp."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [ptr, value.to(tl.int32, bitcast=True), there],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch(ptr):
    """Bring lines of memory into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )
