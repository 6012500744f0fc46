"""What a torch call is: how the axes of its inputs and outputs meet, and how torch does it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ..ir.call import AlongAxis, Call
from ..ir.scalar import Number, Size
from .call_extents import Fit

AxisNames = tuple[str, ...]
Shapes = Sequence[Sequence[int]]
Arguments = Sequence[torch.Tensor | Number]
Result = torch.Tensor | tuple[torch.Tensor, ...]
Rows = Callable[[], torch.Tensor]
"""The unsharded number of each of this rank's rows of a query, row-major over all axes but the last two."""
C = TypeVar("C", bound=Call)


DRAWN = ("rng_seed", "rng_offset")
"""Roles of numbers that no caller gives: the seed and the offset from which a random call draws."""


@dataclass(frozen=True)
class Signature:
    """Names for the axes of each input tensor and of each output, as in an einsum.

    Axes of one name are one axis (or 1 in some of the inputs).  A name that no output has is contracted: where it is
    sharded, each rank's result is a partial sum.  A trailing ``*`` marks an axis that may not be sharded.
    ``extents``: of the names that outputs alone have; -1 where the sizes are not known yet.
    ``alike``: names whose axes have to be of one extent, of which 1 is not repeated.
    ``fits``: what else extents have to be beside each other.
    """

    inputs: tuple[AxisNames, ...]
    outputs: tuple[AxisNames, ...]
    extents: Mapping[str, int] = field(default_factory=dict[str, int])
    alike: Collection[str] = ()
    fits: Sequence[Fit] = ()


@dataclass(frozen=True)
class TorchCall:
    """``signature(shapes, call)``: shapes of the input tensors, -1 where symbolic.

    ``evaluate(values, call)``: tensors and numbers in the order of the inputs.  ``is_view``: the result is a view of
    the input's storage.  ``summary``: one line for the list of ops.
    ``evaluate_drawing(values, call, rows)``: as ``evaluate``, of a call that draws numbers by rows of the input whose
    role is ``query``.
    ``indexed(call)``: of a call that reads or writes at indices, what those are.
    ``evaluate_into(values, call, out)``: as ``evaluate``, of a call that can write into ``out``.
    """

    signature: Callable[[Shapes, Call], Signature]
    evaluate: Callable[[Arguments, Call], Result]
    summary: str
    is_view: bool = False
    evaluate_into: Callable[[Arguments, Call, torch.Tensor], torch.Tensor] | None = None
    evaluate_drawing: Callable[[Arguments, Call, Rows], Result] | None = None
    indexed: Callable[[Call], Indexed] | None = None


@dataclass(frozen=True)
class Indexed:
    """Input ``index`` of a call has indices along axis ``dim`` of input ``table``.

    ``wraps``: negative ones count from the end.
    """

    table: int
    index: int
    dim: int
    wraps: bool = False


def tensors_of(values: Arguments) -> list[torch.Tensor]:
    """All of ``values``, which are tensors."""
    found = [v for v in values if isinstance(v, torch.Tensor)]
    assert len(found) == len(values), "a number where a tensor stands"
    return found


def tensor_of(values: Arguments, k: int) -> torch.Tensor:
    value = values[k]
    assert isinstance(value, torch.Tensor), "a number where a tensor stands"
    return value


def axis_names(ndim: int, prefix: str = "a") -> AxisNames:
    """``a0, a1, ...``"""
    return tuple(f"{prefix}{k}" for k in range(ndim))


def told(call: Call, kind: type[C]) -> C:
    """``call``, which is of that kind."""
    assert isinstance(call, kind), f"{call} is no {kind.__name__}"
    return call


def dim_of(call: Call) -> int:
    """The axis that ``call`` goes along."""
    dim = told(call, AlongAxis).dim
    assert dim is not None, f"{call.name} goes along an axis"
    return dim


def known(sizes: Sequence[Size]) -> tuple[int, ...]:
    """``sizes`` with -1 for scalars."""
    return tuple(n if isinstance(n, int) else -1 for n in sizes)
