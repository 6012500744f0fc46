"""What torch adds to the mean square of a row where a norm's eps is left out."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional


@lru_cache
def rms_norm_eps(dtype: torch.dtype) -> float:
    """The eps of torch.nn.functional.rms_norm for an input of ``dtype``, a floating one.

    Torch's documentation says the spacing of ``dtype`` at 1; for 16 bits, newer versions take that of float32, in which
    they compute.  So torch is asked: a row of 1e-3 is normed to about 1 with the one, and to about 0.01 with the other.
    """
    own, wide = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    if own <= wide:
        return own
    normed = functional.rms_norm(torch.full((8,), 1e-3, dtype=dtype), (8,)).double()
    return wide if normed.mean() > 0.1 else own
