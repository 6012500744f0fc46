"""Copies in Triton: of aligned words; and of addresses that promise no alignment, so that loads are one word wide."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def copy_words(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(source_ptr + at, mask=at < count)
    tl.store(target_ptr + at, word, mask=at < count)


@triton.jit
def copy_aligned(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """Of tensors that begin at multiples of 16 bytes."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(source_ptr + at, mask=at < count)
    tl.store(target_ptr + at, word, mask=at < count)
