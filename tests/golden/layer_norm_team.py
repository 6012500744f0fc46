# persistent_T28
#   T2 = cast(T1)
#   T4 = cast(T3)
#   T6 = cast(T5)
#   T8 = cast(T7)
#   T9 = cast(T0)
#   T10 = add(T2, T4)
#   T11 = broadcast(T10)
#   T12 = add(T9, T11)
#   T13, T18 = welford(T12)
#   T14 = broadcast(T13)
#   T15 = div(T14, 28672.0)
#   T16 = sub(T12, T15)
#   T19 = broadcast(T18)
#   T20 = div(T19, 28672.0)
#   T21 = add(T20, 1e-05)
#   T22 = rsqrt(T21)
#   T23 = mul(T16, T22)
#   T24 = broadcast(T6)
#   T25 = mul(T23, T24)
#   T26 = broadcast(T8)
#   T27 = add(T25, T26)
#   T28 = cast(T27)

import triton
import triton.language as tl


@triton.jit
def prefetch(ptr):
    """Bring lines of memory into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def square(x):
    return x * x


@triton.jit
def post(ptr, epoch, value):
    """Store 32 bits of ``value`` below ``epoch``: one word, so that neither is seen without the other."""
    bits = value.to(tl.int32, bitcast=True)
    tl.inline_asm_elementwise(
        """{
            .reg .b64 word;
            mov.b64 word, {$2, $3};
            st.relaxed.gpu.global.b64 [$1], word;
            mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [ptr, bits, epoch],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def collect_2(ptr0, ptr1, epoch):
    """The bits of every member's words, once all carry ``epoch``: one statement, in which the compiler sees no loop."""
    return tl.inline_asm_elementwise(
        """{
            .reg .pred wrong;
            .reg .b64 word<2>;
            .reg .u32 bits<2>, found<2>;
        again:
            ld.relaxed.gpu.global.b64 word0, [$2];
            ld.relaxed.gpu.global.b64 word1, [$3];
            mov.b64 {bits0, found0}, word0;
            setp.ne.u32 wrong, found0, $4;
            mov.b64 {bits1, found1}, word1;
            setp.ne.or.u32 wrong, found1, $4, wrong;
            @wrong bra again;
            mov.u32 $0, bits0;
            mov.u32 $1, bits1;
        }""",
        "=r,=r,l,l,r",
        [ptr0, ptr1, epoch],
        dtype=(tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def between(n, total, mean):
    """Squared distances to ``mean`` of n elements, each where their own mean is."""
    apart = total / tl.maximum(n, 1) - mean
    return n * apart * apart


@triton.jit(do_not_specialize=["i0"])
def persistent_T28(mailbox_ptr, T1_ptr, T3_ptr, T5_ptr, T7_ptr, T0_ptr, T28_ptr, i0: tl.int32):
    member = tl.program_id(0) % 4
    team = tl.program_id(0) // 4
    teams = tl.num_programs(0) // 4
    epochs_ptr = mailbox_ptr + teams * 32
    epoch = tl.load(epochs_ptr + tl.program_id(0)).to(tl.int32)
    own = member * 2 + tl.arange(0, 2)
    every = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
    first = member * 7168
    c = tl.arange(0, 1024)[None, :]

    for row in tl.range(team, tl.cdiv(i0, 2), teams, num_stages=1):
        x = row.to(tl.int64) * 2 + tl.arange(0, 2)[:, None]
        offs_0 = x * 28672 + first

        T0_0 = tl.load(T0_ptr + offs_0 + c, cache_modifier=".cg").to(tl.float32)
        T1_0 = tl.load(T1_ptr + first + c, eviction_policy="evict_last").to(tl.float32)
        T3_0 = tl.load(T3_ptr + first + c, eviction_policy="evict_last").to(tl.float32)
        T0_1 = tl.load(T0_ptr + offs_0 + 1024 + c, cache_modifier=".cg").to(tl.float32)
        T1_1 = tl.load(T1_ptr + first + 1024 + c, eviction_policy="evict_last").to(tl.float32)
        T3_1 = tl.load(T3_ptr + first + 1024 + c, eviction_policy="evict_last").to(tl.float32)
        T0_2 = tl.load(T0_ptr + offs_0 + 2048 + c, cache_modifier=".cg").to(tl.float32)
        T1_2 = tl.load(T1_ptr + first + 2048 + c, eviction_policy="evict_last").to(tl.float32)
        T3_2 = tl.load(T3_ptr + first + 2048 + c, eviction_policy="evict_last").to(tl.float32)
        T0_3 = tl.load(T0_ptr + offs_0 + 3072 + c, cache_modifier=".cg").to(tl.float32)
        T1_3 = tl.load(T1_ptr + first + 3072 + c, eviction_policy="evict_last").to(tl.float32)
        T3_3 = tl.load(T3_ptr + first + 3072 + c, eviction_policy="evict_last").to(tl.float32)
        T0_4 = tl.load(T0_ptr + offs_0 + 4096 + c, cache_modifier=".cg").to(tl.float32)
        T1_4 = tl.load(T1_ptr + first + 4096 + c, eviction_policy="evict_last").to(tl.float32)
        T3_4 = tl.load(T3_ptr + first + 4096 + c, eviction_policy="evict_last").to(tl.float32)
        T0_5 = tl.load(T0_ptr + offs_0 + 5120 + c, cache_modifier=".cg").to(tl.float32)
        T1_5 = tl.load(T1_ptr + first + 5120 + c, eviction_policy="evict_last").to(tl.float32)
        T3_5 = tl.load(T3_ptr + first + 5120 + c, eviction_policy="evict_last").to(tl.float32)
        T0_6 = tl.load(T0_ptr + offs_0 + 6144 + c, cache_modifier=".cg").to(tl.float32)
        T1_6 = tl.load(T1_ptr + first + 6144 + c, eviction_policy="evict_last").to(tl.float32)
        T3_6 = tl.load(T3_ptr + first + 6144 + c, eviction_policy="evict_last").to(tl.float32)
        ahead = tl.minimum((row + teams) * 2 + tl.arange(0, 2)[:, None], i0 - 1).to(tl.int64)
        prefetch(T0_ptr + ahead * 28672 + first + (tl.minimum(tl.arange(0, 128)[None, :] * 64, 7167)))

        T10_0 = T1_0 + T3_0
        T12_0 = T0_0 + T10_0
        T10_1 = T1_1 + T3_1
        T12_1 = T0_1 + T10_1
        T10_2 = T1_2 + T3_2
        T12_2 = T0_2 + T10_2
        T10_3 = T1_3 + T3_3
        T12_3 = T0_3 + T10_3
        T10_4 = T1_4 + T3_4
        T12_4 = T0_4 + T10_4
        T10_5 = T1_5 + T3_5
        T12_5 = T0_5 + T10_5
        T10_6 = T1_6 + T3_6
        T12_6 = T0_6 + T10_6
        T13_part = tl.sum(T12_0 + T12_1 + T12_2 + T12_3 + T12_4 + T12_5 + T12_6, axis=1)
        T13_mean = T13_part / 7168
        T18_acc = square(T12_0 - T13_mean[:, None])
        T18_acc += square(T12_1 - T13_mean[:, None]) + square(T12_2 - T13_mean[:, None])
        T18_acc += square(T12_3 - T13_mean[:, None]) + square(T12_4 - T13_mean[:, None])
        T18_acc += square(T12_5 - T13_mean[:, None]) + square(T12_6 - T13_mean[:, None])
        T18_part = tl.sum(T18_acc, axis=1)
        epoch += 1
        box = mailbox_ptr + ((epoch & 1) * teams + team) * 16
        post(box + own, epoch, T13_part)
        post(box + 8 + own, epoch, T18_part)
        bits_0, bits_1 = collect_2(box + every, box + 8 + every, epoch)
        tl.debug_barrier()
        T13_parts = bits_0.to(tl.float32, bitcast=True)
        T18_parts = bits_1.to(tl.float32, bitcast=True)
        T13_counts = tl.minimum(tl.maximum(28672 - tl.arange(0, 4)[:, None] * 7168, 0), 7168).to(tl.float32)
        T13_all = tl.sum(T13_parts, axis=0)
        T13_mean = T13_all / 28672
        T18_all = tl.sum(T18_parts + between(T13_counts, T13_parts, T13_mean[None, :]), axis=0)
        T13 = T13_all[:, None]
        T18 = T18_all[:, None]

        T15 = T13 / 28672.0
        T20 = T18 / 28672.0
        T21 = T20 + 1e-05
        T22 = tl.rsqrt(T21)

        T5_0 = tl.load(T5_ptr + first + c, eviction_policy="evict_last").to(tl.float32)
        T7_0 = tl.load(T7_ptr + first + c, eviction_policy="evict_last").to(tl.float32)
        T16_0 = T12_0 - T15
        T23_0 = T16_0 * T22
        T25_0 = T23_0 * T5_0
        T27_0 = T25_0 + T7_0
        tl.store(T28_ptr + offs_0 + c, T27_0)

        T5_1 = tl.load(T5_ptr + first + 1024 + c, eviction_policy="evict_last").to(tl.float32)
        T7_1 = tl.load(T7_ptr + first + 1024 + c, eviction_policy="evict_last").to(tl.float32)
        T16_1 = T12_1 - T15
        T23_1 = T16_1 * T22
        T25_1 = T23_1 * T5_1
        T27_1 = T25_1 + T7_1
        tl.store(T28_ptr + offs_0 + 1024 + c, T27_1)

        T5_2 = tl.load(T5_ptr + first + 2048 + c, eviction_policy="evict_last").to(tl.float32)
        T7_2 = tl.load(T7_ptr + first + 2048 + c, eviction_policy="evict_last").to(tl.float32)
        T16_2 = T12_2 - T15
        T23_2 = T16_2 * T22
        T25_2 = T23_2 * T5_2
        T27_2 = T25_2 + T7_2
        tl.store(T28_ptr + offs_0 + 2048 + c, T27_2)

        T5_3 = tl.load(T5_ptr + first + 3072 + c, eviction_policy="evict_last").to(tl.float32)
        T7_3 = tl.load(T7_ptr + first + 3072 + c, eviction_policy="evict_last").to(tl.float32)
        T16_3 = T12_3 - T15
        T23_3 = T16_3 * T22
        T25_3 = T23_3 * T5_3
        T27_3 = T25_3 + T7_3
        tl.store(T28_ptr + offs_0 + 3072 + c, T27_3)

        T5_4 = tl.load(T5_ptr + first + 4096 + c, eviction_policy="evict_last").to(tl.float32)
        T7_4 = tl.load(T7_ptr + first + 4096 + c, eviction_policy="evict_last").to(tl.float32)
        T16_4 = T12_4 - T15
        T23_4 = T16_4 * T22
        T25_4 = T23_4 * T5_4
        T27_4 = T25_4 + T7_4
        tl.store(T28_ptr + offs_0 + 4096 + c, T27_4)

        T5_5 = tl.load(T5_ptr + first + 5120 + c, eviction_policy="evict_last").to(tl.float32)
        T7_5 = tl.load(T7_ptr + first + 5120 + c, eviction_policy="evict_last").to(tl.float32)
        T16_5 = T12_5 - T15
        T23_5 = T16_5 * T22
        T25_5 = T23_5 * T5_5
        T27_5 = T25_5 + T7_5
        tl.store(T28_ptr + offs_0 + 5120 + c, T27_5)

        T5_6 = tl.load(T5_ptr + first + 6144 + c, eviction_policy="evict_last").to(tl.float32)
        T7_6 = tl.load(T7_ptr + first + 6144 + c, eviction_policy="evict_last").to(tl.float32)
        T16_6 = T12_6 - T15
        T23_6 = T16_6 * T22
        T25_6 = T23_6 * T5_6
        T27_6 = T25_6 + T7_6
        tl.store(T28_ptr + offs_0 + 6144 + c, T27_6)

    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))
