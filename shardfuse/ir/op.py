"""Ops: what an Expr, or a record of a definition, does to its inputs.  One frozen class for each way to do it.

A class holds what its op is told beside its inputs, and refuses what cannot be.  In a definition, sizes and indices may
be scalars of the fusion; ``bind`` puts numbers in their place.  A printed program shows an op as its name, its inputs,
and those of its fields that have no default or differ from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import ClassVar, Literal, Self, cast

from ..mesh import ParallelType
from .dtype import DataType
from .scalar import Number, Scalar, Size
from .stream import Stream
from .window import Read

ReductionKind = Literal["sum", "prod", "max", "min", "any", "all"]
StatisticKind = Literal["online_softmax", "welford"]
RandomKind = Literal["uniform", "normal"]
MoveKind = Literal["send", "broadcast", "scatter", "gather"]


@cache
def _shown(op: type[_Op]) -> tuple[Field[object], ...]:
    """The fields of an op but for its name."""
    return tuple(f for f in fields(op) if f.name not in ("name", "kind"))


@dataclass(frozen=True)
class _Op:
    """What all ops have."""

    def arguments(self) -> list[tuple[str, object]]:
        """What a printed program shows behind the inputs: names and values."""
        given = [(f, self.__dict__[f.name]) for f in _shown(type(self))]
        return [(f.name, value) for f, value in given if f.default is MISSING or value != f.default]

    def scalars(self) -> list[Scalar]:
        """The scalars of a definition among what it is told."""
        return [s for f in _shown(type(self)) for s in _scalars_in(self.__dict__[f.name])]

    def told(self, value_of: Callable[[Scalar], Number]) -> Self:
        """With numbers in place of scalars."""
        if not self.scalars():
            return self
        return replace(self, **{f.name: _told(self.__dict__[f.name], value_of) for f in _shown(type(self))})


def _scalars_in(value: object) -> list[Scalar]:
    if isinstance(value, tuple):
        return [v for v in cast("tuple[object, ...]", value) if isinstance(v, Scalar)]
    return [value] if isinstance(value, Scalar) else []


def _told(value: object, value_of: Callable[[Scalar], Number]) -> object:
    if isinstance(value, tuple):
        return tuple(_told(v, value_of) for v in cast("tuple[object, ...]", value))
    return value_of(value) if isinstance(value, Scalar) else value


def numbers(sizes: Sequence[Size]) -> tuple[int, ...]:
    """``sizes`` of a bound Expr, where no scalar is left."""
    assert all(isinstance(n, int) for n in sizes), f"{sizes} are not known yet"
    return cast("tuple[int, ...]", tuple(sizes))


def _check_axes(axes: Sequence[int]) -> None:
    assert len({*axes}) == len(axes), f"{axes} have an axis twice"
    assert min(axes, default=0) >= 0, f"{axes} count from the end"


# element by element


@dataclass(frozen=True)
class Pointwise(_Op):
    """An entry of the table of pointwise ops (``ops/table.py``), of tensors and numbers."""

    name: str


@dataclass(frozen=True)
class Cast(_Op):
    """To the dtype of the output; ``dtype`` is kept where a definition says it."""

    name: ClassVar[str] = "cast"
    dtype: DataType | None = None


@dataclass(frozen=True)
class Set(_Op):
    """A copy on the same ranks, in the order in which the output is stored."""

    name: ClassVar[str] = "set"


# the same elements under other axes


class View(_Op):
    """Computes nothing: the same elements under regrouped axes."""


@dataclass(frozen=True)
class Broadcast(View):
    """Axes of 1 where ``new`` is true, and those of the input in between."""

    name: ClassVar[str] = "broadcast"
    new: tuple[bool, ...]


@dataclass(frozen=True)
class Expand(View):
    """Axes of 1 repeated to ``shape``; in a definition, -1 keeps an axis."""

    name: ClassVar[str] = "expand"
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Squeeze(View):
    """Without ``axes``, which have one element."""

    name: ClassVar[str] = "squeeze"
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_axes(self.axes)


@dataclass(frozen=True)
class Permute(View):
    """Axis k of the output is axis ``dims[k]`` of the input."""

    name: ClassVar[str] = "permute"
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        assert sorted(self.dims) == list(range(len(self.dims))), f"{self.dims} are no order of axes"


@dataclass(frozen=True)
class Reshape(View):
    """The same elements in row-major order under ``shape``; in a definition, one size may be -1.

    segments: into how many an axis is cut for sums that do not depend on the number of ranks; 0 for any other reshape.
    """

    name: ClassVar[str] = "reshape"
    shape: tuple[Size, ...]
    segments: int = 0


@dataclass(frozen=True)
class Relabel(_Op):
    """The same storage under other roots."""

    name: ClassVar[str] = "relabel"


@dataclass(frozen=True)
class Window(_Op):
    """A stored tensor read at other places along some axes: see ``ir/window.py``."""

    name: ClassVar[str] = "window"
    reads: tuple[Read, ...]

    def __post_init__(self) -> None:
        _check_axes([read.axis for read in self.reads])


# tensors made of numbers


class Factory(_Op):
    """Makes a tensor of a shape and numbers; each element depends on its unsharded index alone."""


@dataclass(frozen=True)
class Full(Factory):
    """The one input everywhere."""

    name: ClassVar[str] = "full"
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Iota(Factory):
    """``start + step * k``, where k is the unsharded index along the only axis."""

    name: ClassVar[str] = "iota"
    shape: tuple[Size, ...]
    start: Number | Scalar
    step: Number | Scalar

    def __post_init__(self) -> None:
        assert len(self.shape) == 1, f"an iota has one axis, not {self.shape}"

    @property
    def counting(self) -> tuple[Number, Number]:
        """Start and step, of a bound Expr."""
        assert not isinstance(self.start, Scalar), f"{self.start} is not known yet"
        assert not isinstance(self.step, Scalar), f"{self.step} is not known yet"
        return self.start, self.step


@dataclass(frozen=True)
class Random(Factory):
    """Numbers by the row-major index of each element.  Inputs: two parameters of ``name``, a seed and an offset.

    drawn: are seed and offset those of torch's generator, and not the caller's?
    """

    name: RandomKind
    shape: tuple[Size, ...]
    drawn: bool


# reductions


@dataclass(frozen=True)
class Reduce(_Op):
    """Over ``axes``, which the output does not have.

    mesh_dims: the mesh dimensions on which the reduced axes are, of a collective; none of a local reduction.
    segments: into how many the axis was cut of which each is reduced by itself (see ``Reshape``), else 0.
    """

    kind: ReductionKind
    axes: tuple[int, ...]
    mesh_dims: tuple[ParallelType, ...] = ()
    segments: int = 0

    def __post_init__(self) -> None:
        _check_axes(self.axes)
        assert len(self.mesh_dims) in (0, len(self.axes)), f"axes {self.axes} on {self.mesh_dims}"

    @property
    def name(self) -> str:
        return self.kind

    def arguments(self) -> list[tuple[str, object]]:
        segments = [("segments", self.segments)] if self.segments else []
        return [("axes", self.axes), *_mesh(self.mesh_dims), *segments]


@dataclass(frozen=True)
class Statistic(_Op):
    """Inside of one kernel, several reductions over ``axes`` in one walk, with an output for each.

    online_softmax: of ``x`` the maximum, the sum of exp(x - maximum) and, where it is wanted, the sum of x - maximum.
    welford: the sum, and the sum of squared distances to the mean.
    """

    kind: StatisticKind
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_axes(self.axes)

    @property
    def name(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Pick(_Op):
    """Inside of one kernel: of each row of the first input the element at the second, and whether there is one."""

    name: ClassVar[str] = "pick"


# over a mesh


@dataclass(frozen=True)
class Reshard(_Op):
    """The same logical axes, sharded otherwise over ``mesh_dims``.

    is_exchange: between any two layouts of one axis, by one all-to-all.
    stream: of a gather whose pieces are chunks, which come one by one.
    """

    name: ClassVar[str] = "set"
    mesh_dims: tuple[ParallelType, ...]
    is_exchange: bool = False
    stream: Stream | None = None

    def __post_init__(self) -> None:
        assert self.mesh_dims, "a sharding changes over some mesh dimension"
        assert self.stream is None or len(self.mesh_dims) == 1, f"chunks are gathered over {self.mesh_dims}"

    def arguments(self) -> list[tuple[str, object]]:
        return [("mesh", self.mesh_dims), ("exchange", True)] if self.is_exchange else _mesh(self.mesh_dims)


def _mesh(dims: tuple[ParallelType, ...]) -> list[tuple[str, object]]:
    return [("mesh", dims[0] if len(dims) == 1 else dims)] if dims else []


@dataclass(frozen=True)
class Move(_Op):
    """From one mesh to another, by one call."""

    name: ClassVar[str] = "set"
    move: MoveKind


@dataclass(frozen=True)
class OfRank(_Op):
    """Inside of one kernel: what rank ``rank`` (its index along a mesh dimension) has of the input, which all send."""

    name: ClassVar[str] = "of_rank"
    rank: int

    def __post_init__(self) -> None:
        assert self.rank >= 0, f"{self.rank} is no index of a rank"


# chunks


@dataclass(frozen=True)
class StreamSlice(_Op):
    """Of the input the chunk of that stage which the Expr works on."""

    name: ClassVar[str] = "stream_slice"
    stream: Stream


@dataclass(frozen=True)
class StreamCat(_Op):
    """A tensor of its chunks in the order of their stages, or of equal parts of one axis."""

    name: ClassVar[str] = "stream_cat"
    stream: Stream


# torch calls


@dataclass(frozen=True)
class Call(_Op):
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
        _check_axes(self.dims)


# numbers on the host


@dataclass(frozen=True)
class SizeOf(_Op):
    """The product of the unsharded extents of ``dims``."""

    name: ClassVar[str] = "size"
    dims: tuple[int, ...]


@dataclass(frozen=True)
class RngSeed(_Op):
    """The seed of torch's generator, drawn in every call."""

    name: ClassVar[str] = "rng_seed"


@dataclass(frozen=True)
class RngOffset(_Op):
    """The offset that was drawn with the seed that is the input."""

    name: ClassVar[str] = "rng_offset"


ViewOp = Broadcast | Expand | Squeeze | Permute | Reshape
Op = (
    Pointwise | Cast | Set | ViewOp | Relabel | Window | Full | Iota | Random
    | Reduce | Statistic | Pick | Reshard | Move | OfRank | StreamSlice | StreamCat | Call
)  # fmt: skip
"""What an Expr does."""
HostOp = Pointwise | Cast | RngSeed | RngOffset
"""What is worked out on the host in every call."""
RecordOp = Pointwise | Cast | Set | ViewOp | Full | Iota | Random | Reduce | Call | SizeOf | RngSeed | RngOffset
"""What a definition says."""
