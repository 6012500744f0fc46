# mix_order_T19_T18_partial
#   T4 = cast(T0)
#   T5 = mul(T4, T3)
#   T6 = cast(T1)
#   T7 = cast(T2)
#   T8 = broadcast(T7)
#   T9 = mul(T6, T8)
#   T10 = mul(T9, T5)
#   T11 = sum(T10)
#   T12 = broadcast(T11)
#   T13 = div(T12, 32768.0)
#   T14 = mul(T5, T13)
#   T15 = sub(T9, T14)
#   T16 = mul(T15, T3)
#   T17 = mul(T6, T5)
#   T19 = cast(T16)
#   T18_partial = sum(T17)
# finish_T20
#   T18 = sum(T18_partial)
#   T20 = cast(T18)

import triton
import triton.language as tl


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
def together(a0, a1, b0, b1):
    """Several reductions at once."""
    return a0 + b0, a1 + b1


@triton.jit
def post(ptr, epoch, value):
    """Store 32 bits of ``value`` below ``epoch``: one word, so that neither is seen without the other."""
    bits = value.to(tl.int32, bitcast=True)
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .u32 thread;
            .reg .b64 word;
            mov.b64 word, {$2, $3};
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.relaxed.gpu.global.b64 [$1], word;
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
def begin_mix_order_T19_T18_partial(T0_ptr, T3_ptr, T1_ptr, first, c, T2_0, T2_1, x):
    x0 = x
    x1 = x + 1
    offs_0 = x0 * 32768 + first
    offs_1 = x1 * 32768 + first

    T3_x0 = tl.load(T3_ptr + x0)
    T1_0_x0_words = packed(tl.load(T1_ptr + offs_0 + c))
    T1_0_x0 = unpacked_bf16(T1_0_x0_words)
    T0_0_x0_words = packed(tl.load(T0_ptr + offs_0 + c))
    T0_0_x0 = unpacked_bf16(T0_0_x0_words)
    T1_1_x0_words = packed(tl.load(T1_ptr + offs_0 + 1024 + c))
    T1_1_x0 = unpacked_bf16(T1_1_x0_words)
    T0_1_x0_words = packed(tl.load(T0_ptr + offs_0 + 1024 + c))
    T0_1_x0 = unpacked_bf16(T0_1_x0_words)
    T3_x1 = tl.load(T3_ptr + x1)
    T1_0_x1_words = packed(tl.load(T1_ptr + offs_1 + c))
    T1_0_x1 = unpacked_bf16(T1_0_x1_words)
    T0_0_x1_words = packed(tl.load(T0_ptr + offs_1 + c))
    T0_0_x1 = unpacked_bf16(T0_0_x1_words)
    T1_1_x1_words = packed(tl.load(T1_ptr + offs_1 + 1024 + c))
    T1_1_x1 = unpacked_bf16(T1_1_x1_words)
    T0_1_x1_words = packed(tl.load(T0_ptr + offs_1 + 1024 + c))
    T0_1_x1 = unpacked_bf16(T0_1_x1_words)

    T9_0_x0 = T1_0_x0 * T2_0
    T5_0_x0 = T0_0_x0 * T3_x0
    T10_0_x0 = T9_0_x0 * T5_0_x0
    T9_1_x0 = T1_1_x0 * T2_1
    T5_1_x0 = T0_1_x0 * T3_x0
    T10_1_x0 = T9_1_x0 * T5_1_x0
    T9_0_x1 = T1_0_x1 * T2_0
    T5_0_x1 = T0_0_x1 * T3_x1
    T10_0_x1 = T9_0_x1 * T5_0_x1
    T9_1_x1 = T1_1_x1 * T2_1
    T5_1_x1 = T0_1_x1 * T3_x1
    T10_1_x1 = T9_1_x1 * T5_1_x1
    T11_part_x0, T11_part_x1 = tl.reduce((T10_0_x0 + T10_1_x0, T10_0_x1 + T10_1_x1), 0, together)

    words = (
        T1_0_x0_words,
        T0_0_x0_words,
        T1_1_x0_words,
        T0_1_x0_words,
        T1_0_x1_words,
        T0_0_x1_words,
        T1_1_x1_words,
        T0_1_x1_words,
    )
    return words, T11_part_x0, T11_part_x1


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
def finish_T20(T18_partial_ptr, T20_ptr, block):
    x = block * 128 + tl.arange(0, 128)[None, :]
    c = tl.arange(0, 32)[:, None]
    r_mask = c < 24

    T18_partial = tl.load(T18_partial_ptr + x + c * 32768, mask=r_mask, cache_modifier=".cg")

    T18 = tl.sum(tl.where(r_mask, T18_partial, 0.0), axis=0)[None, :]

    tl.store(T20_ptr + x, T18)


@triton.jit(do_not_specialize=["i0", "finish_T20_blocks"])
def mix_order_T19_T20(
    mailbox_ptr,
    T0_ptr,
    T3_ptr,
    T1_ptr,
    T2_ptr,
    T19_ptr,
    T18_partial_ptr,
    T20_ptr,
    i0: tl.int32,
    finish_T20_blocks: tl.int32,
):
    member = tl.program_id(0) % 16
    team = tl.program_id(0) // 16
    teams = tl.num_programs(0) // 16
    epochs_ptr = mailbox_ptr + teams * 128
    epoch = tl.load(epochs_ptr + tl.program_id(0)).to(tl.int32)
    own = member
    every = tl.arange(0, 16)
    first = member * 2048
    c = tl.arange(0, 1024)
    T2_0 = tl.load(T2_ptr + first + c).to(tl.float32)
    T2_1 = tl.load(T2_ptr + first + 1024 + c).to(tl.float32)
    T18_partial_acc_0 = tl.zeros([1024], tl.float32)
    T18_partial_acc_1 = tl.zeros([1024], tl.float32)

    x = (team * 2).to(tl.int64)
    words, T11_part_x0, T11_part_x1 = begin_mix_order_T19_T18_partial(T0_ptr, T3_ptr, T1_ptr, first, c, T2_0, T2_1, x)
    epoch += 1
    box = mailbox_ptr + ((epoch & 3) * teams + team) * 32
    post(box + own, epoch, T11_part_x0)
    post(box + 16 + own, epoch, T11_part_x1)

    for row in tl.range(team * 2, i0, teams * 2, num_stages=3):
        x = tl.minimum(row + teams * 2, i0 - 2).to(tl.int64)
        ahead, T11_part_x0, T11_part_x1 = begin_mix_order_T19_T18_partial(
            T0_ptr, T3_ptr, T1_ptr, first, c, T2_0, T2_1, x
        )
        epoch += 1
        box = mailbox_ptr + ((epoch & 3) * teams + team) * 32
        post(box + own, epoch, T11_part_x0)
        post(box + 16 + own, epoch, T11_part_x1)
        x = row.to(tl.int64)
        x0 = x
        x1 = x + 1
        offs_0 = x0 * 32768 + first
        offs_1 = x1 * 32768 + first

        T3_x0 = tl.load(T3_ptr + x0)
        T3_x1 = tl.load(T3_ptr + x1)
        box = mailbox_ptr + (((epoch - 1) & 3) * teams + team) * 32
        bits_0, bits_1 = collect_2(box + every, box + 16 + every, epoch - 1)
        T11_x0 = tl.sum(bits_0.to(tl.float32, bitcast=True), axis=0)
        T11_x1 = tl.sum(bits_1.to(tl.float32, bitcast=True), axis=0)

        T1_0_x0 = unpacked_bf16(words[0])
        T0_0_x0 = unpacked_bf16(words[1])
        T5_0_x0 = T0_0_x0 * T3_x0
        T17_0_x0 = T1_0_x0 * T5_0_x0
        T9_0_x0 = T1_0_x0 * T2_0
        T13_x0 = T11_x0 / 32768.0
        T14_0_x0 = T5_0_x0 * T13_x0
        T15_0_x0 = T9_0_x0 - T14_0_x0
        T16_0_x0 = T15_0_x0 * T3_x0
        T18_partial_acc_0 += T17_0_x0
        tl.store(T19_ptr + offs_0 + c, T16_0_x0)

        T1_1_x0 = unpacked_bf16(words[2])
        T0_1_x0 = unpacked_bf16(words[3])
        T5_1_x0 = T0_1_x0 * T3_x0
        T17_1_x0 = T1_1_x0 * T5_1_x0
        T9_1_x0 = T1_1_x0 * T2_1
        T14_1_x0 = T5_1_x0 * T13_x0
        T15_1_x0 = T9_1_x0 - T14_1_x0
        T16_1_x0 = T15_1_x0 * T3_x0
        T18_partial_acc_1 += T17_1_x0
        tl.store(T19_ptr + offs_0 + 1024 + c, T16_1_x0)

        T1_0_x1 = unpacked_bf16(words[4])
        T0_0_x1 = unpacked_bf16(words[5])
        T5_0_x1 = T0_0_x1 * T3_x1
        T17_0_x1 = T1_0_x1 * T5_0_x1
        T9_0_x1 = T1_0_x1 * T2_0
        T13_x1 = T11_x1 / 32768.0
        T14_0_x1 = T5_0_x1 * T13_x1
        T15_0_x1 = T9_0_x1 - T14_0_x1
        T16_0_x1 = T15_0_x1 * T3_x1
        T18_partial_acc_0 += T17_0_x1
        tl.store(T19_ptr + offs_1 + c, T16_0_x1)

        T1_1_x1 = unpacked_bf16(words[6])
        T0_1_x1 = unpacked_bf16(words[7])
        T5_1_x1 = T0_1_x1 * T3_x1
        T17_1_x1 = T1_1_x1 * T5_1_x1
        T9_1_x1 = T1_1_x1 * T2_1
        T14_1_x1 = T5_1_x1 * T13_x1
        T15_1_x1 = T9_1_x1 - T14_1_x1
        T16_1_x1 = T15_1_x1 * T3_x1
        T18_partial_acc_1 += T17_1_x1
        tl.store(T19_ptr + offs_1 + 1024 + c, T16_1_x1)
        words = ahead

    partial = team * 32768 + first
    tl.store(T18_partial_ptr + partial + c, T18_partial_acc_0)
    tl.store(T18_partial_ptr + partial + 1024 + c, T18_partial_acc_1)
    tl.store(epochs_ptr + tl.program_id(0), epoch.to(tl.int64))
    meet_all(mailbox_ptr + 3840)
    for block in tl.range(tl.program_id(0), finish_T20_blocks, tl.num_programs(0), num_stages=1):
        finish_T20(T18_partial_ptr, T20_ptr, block)
