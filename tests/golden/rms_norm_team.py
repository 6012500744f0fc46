# persistent_T13
#   T2 = cast(T0)
#   T3 = mul(T2, T2)
#   T4 = sum(T3)
#   T5 = broadcast(T4)
#   T6 = div(T5, 65536.0)
#   T7 = add(T6, 1e-06)
#   T8 = rsqrt(T7)
#   T9 = mul(T2, T8)
#   T10 = cast(T1)
#   T11 = broadcast(T10)
#   T12 = mul(T9, T11)
#   T13 = cast(T12)

import triton
import triton.language as tl


@triton.jit
def prefetch(ptr):
    """Bring lines of memory into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )


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


@triton.jit(do_not_specialize=["i0"])
def persistent_T13(mailbox_ptr, T0_ptr, T1_ptr, T13_ptr, i0: tl.int32):
    member = tl.program_id(0) % 4
    team = tl.program_id(0) // 4
    teams = tl.num_programs(0) // 4
    epochs_ptr = mailbox_ptr + teams * 8
    epoch = tl.load(epochs_ptr + tl.program_id(0)).to(tl.int32)
    own = member
    every = tl.arange(0, 4)
    count_ptr = epochs_ptr + tl.num_programs(0) + team * 16
    first = member * 16384
    c = tl.arange(0, 2048)

    for row in tl.range(team, i0, teams, num_stages=1):
        x = row.to(tl.int64)
        offs_0 = x * 65536 + first

        T0_0 = tl.load(T0_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
        T0_1 = tl.load(T0_ptr + offs_0 + 2048 + c, eviction_policy="evict_last").to(tl.float32)
        T0_2 = tl.load(T0_ptr + offs_0 + 4096 + c, eviction_policy="evict_last").to(tl.float32)
        T0_3 = tl.load(T0_ptr + offs_0 + 6144 + c, eviction_policy="evict_last").to(tl.float32)
        T0_4 = tl.load(T0_ptr + offs_0 + 8192 + c, eviction_policy="evict_last").to(tl.float32)
        T0_5 = tl.load(T0_ptr + offs_0 + 10240 + c, eviction_policy="evict_last").to(tl.float32)
        T0_6 = tl.load(T0_ptr + offs_0 + 12288 + c, eviction_policy="evict_last").to(tl.float32)
        T0_7 = tl.load(T0_ptr + offs_0 + 14336 + c, eviction_policy="evict_last").to(tl.float32)
        ahead = tl.minimum(row + teams, i0 - 1).to(tl.int64)
        prefetch(T0_ptr + ahead * 65536 + first + (tl.arange(0, 256) * 64))

        T3_0 = T0_0 * T0_0
        T3_1 = T0_1 * T0_1
        T3_2 = T0_2 * T0_2
        T3_3 = T0_3 * T0_3
        T3_4 = T0_4 * T0_4
        T3_5 = T0_5 * T0_5
        T3_6 = T0_6 * T0_6
        T3_7 = T0_7 * T0_7
        T4_part = tl.sum(T3_0 + T3_1 + T3_2 + T3_3 + T3_4 + T3_5 + T3_6 + T3_7, axis=0)
        epoch += 1
        box = mailbox_ptr + ((epoch & 1) * teams + team) * 4
        post(box + own, epoch, T4_part)
        meet(count_ptr, epoch * 4)
        T4 = tl.sum(collect(box + every).to(tl.float32, bitcast=True), axis=0)

        T6 = T4 / 65536.0
        T7 = T6 + 1e-06
        T8 = tl.rsqrt(T7)

        T1_0 = tl.load(T1_ptr + first + c).to(tl.float32)
        T9_0 = T0_0 * T8
        T12_0 = T9_0 * T1_0
        tl.store(T13_ptr + offs_0 + c, T12_0)

        T1_1 = tl.load(T1_ptr + first + 2048 + c).to(tl.float32)
        T9_1 = T0_1 * T8
        T12_1 = T9_1 * T1_1
        tl.store(T13_ptr + offs_0 + 2048 + c, T12_1)

        T1_2 = tl.load(T1_ptr + first + 4096 + c).to(tl.float32)
        T9_2 = T0_2 * T8
        T12_2 = T9_2 * T1_2
        tl.store(T13_ptr + offs_0 + 4096 + c, T12_2)

        T1_3 = tl.load(T1_ptr + first + 6144 + c).to(tl.float32)
        T9_3 = T0_3 * T8
        T12_3 = T9_3 * T1_3
        tl.store(T13_ptr + offs_0 + 6144 + c, T12_3)

        T1_4 = tl.load(T1_ptr + first + 8192 + c).to(tl.float32)
        T9_4 = T0_4 * T8
        T12_4 = T9_4 * T1_4
        tl.store(T13_ptr + offs_0 + 8192 + c, T12_4)

        T1_5 = tl.load(T1_ptr + first + 10240 + c).to(tl.float32)
        T9_5 = T0_5 * T8
        T12_5 = T9_5 * T1_5
        tl.store(T13_ptr + offs_0 + 10240 + c, T12_5)

        T1_6 = tl.load(T1_ptr + first + 12288 + c).to(tl.float32)
        T9_6 = T0_6 * T8
        T12_6 = T9_6 * T1_6
        tl.store(T13_ptr + offs_0 + 12288 + c, T12_6)

        T1_7 = tl.load(T1_ptr + first + 14336 + c).to(tl.float32)
        T9_7 = T0_7 * T8
        T12_7 = T9_7 * T1_7
        tl.store(T13_ptr + offs_0 + 14336 + c, T12_7)

    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))
