# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""A region of a graph of torch.compile as a definition: what the table of aten ops is written against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch.fx import Node

from ..frontend.definition import FusionDefinition
from ..ir.dtype import DataType
from ..ir.scalar import Number, Scalar
from ..ir.tensor_view import TensorView
from ..ops.builder import Operand
from .compile_errors import UntranslatableError

Size = int | Scalar
Value = TensorView | tuple[TensorView, ...]
Rule = Callable[["Translation", Node], Value]
"""Records in the translation's definition what a node does; raises ``UntranslatableError`` where it cannot."""


class Translation:
    """Nodes recorded so far, in a definition whose inputs are the tensors and numbers that the region reads.

    ``group``: the process group of its collectives.
    """

    def __init__(self) -> None:
        self.fd = FusionDefinition()
        self.fd.fusion.wraps_integers = True
        self.ops = self.fd.ops
        self.values: dict[Node, Value | Scalar] = {}
        self.given: set[Node] = set()
        self.numbers: list[Node] = []
        self.group: str | None = None

    def add_input(self, node: Node) -> None:
        """A tensor that the region reads."""
        tensor = tensor_of(node)
        order = memory_order(tensor)
        self.given.add(node)
        self.values[node] = self.fd.define_tensor(
            shape=[known(n) for n in tensor.shape],
            dtype=data_type(tensor.dtype),
            is_cpu=tensor.device.type == "cpu" and tensor.ndim == 0,
            stride_order=None if order is None else stride_places(order),
        )

    def add_number(self, node: Node) -> None:
        """An integer of the graph that the region reads: a size."""
        self.values[node] = self.fd.define_scalar(dtype=DataType.Int)
        self.numbers.append(node)

    def within(self, group: str) -> None:
        """A collective of a process group; all of a region are of one.  Raises ``UntranslatableError``."""
        if self.group not in (None, group):
            raise UntranslatableError("a process group", group, f"that of the other collectives, {self.group!r}")
        self.group = group

    # what rules ask for

    def is_made(self, *nodes: Node) -> bool:
        """Are ``nodes`` computed here?  An operand of what is given may have been changed since it was read."""
        return all(n in self.values and n not in self.given for n in nodes)

    def tensor(self, value: object) -> TensorView:
        found = self.values.get(value) if isinstance(value, Node) else None
        if not isinstance(found, TensorView):
            raise UntranslatableError("an argument", value, "a tensor of the graph")
        return found

    def operand(self, value: object) -> Operand:
        """A tensor, a size or a number."""
        if isinstance(value, Node):
            found = self.values.get(value)
            if isinstance(found, TensorView | Scalar):
                return found
        elif isinstance(value, bool | int | float):
            return value
        raise UntranslatableError("an argument", value, "a tensor, an integer of the graph or a real number")

    def size(self, value: object) -> Size:
        found = self.operand(value)
        if isinstance(found, Scalar) or (isinstance(found, int) and not isinstance(found, bool)):
            return found
        raise UntranslatableError("a size", value, "an integer")

    def sizes(self, values: object) -> list[Size]:
        return [self.size(v) for v in cast(Sequence[object], values)]

    def literal_axes(self, values: object) -> list[int] | None:
        """Axes; None where none are named, which stands for all of them."""
        given = [values] if isinstance(values, int) else cast("Sequence[int] | None", values)
        return list(given) if given else None


def argument(node: Node, place: int, name: str, default: object = None) -> object:
    """An argument of a node, by position or by name."""
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get(name, default)


def check_arguments(node: Node, most: int, *names: str) -> None:
    """No more than ``most`` arguments by position, and by name only these, where they say something."""
    extra = [k for k, v in node.kwargs.items() if k not in names and v is not None and v is not False]
    if len(node.args) > most or extra:
        raise UntranslatableError(f"{node.target}", extra or f"{len(node.args)} arguments", "fewer of them")


def tensor_of(node: Node) -> torch.Tensor:
    """The fake tensor of a node.  Raises ``UntranslatableError`` where it has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise UntranslatableError(node.name, type(value).__name__, "one tensor")
    return value


def data_type(dtype: object) -> DataType:
    try:
        return DataType.from_torch(cast(torch.dtype, dtype))
    except KeyError:
        raise UntranslatableError("a dtype", dtype, "one that shardfuse has") from None


def known(size: int | torch.SymInt) -> int:
    """The number of a static size; -1 for a symbol."""
    return size if isinstance(size, int) else -1


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The dims, the outermost in memory first; None where that is their own order, or where no strides say it.

    A dim of one element, and one that is expanded, has no place in memory of its own: it stays beside its neighbours.
    """
    strides = [hinted(s) for s in tensor.stride()]
    moving = [d for d in range(tensor.ndim) if hinted(tensor.shape[d]) != 1 and strides[d] != 0]
    ranked = sorted(moving, key=lambda d: -strides[d])
    if ranked == moving:
        return None
    places = iter(ranked)
    return [next(places) if d in moving else d for d in range(tensor.ndim)]


def stride_places(order: Sequence[int]) -> list[int]:
    """For each dim its place in memory, 0 innermost."""
    return [len(order) - 1 - order.index(d) for d in range(len(order))]


def hinted(size: int | torch.SymInt) -> int:
    """A size as a number: that of the call for which the graph was made, where it is symbolic."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_same_size(a: object, b: object) -> bool:
    """Without a guard: symbols that happen to be equal are not the same."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return cast(bool, a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def checked(node: Node, value: Value, meta: object) -> Value:
    """``value``, which has the dtype and the static sizes that the graph says.

    A symbol of a graph is never 1, so that an axis of 1 beside one has been left without its elements.
    """
    if isinstance(value, tuple):
        return tuple(
            cast(TensorView, checked(node, v, m)) for v, m in zip(value, cast(tuple[object], meta), strict=True)
        )
    assert isinstance(meta, torch.Tensor), "rules are asked for nodes that have tensors"
    if value.dtype is not data_type(meta.dtype):
        raise UntranslatableError(f"the result of {node.target}", value.dtype, repr(data_type(meta.dtype)))
    sizes = [known(n) for n in meta.shape]
    agree = len(sizes) == value.ndim and all(
        a == b or (min(a, b) < 0 and 1 not in (a, b)) for a, b in zip(sizes, value.shape, strict=True)
    )
    if not agree:
        raise UntranslatableError(f"the shape of {node.target}", list(value.shape), str(sizes))
    return value


def literal_number(value: object) -> Number:
    if isinstance(value, bool | int | float):
        return value
    raise UntranslatableError("an argument", value, "a real number")


Table = Mapping[object, Rule]
