# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""One padded tensor where Inductor pads a matrix product's operand twice, as it is and transposed.

before, of the gradient ``y`` of logits, whose length no wide load takes::

    %pad = aten.constant_pad_nd(%y, [0, 7])
    %permute = aten.permute(%y, [1, 0])
    %pad_1 = aten.constant_pad_nd(%permute, [0, 0, 0, 7])
    %sum = aten.sum(%y, [0])

after::

    %pad = aten.constant_pad_nd(%y, [0, 7])
    %permute_1 = aten.permute(%pad, [1, 0])
    %sum_1 = aten.sum(%pad, [0])
    %slice = aten.slice(%sum_1, 0, 0, 50257)

``y`` itself then need not be stored.  A product reads its operands in any order of memory, and with any distance
between rows: one that reads ``y`` as it is, or transposed, reads a slice of what was padded, whose rows begin aligned.
Where it would give a row for each column of ``y``, as the gradient of a classifier's weight does, it gives rows for
the padding too, and they are cut off: of 8192 x 30522 logits that product took 1054 us on an H200, for want of a fast
kernel for so many rows, and with 30528 rows 646.
Where no region that stores the padded tensor is taken, the graph is left as it was: Inductor's own kernels make its two
pads in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .translation import argument, known, tensor_of

_PAD = torch.ops.aten.constant_pad_nd.default
_PERMUTE = torch.ops.aten.permute.default
_MM = torch.ops.aten.mm.default
_PRODUCTS = (_MM, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_SUM = torch.ops.aten.sum.dim_IntList
_SLICE = torch.ops.aten.slice.Tensor
ROWS = 128
"""Of a product's tile: as long as padding begins none, it costs nothing."""


@dataclass(frozen=True)
class SharedPad:
    """The one pad of a tensor ``y``, and what was made of it.  ``replaced``: pairs of the calls, one of the other, that
    were made of ``y``, and the node that stands for the last.  ``products``: pairs of a permutation of ``y`` and the
    slice that stands for a product of it.  ``cut``: the slice that products read."""

    y: Node
    pad: Node
    replaced: list[tuple[tuple[Call, ...], Node]]
    products: list[tuple[Call, Node]]
    cut: Node | None

    def undo(self) -> None:
        """Pad ``y`` twice again, and sum it as it is: for a graph in which another kernel writes ``y``."""
        graph = self.pad.graph
        for calls, now in self.replaced:
            again = self.y
            with graph.inserting_before(now):
                for call in calls:
                    again = call.put(graph, again)
            self._stand_for(now, again)
        for permute, now in self.products:
            whole = cast(Node, now.args[0])
            with graph.inserting_before(whole):
                again = graph.call_function(_MM, (permute.put(graph, self.y), *whole.args[1:]))
            again.meta |= now.meta
            self._stand_for(now, again)
        if self.cut is not None:
            self.cut.replace_all_uses_with(self.y, propagate_meta=False)
            graph.erase_node(self.cut)
        if not self.pad.users:
            graph.erase_node(self.pad)

    def _stand_for(self, now: Node, again: Node) -> None:
        """``again`` in place of ``now``, which goes with all that only it was made of, up to the pad."""
        now.replace_all_uses_with(again, propagate_meta=False)
        while now is not self.pad and not now.users:
            gone, now = now, cast(Node, now.args[0])
            self.pad.graph.erase_node(gone)


@dataclass(frozen=True)
class Call:
    """A node that is gone, of one tensor and numbers: all but the tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]

    @staticmethod
    def of(node: Node) -> Call:
        return Call(node.target, node.args[1:], dict(node.kwargs), dict(node.meta))

    def put(self, graph: Graph, x: Node) -> Node:
        found = graph.call_function(self.target, (x, *self.args), self.kwargs)
        found.meta |= self.meta
        return found


def share_pads(graph: Graph, *, only_gpu: bool = False) -> list[SharedPad]:
    """``only_gpu``: of tensors on a GPU alone, where regions elsewhere are never taken."""
    found: list[SharedPad | None] = []
    for y in list(graph.nodes):
        value = y.meta.get("val")
        if y.op == "call_function" and isinstance(value, torch.Tensor) and not (only_gpu and not value.is_cuda):
            found.append(_share(graph, y))
    return [s for s in found if s is not None]


def _share(graph: Graph, y: Node) -> SharedPad | None:
    """Of ``y``: pads behind its end that products read, as it is or transposed, as one."""
    shape = tensor_of(y).shape
    if any(known(n) < 0 for n in shape):
        return None
    plain = [u for u in y.users if _is_pad_for_products(u)]
    turned = [(p, u) for p in y.users if p.target is _PERMUTE for u in p.users if _is_pad_for_products(u)]
    widths = {_after(u, None) for u in plain} | {_after(u, p) for p, u in turned}
    values = {argument(u, 2, "value", 0) for u in (*plain, *(u for _, u in turned))}
    read = [u for u in y.users if _is_read_by_products(u)]
    if not (turned or (plain and read)) or len(widths) != 1 or len(values) != 1:
        return None
    (after,), value = widths, cast(float, next(iter(values)))
    if min(after) < 0:
        return None
    whole = [n for k in reversed(range(len(shape))) for n in (0, after[k])]
    with graph.inserting_after(y):
        pad = graph.call_function(_PAD, (y, whole, value))
    pad.meta |= {**(plain or [u for _, u in turned])[0].meta, "val": _PAD(tensor_of(y), whole, value)}
    for u in plain:
        u.replace_all_uses_with(pad)
        graph.erase_node(u)
    replaced = [((Call.of(p), Call.of(u)), _turn_padded(graph, pad, p, u)) for p, u in turned]
    replaced += _sum_padded(graph, y, pad, after)
    products = [found for p in read for found in _multiply_padded(graph, pad, p, after)]
    return SharedPad(y, pad, replaced, products, _cut(graph, y, pad, after, read))


def _turn_padded(graph: Graph, pad: Node, permute: Node, twin: Node) -> Node:
    """``pad``, transposed, instead of its ``twin``, which pads what ``permute`` gives."""
    with graph.inserting_before(twin):
        found = graph.call_function(_PERMUTE, (pad, permute.args[1]))
    found.meta |= {**twin.meta, "val": _PERMUTE(tensor_of(pad), permute.args[1])}
    twin.replace_all_uses_with(found)
    graph.erase_node(twin)
    if not permute.users:
        graph.erase_node(permute)
    return found


def _multiply_padded(graph: Graph, pad: Node, permute: Node, after: Sequence[int]) -> list[tuple[Call, Node]]:
    """Products of the transposed matrix have rows for the padding, which are cut off, where these are no tile more."""
    if permute.target is not _PERMUTE or len(after) != 2 or after[0]:
        return []
    if [d % 2 for d in cast(Sequence[int], permute.args[1])] != [1, 0]:
        return []
    rows = known(tensor_of(permute).shape[0])
    if -(-rows // ROWS) != -(-(rows + after[1]) // ROWS):
        return []
    found: list[tuple[Call, Node]] = []
    for u in [u for u in permute.users if u.target is _MM and u.args[0] is permute]:
        with graph.inserting_before(u):
            turned = graph.call_function(_PERMUTE, (pad, permute.args[1]))
            whole = graph.call_function(_MM, (turned, *u.args[1:]))
            cut = graph.call_function(_SLICE, (whole, 0, 0, rows))
        turned.meta |= {**permute.meta, "val": _PERMUTE(tensor_of(pad), permute.args[1])}
        whole.meta |= {**u.meta, "val": _MM(tensor_of(turned), tensor_of(cast(Node, u.args[1])))}
        cut.meta |= {**u.meta, "val": _SLICE(tensor_of(whole), 0, 0, rows)}
        found.append((Call.of(permute), cut))
        u.replace_all_uses_with(cut)
        graph.erase_node(u)
    if not permute.users:
        graph.erase_node(permute)
    return found


def _is_read_by_products(n: Node) -> bool:
    """Is it a product, or does it turn a matrix for products alone?"""
    return n.target in _PRODUCTS or (
        n.target is _PERMUTE and bool(n.users) and all(u.target in _PRODUCTS for u in n.users)
    )


def _cut(graph: Graph, y: Node, pad: Node, after: Sequence[int], read: Sequence[Node]) -> Node | None:
    """A slice of ``pad`` for those of ``read`` that are left: by rows, of which it has the beginnings."""
    padded = [k for k, n in enumerate(after) if n]
    left = [u for u in read if y in u.all_input_nodes]
    if not left or padded != [tensor_of(y).ndim - 1]:
        return None
    with graph.inserting_before(min(left)):
        found = graph.call_function(_SLICE, (pad, padded[0], 0, tensor_of(y).shape[-1]))
    found.meta |= {**y.meta, "val": _SLICE(tensor_of(pad), *found.args[1:])}
    for u in left:
        u.replace_input_with(y, found)
    return found


def _sum_padded(graph: Graph, y: Node, pad: Node, after: Sequence[int]) -> list[tuple[tuple[Call, ...], Node]]:
    """Sums along other axes are of what is stored, and cut to their length behind it."""
    padded = [k for k, n in enumerate(after) if n]
    replaced: list[tuple[tuple[Call, ...], Node]] = []
    for u in [u for u in y.users if u.target is _SUM]:
        if not u.args[1:] or not u.args[1]:  # torch reads no axes as all of them
            continue
        dims = [d % len(after) for d in cast(Sequence[int], u.args[1])]
        if len(padded) != 1 or padded[0] in dims:
            continue
        (k,) = padded
        at = k if argument(u, 2, "keepdim", False) else k - sum(d < k for d in dims)
        with graph.inserting_before(u):
            whole = graph.call_function(_SUM, (pad, *u.args[1:]), dict(u.kwargs))
            cut = graph.call_function(_SLICE, (whole, at, 0, tensor_of(y).shape[k]))
        whole.meta |= {**u.meta, "val": _SUM(tensor_of(pad), *u.args[1:], **u.kwargs)}
        cut.meta |= {**u.meta, "val": _SLICE(tensor_of(whole), *cut.args[1:])}
        replaced.append(((Call.of(u),), cut))
        u.replace_all_uses_with(cut)
        graph.erase_node(u)
    return replaced


def _is_pad_for_products(n: Node) -> bool:
    return n.target is _PAD and bool(n.users) and all(u.target in _PRODUCTS for u in n.users)


def _after(pad: Node, permute: Node | None) -> tuple[int, ...]:
    """What is added behind each axis of the tensor that ``permute`` turns; -1s where something is added before one,
    or where a width is a symbol."""
    widths = cast(Sequence[object], pad.args[1])
    ndim = tensor_of(pad).ndim
    if not all(isinstance(n, int) for n in widths):
        return (-1,) * ndim
    widths = cast(Sequence[int], widths)
    before, behind = [0] * ndim, [0] * ndim
    for k in range(len(widths) // 2):
        before[ndim - 1 - k], behind[ndim - 1 - k] = widths[2 * k], widths[2 * k + 1]
    if any(before) or any(n < 0 for n in behind):
        return (-1,) * ndim
    order = list(range(ndim)) if permute is None else [d % ndim for d in cast(Sequence[int], permute.args[1])]
    found = [0] * ndim
    for k, d in enumerate(order):
        found[d] = behind[k]
    return tuple(found)
