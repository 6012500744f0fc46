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
            .reg .b64 word<8>;
            .reg .u32 bits<8>, found<8>;
        again:
            ld.relaxed.gpu.global.b64 word0, [$8];
            ld.relaxed.gpu.global.b64 word1, [$9];
            ld.relaxed.gpu.global.b64 word2, [$10];
            ld.relaxed.gpu.global.b64 word3, [$11];
            ld.relaxed.gpu.global.b64 word4, [$12];
            ld.relaxed.gpu.global.b64 word5, [$13];
            ld.relaxed.gpu.global.b64 word6, [$14];
            ld.relaxed.gpu.global.b64 word7, [$15];
            mov.b64 {bits0, found0}, word0;
            setp.ne.u32 wrong, found0, $16;
            mov.b64 {bits1, found1}, word1;
            setp.ne.or.u32 wrong, found1, $16, wrong;
            mov.b64 {bits2, found2}, word2;
            setp.ne.or.u32 wrong, found2, $16, wrong;
            mov.b64 {bits3, found3}, word3;
            setp.ne.or.u32 wrong, found3, $16, wrong;
            mov.b64 {bits4, found4}, word4;
            setp.ne.or.u32 wrong, found4, $16, wrong;
            mov.b64 {bits5, found5}, word5;
            setp.ne.or.u32 wrong, found5, $16, wrong;
            mov.b64 {bits6, found6}, word6;
            setp.ne.or.u32 wrong, found6, $16, wrong;
            mov.b64 {bits7, found7}, word7;
            setp.ne.or.u32 wrong, found7, $16, wrong;
            @wrong bra again;
            mov.u32 $0, bits0;
            mov.u32 $1, bits1;
            mov.u32 $2, bits2;
            mov.u32 $3, bits3;
            mov.u32 $4, bits4;
            mov.u32 $5, bits5;
            mov.u32 $6, bits6;
            mov.u32 $7, bits7;
        }""",
        "=r,=r,=r,=r,=r,=r,=r,=r,l,l,l,l,l,l,l,l,r,r,r,r",
        [ptr0, ptr1, epoch],
        dtype=(tl.int32, tl.int32),
        is_pure=False,
        pack=4,
    )


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); what is below 1e-38 is 0, which saves the care for denormals."""
    e = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=["i0", "i1", "i2"])
def looped_T24(mailbox_ptr, T0_ptr, T15_ptr, T18_ptr, T24_ptr, i0: tl.int32, i1: tl.int32, i2: tl.int32):
    i2 = i2 // 16 * 16
    member = tl.program_id(0) % 64
    team = tl.program_id(0) // 64
    teams = tl.num_programs(0) // 64
    epochs_ptr = mailbox_ptr + teams * 1024
    epoch = tl.load(epochs_ptr + tl.program_id(0)).to(tl.int32)
    own = member * 4 + tl.arange(0, 4)
    every = tl.arange(0, 64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    first = member * i2
    last = tl.minimum(first + i2, i1)
    groups_k0 = tl.arange(0, 4)[:, None] == tl.arange(0, 64)[None, :] // 20
    groups_k1 = tl.arange(0, 4)[:, None] == (64 + tl.arange(0, 16)[None, :]) // 20
    c = tl.arange(0, 8)[:, None]

    for row in tl.range(team, tl.cdiv(i0, 80), teams, num_stages=1):
        x0 = row.to(tl.int64) * 80
        k0 = tl.arange(0, 64)[None, :]
        k1 = 64 + tl.arange(0, 16)[None, :]
        offs_0 = x0 // 640 * 2621440 + x0 // 80 % 8 * 80 + k0
        offs_1 = x0 // 640 * 2621440 + x0 // 80 % 8 * 80 + k1
        offs_2 = x0 // 80 % 8 * 80 + k0
        offs_3 = x0 // 80 % 8 * 80 + k1

        T3_n_k0 = tl.zeros([], tl.float32)
        T3_acc_k0 = tl.zeros([4, 64], tl.float32)
        T8_acc_k0 = tl.zeros([4, 64], tl.float32)
        T3_n_k1 = tl.zeros([], tl.float32)
        T3_acc_k1 = tl.zeros([8, 16], tl.float32)
        T8_acc_k1 = tl.zeros([8, 16], tl.float32)
        for start in tl.range(first, last, 8, num_stages=3):
            r = start + c
            T0_k0 = tl.load(T0_ptr + offs_0 + r * 640, eviction_policy="evict_last").to(tl.float32)
            T0_k1 = tl.load(T0_ptr + offs_1 + r * 640, eviction_policy="evict_last").to(tl.float32)
            T3_lanes = tl.reshape(T0_k0, [2, 4, 64])
            T3_n_k0, T3_acc_k0, T8_acc_k0 = add_moments(T3_n_k0, T3_acc_k0, T8_acc_k0, T3_lanes, 0)
            T3_lanes = tl.reshape(T0_k1, [1, 8, 16])
            T3_n_k1, T3_acc_k1, T8_acc_k1 = add_moments(T3_n_k1, T3_acc_k1, T8_acc_k1, T3_lanes, 0)
        T3_part_column_k0 = tl.sum(T3_acc_k0, axis=0)
        T3_part_column_k1 = tl.sum(T3_acc_k1, axis=0)
        T3_part_groups = tl.sum(tl.where(groups_k0, T3_part_column_k0[None, :], 0.0), axis=1)
        T3_part_groups += tl.sum(tl.where(groups_k1, T3_part_column_k1[None, :], 0.0), axis=1)
        T3_part = T3_part_groups
        T3_mean = T3_part / (tl.maximum(last - first, 1) * 20)
        T3_part_group = T3_mean
        T3_centre_k0 = tl.sum(tl.where(groups_k0, T3_part_group[:, None], 0.0), axis=0)[None, :]
        T3_centre_k1 = tl.sum(tl.where(groups_k1, T3_part_group[:, None], 0.0), axis=0)[None, :]
        T8_part_column_k0 = tl.sum(T8_acc_k0 + between(T3_n_k0, T3_acc_k0, T3_centre_k0), axis=0)
        T8_part_column_k1 = tl.sum(T8_acc_k1 + between(T3_n_k1, T3_acc_k1, T3_centre_k1), axis=0)
        T8_part_groups = tl.sum(tl.where(groups_k0, T8_part_column_k0[None, :], 0.0), axis=1)
        T8_part_groups += tl.sum(tl.where(groups_k1, T8_part_column_k1[None, :], 0.0), axis=1)
        T8_part = T8_part_groups
        epoch += 1
        box = mailbox_ptr + ((epoch & 1) * teams + team) * 512
        post(box + own, epoch, T3_part)
        post(box + 256 + own, epoch, T8_part)
        bits_0, bits_1 = collect_2(box + every, box + 256 + every, epoch)
        tl.debug_barrier()
        T3_parts = bits_0.to(tl.float32, bitcast=True)
        T8_parts = bits_1.to(tl.float32, bitcast=True)
        T3_counts = (tl.minimum(tl.maximum(i1 - tl.arange(0, 64)[:, None] * i2, 0), i2) * 20).to(tl.float32)
        T3_all = tl.sum(T3_parts, axis=0)
        T3_mean = T3_all / (i1 * 20)
        T8_all = tl.sum(T8_parts + between(T3_counts, T3_parts, T3_mean[None, :]), axis=0)
        T3_group = T3_all
        T3_k0 = tl.sum(tl.where(groups_k0, T3_group[:, None], 0.0), axis=0)[None, :]
        T3_k1 = tl.sum(tl.where(groups_k1, T3_group[:, None], 0.0), axis=0)[None, :]
        T8_group = T8_all
        T8_k0 = tl.sum(tl.where(groups_k0, T8_group[:, None], 0.0), axis=0)[None, :]
        T8_k1 = tl.sum(tl.where(groups_k1, T8_group[:, None], 0.0), axis=0)[None, :]
        T5_k0 = T3_k0 / 81920.0
        T10_k0 = T8_k0 / 81920.0
        T11_k0 = T10_k0 + 1e-05
        T12_k0 = tl.rsqrt(T11_k0)
        T15_k0 = tl.load(T15_ptr + offs_2).to(tl.float32)
        T18_k0 = tl.load(T18_ptr + offs_2).to(tl.float32)
        T5_k1 = T3_k1 / 81920.0
        T10_k1 = T8_k1 / 81920.0
        T11_k1 = T10_k1 + 1e-05
        T12_k1 = tl.rsqrt(T11_k1)
        T15_k1 = tl.load(T15_ptr + offs_3).to(tl.float32)
        T18_k1 = tl.load(T18_ptr + offs_3).to(tl.float32)

        back = first + first + (tl.cdiv(last - first, 8) - 1) * 8
        for step in tl.range(first, last, 8, num_stages=3):
            start = back - step
            r = start + c
            T0_k0 = tl.load(T0_ptr + offs_0 + r * 640, eviction_policy="evict_last").to(tl.float32)
            T0_k1 = tl.load(T0_ptr + offs_1 + r * 640, eviction_policy="evict_last").to(tl.float32)
            T6_k0 = T0_k0 - T5_k0
            T13_k0 = T6_k0 * T12_k0
            T21_k0 = T13_k0 * T15_k0
            T22_k0 = T21_k0 + T18_k0
            T23_k0 = T22_k0 * sigmoid(T22_k0)
            tl.store(T24_ptr + offs_0 + r * 640, T23_k0)
            T6_k1 = T0_k1 - T5_k1
            T13_k1 = T6_k1 * T12_k1
            T21_k1 = T13_k1 * T15_k1
            T22_k1 = T21_k1 + T18_k1
            T23_k1 = T22_k1 * sigmoid(T22_k1)
            tl.store(T24_ptr + offs_1 + r * 640, T23_k1)

    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))
