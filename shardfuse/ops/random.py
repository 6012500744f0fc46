"""Random numbers that do not depend on how a tensor is sharded: a counter by the unsharded index.

Element i of a draw is of the words of Philox 4x32-10 for the key ``seed`` and the counter ``(i, offset)``.  A uniform
number of 32 bits or fewer takes one of the four, word i % 4 of the counter ``(i // 4, offset)``: a kernel that has
neighbours computes the four once.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math

import torch

_LOW = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
"""Random bits of a uniform number: as many as the type holds below 1."""
_OF_31_BITS = 4.6566127342e-10
"""The largest float32 whose product with 2^31 - 1 is below 1."""


def philox(seed: int | torch.Tensor, offset: int, index: torch.Tensor) -> list[torch.Tensor]:
    """Four words of 32 bits (as int64) for each element of ``index`` (int64)."""
    c0, c1 = index & _LOW, (index >> 32) & _LOW
    c2, c3 = torch.full_like(index, offset & _LOW), torch.full_like(index, (offset >> 32) & _LOW)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        low_a, high_a = c0 * _ROUND_A, c2 * _ROUND_B  # wraps: 64 bits of the product, as they are
        c0, c2 = ((high_a >> 32) & _LOW) ^ c1 ^ k0, ((low_a >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = high_a & _LOW, low_a & _LOW
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return [c0, c1, c2, c3]


def uniform(seed: int, offset: int, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In [0, 1), never rounded to 1."""
    if dtype == torch.float64:
        words = philox(seed, offset, index)
        return _double(words[0], words[1])
    bits = BITS[dtype]
    word = torch.stack(philox(seed, offset, index >> 2)).gather(0, (index & 3).unsqueeze(0)).squeeze(0)
    return ((word >> (32 - bits)).float() * 2.0**-bits).to(dtype)


def philox_uniform(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """In [0, 1), float32: Triton's ``tl.rand`` of both (int64), which takes the low 32 bits of ``index``."""
    word = philox(seed, 0, index & _LOW)[0]
    return torch.where(word < 1 << 31, word, _LOW - word).float() * _OF_31_BITS


def normal(seed: int, offset: int, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Mean 0, deviation 1, by Box and Muller."""
    words = philox(seed, offset, index)
    if dtype == torch.float64:
        u, v = _double(words[0], words[1]), _double(words[2], words[3])
    else:
        u, v = ((w >> 8).float() * 2.0**-24 for w in words[:2])
    return (torch.sqrt(-2 * torch.log(1 - u)) * torch.cos(2 * math.pi * v)).to(dtype)


def _double(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def between(u: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """``u`` in [0, 1) taken to [low, high); what rounding takes to ``high`` is the number below it."""
    end = torch.tensor(high, dtype=u.dtype, device=u.device)
    wide = u if u.dtype == torch.float64 else u.float()
    found = (low + (high - low) * wide).to(u.dtype)
    return torch.where(found >= end, below(end, low), found) if high > low else found


def below(end: torch.Tensor, low: float) -> torch.Tensor:
    """The number before ``end`` in its type, on the way to ``low``."""
    return torch.nextafter(end, torch.full_like(end, low))
