# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Are tensors like those for which something was found?  One call of C's, by which torch.compile compares its inputs.

To ask the shape, strides, dtype, device and type of each in Python takes three times as long as all of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._C._dynamo import guards

from .plain_arguments import TENSORS

Check = Callable[..., bool]
"""``check(*tensors)``, of as many tensors."""

_Guards: Any = getattr(guards, "TensorGuards", None)


def check_of(tensors: Sequence[torch.Tensor]) -> Check | None:
    """What says of as many tensors whether each is like its one of ``tensors``.

    None where one of these is of a subclass, or where torch has no such function.

    Alike are the type, shape, strides, dtype, device and ``requires_grad``, the bits that say that the storage holds
    something else (negative, conjugate), and what takes ops in torch's place: subclasses, torch.autocast on that
    device, inference mode, torch.func, torch.jit.trace.  It says no where one tensor comes twice.  Not compared are
    whether gradients are recorded, dispatch modes, tangents of forward mode, and values.
    """
    if _Guards is None or not TENSORS.issuperset(map(type, tensors)):
        return None
    return cast(Check, _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check)
