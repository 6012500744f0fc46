"""Ops that are one call of torch each, as far as they have parameters beside their inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from .base_op import BaseOp, check_axes
from .dtype import DataType
from .scalar import Number, Scalar, Size


@dataclass(frozen=True)
class Call(BaseOp):
    """The entry of the table of torch calls (``ops/torch_calls.py``) that has this name."""

    name: str


@dataclass(frozen=True)
class WithRoles(Call):
    """A call whose inputs may be left out.  ``roles``: the parameter that each input is.

    dtype: of the result, where the definition says it.
    """

    roles: tuple[str, ...]
    dtype: DataType | None = None

    def arguments(self) -> list[tuple[str, object]]:
        return [("roles", self.roles), *([] if self.dtype is None else [("dtype", self.dtype.torch)])]


@dataclass(frozen=True)
class AlongAxis(Call):
    """A call along axis ``dim``, or where that is ``None`` along the flattened tensor."""

    dim: int | None


@dataclass(frozen=True)
class Argsort(Call):
    """The indices that sort axis ``dim``."""

    name: str = field(default="argsort", init=False)
    dim: int
    descending: bool
    stable: bool


@dataclass(frozen=True)
class TopK(Call):
    """The ``k`` largest or smallest along axis ``dim``, and their indices."""

    name: str = field(default="topk", init=False)
    k: Size
    dim: int
    largest: bool
    sorted: bool


@dataclass(frozen=True)
class Embedding(Call):
    """Rows of the second input at the indices that the first has."""

    name: str = field(default="embedding", init=False)
    padding_idx: Size | None = None
    max_norm: Number | Scalar | None = None
    norm_type: Number | Scalar | None = None


class ShapeCall(Call):
    """Moves elements, and may be said by windows."""


@dataclass(frozen=True)
class Slice(ShapeCall):
    """Of each axis the elements from start to stop by step; indices as Python has them."""

    name: str = field(default="slice", init=False)
    starts: tuple[Size, ...]
    stops: tuple[Size, ...]
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.stops) == len(self.steps), "a start, a stop and a step for each axis"
        assert min(self.steps, default=1) > 0, f"{self.steps} are no steps forward"


@dataclass(frozen=True)
class Select(ShapeCall):
    """Of axis ``dim`` the index that is the second input; the output lacks the axis."""

    name: str = field(default="select", init=False)
    dim: int


@dataclass(frozen=True)
class Pad(ShapeCall):
    """The number that is the second input before and after each axis.  ``widths``: in pairs, the first axis first."""

    name: str = field(default="pad", init=False)
    widths: tuple[Size, ...]

    def __post_init__(self) -> None:
        assert len(self.widths) % 2 == 0, f"{self.widths} are no pairs"


@dataclass(frozen=True)
class Cat(ShapeCall):
    """One input after another along axis ``dim``."""

    name: str = field(default="cat", init=False)
    dim: int


@dataclass(frozen=True)
class Flip(ShapeCall):
    """The axes ``dims`` in reverse."""

    name: str = field(default="flip", init=False)
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        check_axes(self.dims)
