"""Inputs that outputs are written to: may they be, and has each element a place of its own?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InputError
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView


def written_places(fusion: Fusion) -> list[int]:
    """The places of these inputs among all."""
    written = frozenset(fusion.aliases.values())
    return [k for k, declared in enumerate(fusion.inputs) if declared.val in written]


def are_unwritable(arguments: Sequence[object], places: Sequence[int]) -> list[bool]:
    """Of the arguments at ``places``, whether torch refuses to write to it: programs are found by this."""
    return [_is_unwritable(arguments[k]) for k in places if k < len(arguments)]


def _is_unwritable(argument: object) -> bool:
    """Was it made in inference mode, which has ended?"""
    return isinstance(argument, torch.Tensor) and argument.is_inference() and not torch.is_inference_mode_enabled()


def check_written(k: int, val: TensorView, tensor: torch.Tensor) -> None:
    """May an output be written over input ``k``?  Raises ``InputError``."""
    if _is_unwritable(tensor):
        raise InputError(
            k, val.name, "a tensor made in inference mode, which an output is written to",
            "one that may be written to now that this mode has ended",
            "pass its clone(), or execute in inference mode too",
        )  # fmt: skip
    _check_places(k, val, tensor)


def _check_places(k: int, val: TensorView, tensor: torch.Tensor) -> None:
    """Has each element of an input that an output is written to a place of its own?"""
    by_stride = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach, is_doubtful = 0, False
    for stride, n in by_stride:
        is_doubtful = is_doubtful or stride <= reach
        reach += stride * (n - 1)
    if not is_doubtful or tensor.numel() == 0:
        return
    places: Any = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, n in by_stride if by_stride[0][0] else ():
        places = (places[:, None] + stride * torch.arange(n, device="cpu")).flatten().unique()
    if len(places) < tensor.numel():
        raise InputError(
            k, val.name, f"strides {list(tensor.stride())} for shape {list(tensor.shape)}",
            "a tensor whose elements have a place each, because an output is written to it",
            "pass .contiguous(), or return the output instead",
        )  # fmt: skip
