"""What a torch call is: how the axes of its inputs and outputs meet, and how torch does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..ir.expr import Number

AxisNames = tuple[str, ...]
Attributes = Mapping[str, object]
Shapes = Sequence[Sequence[int]]
Arguments = Sequence[torch.Tensor | Number]
Result = torch.Tensor | tuple[torch.Tensor, ...]


DRAWN = ("rng_seed", "rng_offset")
"""Roles of numbers that no caller gave: what a call that draws is told to draw from."""


@dataclass(frozen=True)
class Signature:
    """Names for the axes of each input tensor and of each output, as in an einsum.

    Axes of one name are one axis (or 1 in some of the inputs).  A name that no output has is contracted: where it is
    sharded, each rank's result is a partial sum.  A trailing ``*`` marks an axis that may not be sharded.
    ``extents``: of the names that outputs alone have; -1 where the sizes are not known yet.
    """

    inputs: tuple[AxisNames, ...]
    outputs: tuple[AxisNames, ...]
    extents: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class TorchCall:
    """``signature(shapes, attributes)``: shapes of the input tensors, -1 where symbolic.

    ``evaluate(values, attributes)``: tensors and numbers in the order of the inputs.  ``is_view``: the result is a view
    of the input's storage.  ``summary``: one line for the list of ops.
    ``draws``: it has the attribute ``rows`` when it is evaluated, a function that gives the unsharded number of each of
    this rank's rows of the input whose role is ``query``, row-major over all axes but the last two.
    ``indexed(attributes)``: of a call that reads or writes at indices, what those are.
    ``evaluate_into(values, attributes, out)``: as ``evaluate``, of a call that can write where it is told.
    """

    signature: Callable[[Shapes, Attributes], Signature]
    evaluate: Callable[[Arguments, Attributes], Result]
    summary: str
    is_view: bool = False
    evaluate_into: Callable[[Arguments, Attributes, torch.Tensor], torch.Tensor] | None = None
    draws: bool = False
    indexed: Callable[[Attributes], Indexed] | None = None


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


def integer(attributes: Attributes, key: str) -> int:
    value = attributes[key]
    assert isinstance(value, int), f"{key} is no number yet"
    return value


def integers(attributes: Attributes, key: str) -> tuple[int, ...]:
    value = attributes[key]
    assert isinstance(value, tuple), f"{key} is no tuple"
    return tuple(n if isinstance(n, int) else -1 for n in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
