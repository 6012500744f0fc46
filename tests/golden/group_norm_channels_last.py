# looped_T24
#   T1 = cast(T0)
#   T2 = reshape(T1)
#   T3 = sum(T2)
#   T4 = broadcast(T3)
#   T5 = div(T4, 81920.0)
#   T6 = sub(T2, T5)
#   T7 = mul(T6, T6)
#   T8 = sum(T7)
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
    member = tl.program_id(0) % 16
    team = tl.program_id(0) // 16
    teams = tl.num_programs(0) // 16
    epochs_ptr = mailbox_ptr + teams * 128
    epoch = tl.load(epochs_ptr + tl.program_id(0)).to(tl.int32)
    own = member * 4 + tl.arange(0, 4)
    every = tl.arange(0, 16)[:, None] * 4 + tl.arange(0, 4)[None, :]
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

        T3_acc = tl.zeros([16, 128], tl.float32)
        for start in tl.range(first, last, 16, num_stages=3):
            r = start + c
            T0 = tl.load(T0_ptr + offs_0 + r * 640, mask=x_mask, eviction_policy="evict_last").to(tl.float32)
            T3_acc += T0
        T3_column = tl.sum(T3_acc, axis=0)
        T3_part = tl.sum(tl.where(groups, T3_column[None, :], 0.0), axis=1)
        epoch += 1
        box = mailbox_ptr + ((epoch & 1) * teams + team) * 64
        post(box + own, epoch, T3_part)
        meet(count_ptr, epoch * 16)
        T3_group = tl.sum(collect(box + every).to(tl.float32, bitcast=True), axis=0)
        T3 = tl.sum(tl.where(groups, T3_group[:, None], 0.0), axis=0)[None, :]
        T5 = T3 / 81920.0

        T8_acc = tl.zeros([16, 128], tl.float32)
        for start in tl.range(first, last, 16, num_stages=3):
            r = start + c
            T0 = tl.load(T0_ptr + offs_0 + r * 640, mask=x_mask, eviction_policy="evict_last").to(tl.float32)
            T6 = T0 - T5
            T7 = T6 * T6
            T8_acc += T7
        T8_column = tl.sum(T8_acc, axis=0)
        T8_part = tl.sum(tl.where(groups, T8_column[None, :], 0.0), axis=1)
        epoch += 1
        box = mailbox_ptr + ((epoch & 1) * teams + team) * 64
        post(box + own, epoch, T8_part)
        meet(count_ptr, epoch * 16)
        T8_group = tl.sum(collect(box + every).to(tl.float32, bitcast=True), axis=0)
        T8 = tl.sum(tl.where(groups, T8_group[:, None], 0.0), axis=0)[None, :]
        T10 = T8 / 81920.0
        T11 = T10 + 1e-05
        T12 = tl.rsqrt(T11)
        T15 = tl.load(T15_ptr + offs_1, mask=x_mask).to(tl.float32)
        T18 = tl.load(T18_ptr + offs_1, mask=x_mask).to(tl.float32)

        for start in tl.range(first, last, 16, num_stages=3):
            r = start + c
            T0 = tl.load(T0_ptr + offs_0 + r * 640, mask=x_mask, eviction_policy="evict_last").to(tl.float32)
            T6 = T0 - T5
            T13 = T6 * T12
            T21 = T13 * T15
            T22 = T21 + T18
            T23 = T22 * tl.sigmoid(T22)
            tl.store(T24_ptr + offs_0 + r * 640, T23, mask=x_mask)

    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))
