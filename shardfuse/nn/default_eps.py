"""What torch adds to the mean square of a row where a norm's eps is left out."""

from __future__ import annotations

import torch
from torch.nn import functional

_WIDE = torch.finfo(torch.float32).eps


def rms_norm_eps(dtype: torch.dtype) -> float:
    """The eps of torch.nn.functional.rms_norm for an input of ``dtype``, a floating one."""
    return _EPS.get(dtype, _WIDE)


def _of_16_bits(dtype: torch.dtype) -> float:
    """Torch's documentation says the spacing of ``dtype`` at 1; newer versions take that of float32, as they compute.

    So torch is asked: a row of 1e-3 is normed to about 1 with the one, and to about 0.01 with the other.
    """
    normed = functional.rms_norm(torch.full((8,), 1e-3, dtype=dtype, device="cpu"), (8,)).double()
    return _WIDE if normed.mean() > 0.1 else torch.finfo(dtype).eps


_EPS = {dtype: _of_16_bits(dtype) for dtype in (torch.bfloat16, torch.float16)}
"""Found once, as torch.compile cannot follow the question."""
_EPS[torch.float64] = torch.finfo(torch.float64).eps
