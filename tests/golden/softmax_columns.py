# looped_T9
#   T1 = cast(T0)
#   T2, T6 = online_softmax(T1)
#   T3 = broadcast(T2)
#   T4 = sub(T1, T3)
#   T5 = exp(T4)
#   T7 = broadcast(T6)
#   T8 = div(T5, T7)
#   T9 = cast(T8)

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """For x of at most 0, in sums of 1 and more: what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def maximum(a, b):
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def add_exponentials(top, total, x, axis: tl.constexpr):
    """(max, sum of exp(x - max)) of each lane, with its elements of ``x``, which lie along ``axis``, taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    return higher, total * exp(top - higher) + tl.sum(exp(x - tl.expand_dims(higher, axis)), axis)


@triton.jit
def post(ptr, epoch, value):
    """Store 32 bits of ``value`` below ``epoch``: one word, so that neither is seen without the other."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(ptr, (epoch.to(tl.int64) << 32) | bits)


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
def collect(ptr):
    """The bits of every member's word."""
    return (tl.load(ptr, volatile=True) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def power_of_two(x):
    """2^x; what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["i0", "i1", "i2"])
def looped_T9(mailbox_ptr, T0_ptr, T9_ptr, i0: tl.int32, i1: tl.int32, i2: tl.int32):
    i2 = i2 // 16 * 16
    member = tl.program_id(0) % 8
    team = tl.program_id(0) // 8
    teams = tl.num_programs(0) // 8
    epochs_ptr = mailbox_ptr + teams * 2048
    epoch = tl.load(epochs_ptr + tl.program_id(0)).to(tl.int32)
    own = member * 64 + tl.arange(0, 64)
    every = tl.arange(0, 8)[:, None] * 64 + tl.arange(0, 64)[None, :]
    count_ptr = epochs_ptr + tl.num_programs(0) + team * 16
    first = member * i2
    last = tl.minimum(first + i2, i1)
    c = tl.arange(0, 64)[:, None]

    for row in tl.range(team, tl.cdiv(i0, 64), teams, num_stages=1):
        x = row.to(tl.int64) * 64 + tl.arange(0, 64)[None, :]

        T2_acc = tl.full([16, 64], -3.4028234663852886e38, tl.float32)
        T6_acc = tl.zeros([16, 64], tl.float32)
        for start in tl.range(first, last, 64, num_stages=3):
            r = start + c
            T0 = tl.load(T0_ptr + x + r * 4096, eviction_policy="evict_last").to(tl.float32)
            T2_acc, T6_acc = add_exponentials(T2_acc, T6_acc, tl.reshape(T0, [4, 16, 64]), 0)
        T2_part = tl.reduce(T2_acc, 0, maximum)
        T6_part = tl.sum(T6_acc * exp(T2_acc - T2_part[None, :]), axis=0)
        epoch += 1
        box = mailbox_ptr + ((epoch & 1) * teams + team) * 1024
        post(box + own, epoch, T2_part)
        post(box + 512 + own, epoch, T6_part)
        meet(count_ptr, epoch * 8)
        T2_parts = collect(box + every).to(tl.float32, bitcast=True)
        T6_parts = collect(box + 512 + every).to(tl.float32, bitcast=True)
        T2_all = tl.reduce(T2_parts, 0, maximum)
        T6_all = tl.sum(T6_parts * exp(T2_parts - T2_all[None, :]), axis=0)
        T2 = tl.where(T6_all == 0, float("-inf"), T2_all)[None, :]
        T6 = tl.where(T6_all == 0, float("nan"), T6_all)[None, :]

        back = first + first + (tl.cdiv(last - first, 64) - 1) * 64
        for step in tl.range(first, last, 64, num_stages=3):
            start = back - step
            r = start + c
            T0 = tl.load(T0_ptr + x + r * 4096, eviction_policy="evict_last").to(tl.float32)
            T4 = T0 - T2
            T5 = power_of_two(T4 * 1.4426950408889634)
            T8 = T5 * (1.0 / T6)
            tl.store(T9_ptr + x + r * 4096, T8)

    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))
