"""Functions of a kernel's file that take elements into running statistics and merge them (``running_statistics``)."""

EXP = '''@triton.jit
def exp(x):
    """For x of at most 0, in sums of 1 and more: what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
'''
PLAIN_EXP = """@triton.jit
def exp(x):
    return tl.exp(x)
"""
ADD_EXPONENTIALS = '''@triton.jit
def add_exponentials(top, total, x, axis: tl.constexpr):
    """(max, sum of exp(x - max)) of each lane, with its elements of ``x``, which lie along ``axis``, taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    return higher, total * exp(top - higher) + tl.sum(exp(x - tl.expand_dims(higher, axis)), axis)
'''
ADD_DISTANCES = '''@triton.jit
def add_distances(n, total, top, x, axis: tl.constexpr):
    """(number, sum of x - max) of each lane, whose max was ``top``, with its elements of ``x`` taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    more = tl.sum(x - tl.expand_dims(higher, axis), axis)
    return n + x.shape[axis], total + (moved(n, top - higher) + more)
'''
ADD_MASKED_DISTANCES = '''@triton.jit
def add_masked_distances(n, total, top, x, mask, count, axis: tl.constexpr):
    """(number, sum of x - max) of each lane, whose max was ``top``, with its ``count`` elements of ``x`` taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    more = tl.sum(tl.where(mask, x - tl.expand_dims(higher, axis), 0.0), axis)
    return n + count, total + (moved(n, top - higher) + more)
'''
MOVED = '''@triton.jit
def moved(n, by):
    """What n distances change by where what they are measured from does."""
    return tl.where(n > 0, n * by, 0.0)
'''
ADD_MOMENTS = '''@triton.jit
def add_moments(n, total, squares, x, axis: tl.constexpr):
    """(number, sum, sum of squared distances to the mean) of each lane, with its elements of ``x`` taken in."""
    count = tl.full([], x.shape[axis], x.dtype)
    own = tl.sum(x, axis)
    apart = x - tl.expand_dims(own * (1.0 / count), axis)
    return merge_moments(n, total, squares, count, own, tl.sum(apart * apart, axis))
'''
ADD_MASKED_MOMENTS = '''@triton.jit
def add_masked_moments(n, total, squares, x, mask, count, axis: tl.constexpr):
    """(number, sum, sum of squared distances to the mean) of each lane, with its ``count`` elements taken in."""
    own = tl.sum(tl.where(mask, x, 0.0), axis)
    apart = tl.where(mask, x - tl.expand_dims(own / tl.maximum(count, 1.0), axis), 0.0)
    return merge_moments(n, total, squares, count, own, tl.sum(apart * apart, axis))
'''
MERGE_MOMENTS = '''@triton.jit
def merge_moments(n, total, squares, count, own, within):
    """Those of n and of ``count`` elements as those of all of them."""
    apart = own * (1.0 / tl.maximum(count, 1.0)) - total * (1.0 / tl.maximum(n, 1.0))
    between = tl.where(n * count > 0, apart * apart * (n * count / (n + count)), 0.0)
    return n + count, total + own, squares + (within + between)
'''
BETWEEN = '''@triton.jit
def between(n, total, mean):
    """Squared distances to ``mean`` of n elements, each where their own mean is."""
    apart = total / tl.maximum(n, 1) - mean
    return n * apart * apart
'''
SQUARE = """@triton.jit
def square(x):
    return x * x
"""
