# looped_T24
#   T1 = cast(T0)
#   T2 = reshape(T1)
#   T3, T8 = welford(T2)
#   T4 = broadcast(T3)
#   T5 = div(T4, 81920.0)
#   T6 = sub(T2, T5)
#   T9 = broadcast(T8)
#   T10 = div(T9, 81920.0)
#   T11 = add(T10, 1e-05)
#   T12 = rsqrt(T11)
#   T13 = mul(T6, T12)
#   T14 = reshape(T13)
#   T16 = cast(T15)
#   T17 = broadcast(T16)
#   T19 = cast(T18)
#   T20 = broadcast(T19)
#   T21 = mul(T14, T17)
#   T22 = add(T21, T20)
#   T23 = silu(T22)
#   T24 = cast(T23)

import triton
import triton.language as tl


@triton.jit
def merge_moments(n, total, squares, count, own, within):
    """Those of n and of ``count`` elements as those of all of them."""
    apart = own * (1.0 / tl.maximum(count, 1.0)) - total * (1.0 / tl.maximum(n, 1.0))
    between = tl.where(n * count > 0, apart * apart * (n * count / (n + count)), 0.0)
    return n + count, total + own, squares + (within + between)


@triton.jit
def add_moments(n, total, squares, x, axis: tl.constexpr):
    """(number, sum, sum of squared distances to the mean) of each lane, with its elements of ``x`` taken in."""
    count = tl.full([], x.shape[axis], x.dtype)
    own = tl.sum(x, axis)
    apart = x - tl.expand_dims(own * (1.0 / count), axis)
    return merge_moments(n, total, squares, count, own, tl.sum(apart * apart, axis))


@triton.jit
def between(n, total, mean):
    """Squared distances to ``mean`` of n elements, each where their own mean is."""
    apart = total / tl.maximum(n, 1) - mean
    return n * apart * apart


@triton.jit
def post(ptr, epoch, value):
    """Store 32 bits of ``value`` below ``epoch``: one word, so that neither is seen without the other."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(ptr, (epoch.to(tl.int64) << 32) | bits)


@triton.jit
def meet(ptr, count):
    """Come, and wait until ``count`` have: one thread asks, for all."""
    tl.debug_barrier()
    come = tl.atomic_add(ptr, 1, sem="acq_rel") + 1
    while come.to(tl.int32) - count < 0:
        come = tl.atomic_add(ptr, 0, sem="acquire")


@triton.jit
def collect(ptr):
    """The bits of every member's word."""
    return (tl.load(ptr, volatile=True) & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["i0", "i1", "i2"])
def looped_T24(mailbox_ptr, T0_ptr, T15_ptr, T18_ptr, T24_ptr, i0: tl.int32, i1: tl.int32, i2: tl.int32):
    i2 = i2 // 16 * 16
    member = tl.program_id(0) % 32
    team = tl.program_id(0) // 32
    teams = tl.num_programs(0) // 32
    epochs_ptr = mailbox_ptr + teams * 512
    epoch = tl.load(epochs_ptr + tl.program_id(0)).to(tl.int32)
    own = member * 4 + tl.arange(0, 4)
    every = tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
    count_ptr = epochs_ptr + tl.num_programs(0) + team * 16
    first = member * i2
    last = tl.minimum(first + i2, i1)
    groups = tl.arange(0, 4)[:, None] == tl.arange(0, 128)[None, :] // 20
    c = tl.arange(0, 16)[:, None]

    for row in tl.range(team, tl.cdiv(i0, 80), teams, num_stages=1):
        x0 = row.to(tl.int64) * 80
        k = tl.arange(0, 128)[None, :]
        x_mask = k < 80
        offs_0 = x0 // 640 * 2621440 + x0 // 80 % 8 * 80 + k
        offs_1 = x0 // 80 % 8 * 80 + k

        T3_n = tl.zeros([], tl.float32)
        T3_acc = tl.zeros([8, 128], tl.float32)
        T8_acc = tl.zeros([8, 128], tl.float32)
        for start in tl.range(first, last, 16, num_stages=3):
            r = start + c
            T0 = tl.load(T0_ptr + offs_0 + r * 640, mask=x_mask, eviction_policy="evict_last").to(tl.float32)
            T3_n, T3_acc, T8_acc = add_moments(T3_n, T3_acc, T8_acc, tl.reshape(T0, [2, 8, 128]), 0)
        T3_part_column = tl.sum(T3_acc, axis=0)
        T3_part = tl.sum(tl.where(groups, T3_part_column[None, :], 0.0), axis=1)
        T3_mean = T3_part / (tl.maximum(last - first, 1) * 20)
        T3_part_group = T3_mean
        T3_centre = tl.sum(tl.where(groups, T3_part_group[:, None], 0.0), axis=0)[None, :]
        T8_part_column = tl.sum(T8_acc + between(T3_n, T3_acc, T3_centre), axis=0)
        T8_part = tl.sum(tl.where(groups, T8_part_column[None, :], 0.0), axis=1)
        epoch += 1
        box = mailbox_ptr + ((epoch & 1) * teams + team) * 256
        post(box + own, epoch, T3_part)
        post(box + 128 + own, epoch, T8_part)
        meet(count_ptr, epoch * 32)
        T3_parts = collect(box + every).to(tl.float32, bitcast=True)
        T8_parts = collect(box + 128 + every).to(tl.float32, bitcast=True)
        T3_counts = (tl.minimum(tl.maximum(i1 - tl.arange(0, 32)[:, None] * i2, 0), i2) * 20).to(tl.float32)
        T3_all = tl.sum(T3_parts, axis=0)
        T3_mean = T3_all / (i1 * 20)
        T8_all = tl.sum(T8_parts + between(T3_counts, T3_parts, T3_mean[None, :]), axis=0)
        T3_group = T3_all
        T3 = tl.sum(tl.where(groups, T3_group[:, None], 0.0), axis=0)[None, :]
        T8_group = T8_all
        T8 = tl.sum(tl.where(groups, T8_group[:, None], 0.0), axis=0)[None, :]
        T5 = T3 / 81920.0
        T10 = T8 / 81920.0
        T11 = T10 + 1e-05
        T12 = tl.rsqrt(T11)
        T15 = tl.load(T15_ptr + offs_1, mask=x_mask).to(tl.float32)
        T18 = tl.load(T18_ptr + offs_1, mask=x_mask).to(tl.float32)

        back = first + first + (tl.cdiv(last - first, 16) - 1) * 16
        for step in tl.range(first, last, 16, num_stages=3):
            start = back - step
            r = start + c
            T0 = tl.load(T0_ptr + offs_0 + r * 640, mask=x_mask, eviction_policy="evict_last").to(tl.float32)
            T6 = T0 - T5
            T13 = T6 * T12
            T21 = T13 * T15
            T22 = T21 + T18
            T23 = T22 * tl.sigmoid(T22)
            tl.store(T24_ptr + offs_0 + r * 640, T23, mask=x_mask)

    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))
