# mix_order_T33_T31_partial_T32_partial
#   T1 = cast(T0)
#   T3 = cast(T2)
#   T5 = cast(T4)
#   T6 = sum(T1)
#   T7 = broadcast(T6)
#   T8 = div(T7, 4096.0)
#   T9 = sub(T1, T8)
#   T10 = mul(T9, T9)
#   T11 = sum(T10)
#   T12 = broadcast(T11)
#   T13 = div(T12, 4096.0)
#   T14 = add(T13, 1e-05)
#   T15 = rsqrt(T14)
#   T16 = mul(T9, T15)
#   T17 = broadcast(T5)
#   T18 = mul(T3, T17)
#   T19 = mul(T18, T16)
#   T20 = sum(T19)
#   T21 = broadcast(T20)
#   T22 = div(T21, 4096.0)
#   T23 = sum(T18)
#   T24 = broadcast(T23)
#   T25 = div(T24, 4096.0)
#   T26 = mul(T16, T22)
#   T27 = sub(T18, T26)
#   T28 = sub(T27, T25)
#   T29 = mul(T28, T15)
#   T30 = mul(T3, T16)
#   T33 = cast(T29)
#   T31_partial = sum(T30)
#   T32_partial = sum(T3)
# finish_T34_T35
#   T31 = sum(T31_partial)
#   T32 = sum(T32_partial)
#   T34 = cast(T31)
#   T35 = cast(T32)

import triton
import triton.language as tl


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
def meet_all(ptr):
    """Come, and wait until every program of this launch has: each launch adds as many to the count."""
    come = arrive(ptr)
    programs = tl.num_programs(0)
    wait_for(ptr, come, (come + programs - 1) // programs * programs)
    tl.debug_barrier()


@triton.jit
def finish_T34_T35(T31_partial_ptr, T32_partial_ptr, T34_ptr, T35_ptr, block):
    x = block * 16 + tl.arange(0, 16)[None, :]
    c = tl.arange(0, 512)[:, None]
    r_mask = c < 264

    T31_partial = tl.load(T31_partial_ptr + x + c * 4096, mask=r_mask, cache_modifier=".cg")
    T32_partial = tl.load(T32_partial_ptr + x + c * 4096, mask=r_mask, cache_modifier=".cg")

    T31 = tl.sum(tl.where(r_mask, T31_partial, 0.0), axis=0)[None, :]
    T32 = tl.sum(tl.where(r_mask, T32_partial, 0.0), axis=0)[None, :]

    tl.store(T34_ptr + x, T31)
    tl.store(T35_ptr + x, T32)


@triton.jit(do_not_specialize=["i0", "finish_T34_T35_blocks"])
def mix_order_T33_T34_T35(
    mailbox_ptr,
    T0_ptr,
    T2_ptr,
    T4_ptr,
    T33_ptr,
    T31_partial_ptr,
    T32_partial_ptr,
    T34_ptr,
    T35_ptr,
    i0: tl.int32,
    finish_T34_T35_blocks: tl.int32,
):
    c = tl.arange(0, 1024)
    program = tl.program_id(0).to(tl.int64)

    T4_0 = tl.load(T4_ptr + c).to(tl.float32)
    T4_1 = tl.load(T4_ptr + 1024 + c).to(tl.float32)
    T4_2 = tl.load(T4_ptr + 2048 + c).to(tl.float32)
    T4_3 = tl.load(T4_ptr + 3072 + c).to(tl.float32)

    T31_partial_acc_0 = tl.zeros([1024], tl.float32)
    T31_partial_acc_1 = tl.zeros([1024], tl.float32)
    T31_partial_acc_2 = tl.zeros([1024], tl.float32)
    T31_partial_acc_3 = tl.zeros([1024], tl.float32)
    T32_partial_acc_0 = tl.zeros([1024], tl.float32)
    T32_partial_acc_1 = tl.zeros([1024], tl.float32)
    T32_partial_acc_2 = tl.zeros([1024], tl.float32)
    T32_partial_acc_3 = tl.zeros([1024], tl.float32)

    for x in tl.range(program, i0, 264, num_stages=3):
        offs_0 = x * 4096

        T0_0 = tl.load(T0_ptr + offs_0 + c).to(tl.float32)
        T2_0 = tl.load(T2_ptr + offs_0 + c).to(tl.float32)
        T0_1 = tl.load(T0_ptr + offs_0 + 1024 + c).to(tl.float32)
        T2_1 = tl.load(T2_ptr + offs_0 + 1024 + c).to(tl.float32)
        T0_2 = tl.load(T0_ptr + offs_0 + 2048 + c).to(tl.float32)
        T2_2 = tl.load(T2_ptr + offs_0 + 2048 + c).to(tl.float32)
        T0_3 = tl.load(T0_ptr + offs_0 + 3072 + c).to(tl.float32)
        T2_3 = tl.load(T2_ptr + offs_0 + 3072 + c).to(tl.float32)

        T18_0 = T2_0 * T4_0
        T18_1 = T2_1 * T4_1
        T18_2 = T2_2 * T4_2
        T18_3 = T2_3 * T4_3
        T32_partial_acc_0 += T2_0
        T32_partial_acc_1 += T2_1
        T32_partial_acc_2 += T2_2
        T32_partial_acc_3 += T2_3
        T6_lanes = T0_0
        T6_lanes = T6_lanes + T0_1
        T6_lanes = T6_lanes + T0_2
        T6_lanes = T6_lanes + T0_3
        T6_mean = tl.sum(tl.reshape(T6_lanes, [128, 8]), axis=1) / 32
        T11_lanes = squares_around(T6_mean, T0_0, [128, 8])
        T11_lanes = T11_lanes + squares_around(T6_mean, T0_1, [128, 8])
        T11_lanes = T11_lanes + squares_around(T6_mean, T0_2, [128, 8])
        T11_lanes = T11_lanes + squares_around(T6_mean, T0_3, [128, 8])
        T11_around = tl.sum(T11_lanes, axis=1)
        T6_count = tl.full([128], 32, tl.float32)
        T6_count, T6_mean, T11_around = tl.reduce((T6_count, T6_mean, T11_around), 0, merged_moments)
        T6 = T6_mean * 4096
        T11 = T11_around
        T23_lanes = T18_0
        T23_lanes = T23_lanes + T18_1
        T23_lanes = T23_lanes + T18_2
        T23_lanes = T23_lanes + T18_3
        T23 = tl.sum(T23_lanes, axis=0)

        T8 = T6 / 4096.0
        T9_0 = T0_0 - T8
        T13 = T11 / 4096.0
        T14 = T13 + 1e-05
        T15 = tl.rsqrt(T14)
        T16_0 = T9_0 * T15
        T19_0 = T18_0 * T16_0
        T30_0 = T2_0 * T16_0
        T9_1 = T0_1 - T8
        T16_1 = T9_1 * T15
        T19_1 = T18_1 * T16_1
        T30_1 = T2_1 * T16_1
        T9_2 = T0_2 - T8
        T16_2 = T9_2 * T15
        T19_2 = T18_2 * T16_2
        T30_2 = T2_2 * T16_2
        T9_3 = T0_3 - T8
        T16_3 = T9_3 * T15
        T19_3 = T18_3 * T16_3
        T30_3 = T2_3 * T16_3
        T31_partial_acc_0 += T30_0
        T31_partial_acc_1 += T30_1
        T31_partial_acc_2 += T30_2
        T31_partial_acc_3 += T30_3
        T20_lanes = T19_0
        T20_lanes = T20_lanes + T19_1
        T20_lanes = T20_lanes + T19_2
        T20_lanes = T20_lanes + T19_3
        T20 = tl.sum(T20_lanes, axis=0)

        T22 = T20 / 4096.0
        T26_0 = T16_0 * T22
        T27_0 = T18_0 - T26_0
        T25 = T23 / 4096.0
        T28_0 = T27_0 - T25
        T29_0 = T28_0 * T15
        T26_1 = T16_1 * T22
        T27_1 = T18_1 - T26_1
        T28_1 = T27_1 - T25
        T29_1 = T28_1 * T15
        T26_2 = T16_2 * T22
        T27_2 = T18_2 - T26_2
        T28_2 = T27_2 - T25
        T29_2 = T28_2 * T15
        T26_3 = T16_3 * T22
        T27_3 = T18_3 - T26_3
        T28_3 = T27_3 - T25
        T29_3 = T28_3 * T15

        tl.store(T33_ptr + offs_0 + c, T29_0)
        tl.store(T33_ptr + offs_0 + 1024 + c, T29_1)
        tl.store(T33_ptr + offs_0 + 2048 + c, T29_2)
        tl.store(T33_ptr + offs_0 + 3072 + c, T29_3)

    partial = program * 4096
    tl.store(T31_partial_ptr + partial + c, T31_partial_acc_0)
    tl.store(T31_partial_ptr + partial + 1024 + c, T31_partial_acc_1)
    tl.store(T31_partial_ptr + partial + 2048 + c, T31_partial_acc_2)
    tl.store(T31_partial_ptr + partial + 3072 + c, T31_partial_acc_3)
    tl.store(T32_partial_ptr + partial + c, T32_partial_acc_0)
    tl.store(T32_partial_ptr + partial + 1024 + c, T32_partial_acc_1)
    tl.store(T32_partial_ptr + partial + 2048 + c, T32_partial_acc_2)
    tl.store(T32_partial_ptr + partial + 3072 + c, T32_partial_acc_3)
    meet_all(mailbox_ptr)
    for block in tl.range(tl.program_id(0), finish_T34_T35_blocks, tl.num_programs(0), num_stages=1):
        finish_T34_T35(T31_partial_ptr, T32_partial_ptr, T34_ptr, T35_ptr, block)
